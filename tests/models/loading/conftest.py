"""Tiny Llama checkpoints with random weights: as Hugging Face folders and as GGUF files."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest
from safetensors.numpy import save_file

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 480,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
Tensors = dict[str, np.ndarray]


def _random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Every tensor of a Llama checkpoint, by its Hugging Face name."""
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim", e // heads)
    linear = {
        "self_attn.q_proj": (heads * d, e),
        "self_attn.k_proj": (kv_heads * d, e),
        "self_attn.v_proj": (kv_heads * d, e),
        "self_attn.o_proj": (e, heads * d),
        "mlp.gate_proj": (f, e),
        "mlp.up_proj": (f, e),
        "mlp.down_proj": (e, f),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{norm}_layernorm.weight": (e,) for norm in ("input", "post_attention")}
        for name, shape in linear.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if config.get("mlp_bias" if name.startswith("mlp") else "attention_bias"):
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """config.json of the tiny checkpoints: untied, grouped-query attention, no biases."""
    return dict(_CONFIG)


@pytest.fixture
def random_tensors() -> Callable[..., Tensors]:
    """(config, seed=0) -> every tensor of its checkpoint."""
    return _random_tensors


@pytest.fixture
def fused() -> Callable[..., dict[str, Any]]:
    """(tensors, config) -> the parameter tree that loading must give."""
    return _fused


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """Writes a folder of the tiny config with changes; `tensors` takes the place of random ones."""

    def write(tensors: Tensors | None = None, **changes: Any) -> Path:
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        config = _CONFIG | changes
        (path / "config.json").write_text(json.dumps(config))
        save_file(_random_tensors(config) if tensors is None else tensors, path / "model.safetensors")
        shutil.copy(tiny_model / "tokenizer.json", path)
        return path

    return write


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    for old, new in _GGUF_NAMES.items():
        name = name.replace(old, new)
    return name


def _interleave(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K: the two halves of each head's rows alternate."""
    return tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


@pytest.fixture
def gguf_file(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """Writes a GGUF file of the tiny config with changes; matrices are quantised to a kind, or bytes of it already."""

    def write(
        tensors: Tensors,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        metadata: Callable[[gguf.GGUFWriter], None] = lambda _: None,
        architecture: str = "llama",
        **changes: Any,
    ) -> Path:
        config = _CONFIG | changes
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        _add_settings(writer, config)
        _add_tokenizer(writer, tiny_model)
        metadata(writer)
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        for name, given in tensors.items():
            tensor = _interleave(given, head_dim) if ".q_proj" in name or ".k_proj" in name else given
            if tensor.dtype == np.uint8:
                writer.add_tensor(_gguf_name(name), tensor, raw_dtype=kind)
            elif tensor.ndim == 1:
                writer.add_tensor(_gguf_name(name), tensor)
            else:
                writer.add_tensor(_gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, tiny_model: Path) -> None:
    model = json.loads((tiny_model / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (len(model["vocab"]) - 3))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _fused(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree of a checkpoint, written out head by head."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    group = heads // kv_heads

    def qkv(layer: str, kind: str) -> np.ndarray:
        q, k, v = (tensors[f"{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        d = len(k) // kv_heads
        return np.stack(
            [
                np.stack(
                    [q[(j * group + g) * d : (j * group + g + 1) * d] for g in range(group)]
                    + [k[j * d : (j + 1) * d], v[j * d : (j + 1) * d]]
                )
                for j in range(kv_heads)
            ]
        )

    def layer(i: int) -> dict[str, Any]:
        name = f"model.layers.{i}"
        makers: dict[str, Callable[[str], np.ndarray]] = {
            "qkv": lambda kind: qkv(name, kind),
            "o": lambda kind: tensors[f"{name}.self_attn.o_proj.{kind}"],
            "gate_up": lambda kind: np.stack([tensors[f"{name}.mlp.{x}_proj.{kind}"] for x in ("gate", "up")]),
            "down": lambda kind: tensors[f"{name}.mlp.down_proj.{kind}"],
        }
        tree: dict[str, Any] = {
            "attention_norm": {"weight": tensors[f"{name}.input_layernorm.weight"]},
            "mlp_norm": {"weight": tensors[f"{name}.post_attention_layernorm.weight"]},
        }
        for key, make in makers.items():
            tree[key] = {"weight": make("weight")}
            if config.get("attention_bias" if key in ("qkv", "o") else "mlp_bias"):
                tree[key]["bias"] = make("bias")
        return tree

    tree: dict[str, Any] = {
        "embed": {"weight": tensors["model.embed_tokens.weight"]},
        "layers": tuple(layer(i) for i in range(config["num_hidden_layers"])),
        "norm": {"weight": tensors["model.norm.weight"]},
    }
    if not config["tie_word_embeddings"]:
        tree["lm_head"] = {"weight": tensors["lm_head.weight"]}
    return tree
