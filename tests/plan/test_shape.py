"""Shapes of models from wherever they are written down, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxspec.config import find_config
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.loading import find_model
from jaxspec.models.spec import ModelSpec
from jaxspec.plan import shape
from jaxspec.plan.memory import plan_memory
from jaxspec.plan.shape import LatentSpec, read_shape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "max_position_embeddings": 64,
}


def written(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("model", [path.stem for path in find_config("models", "smollm2-135m").parent.glob("*.toml")])
def test_every_named_model_has_a_shape(model: str) -> None:
    found = read_shape(model)
    assert found.name == model
    assert found.sizes["layers"] > 0
    assert (found.parameters is None) == isinstance(found.spec, LatentSpec)


@pytest.mark.parametrize(
    ("model", "attention", "sizes"),
    [
        ("llama-2-7b", "MHA", (32, 32, 32, 128)),
        ("llama-3.3-70b", "GQA", (80, 64, 8, 128)),
        ("tinyllama-1.1b", "GQA", (22, 32, 4, 64)),
        ("deepseek-v3", "MLA", (61, 128, 512, 64)),
    ],
)
def test_attention_of_named_models(model: str, attention: str, sizes: tuple[int, ...]) -> None:
    found = read_shape(model)
    assert found.attention == attention
    assert tuple(found.sizes.values()) == sizes


@pytest.mark.parametrize(("kv_heads", "attention"), [(None, "MHA"), (4, "MHA"), (2, "GQA"), (1, "MQA")])
def test_a_config_alone(kv_heads: int | None, attention: str, tmp_path: Path) -> None:
    found = read_shape(written(tmp_path / "config.json", CONFIG | {"num_key_value_heads": kv_heads}))
    assert found.attention == attention
    assert found.sizes == {"layers": 2, "heads": 4, "kv_heads": kv_heads or 4, "head_dim": 16}


def test_a_folder_needs_no_weights(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    assert read_shape(str(tmp_path)).sizes == {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}


def test_a_checkpoint_that_is_quantised_already(tmp_path: Path) -> None:
    settings = {"quant_method": "jaxspec", "weights": "int4"}
    found = read_shape(written(tmp_path / "config.json", CONFIG | {"quantization_config": settings}))
    assert found.stored == "int4"
    assert plan_memory(found).weights == "int4"
    assert plan_memory(found, weights="int8").weights == "int8"


def test_a_gguf_file_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(48)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_shape(str(path))
    assert found.attention == "MQA"
    assert isinstance(found.spec, ModelSpec)
    assert (found.spec.vocab_size, found.spec.mlp_dim, found.spec.max_context) == (96, 128, 48)
    assert found.spec.tied_embeddings


@pytest.mark.model
def test_the_shape_written_beside_a_wheel_is_that_of_its_file() -> None:
    named, read = read_shape("smollm2-135m"), read_shape(str(find_model("smollm2-135m")))
    assert isinstance(named.spec, ModelSpec)
    assert isinstance(read.spec, ModelSpec)
    assert read.spec.norm_eps == pytest.approx(named.spec.norm_eps)  # a GGUF file has it in float32
    assert replace(read.spec, norm_eps=named.spec.norm_eps) == named.spec
    assert named.parameters == read.parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"architectures": []}, "names no architecture"),
        (CONFIG | {"hidden_size": "wide"}, "hidden_size"),
        (CONFIG | {"vocab_size": "large"}, "vocab_size"),
        (CONFIG | {"num_key_value_heads": 3}, "no multiple of 3"),
        (CONFIG | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config .gptq"),
        ({key: value for key, value in CONFIG.items() if key != "vocab_size"}, "vocab_size"),
        ({key: value for key, value in LATENT.items() if key != "kv_lora_rank"}, "kv_lora_rank"),
        (LATENT | {"kv_lora_rank": None}, "kv_lora_rank"),
        (LATENT | {"qk_rope_head_dim": 0}, "not above 0"),
    ],
)
def test_configs_that_cannot_be_counted(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", config)
    with pytest.raises(LoadError, match=f"config.json.*{message}"):
        read_shape(path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm3", "no models config named 'smollm3'.*llama-3.3-70b"),
        ("owner/model", "owner/model: .*config.json"),
        ("/no/such/folder", "no such file"),
        ("none.json", "none.json"),
        ("none.gguf", "no such file"),
    ],
)
def test_what_is_no_model(model: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=message):
        read_shape(model)


def test_a_named_model_without_a_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('hub = "a/b"')
    monkeypatch.setattr(shape, "locate_model", lambda model: tmp_path / f"{model}.toml")
    with pytest.raises(ConfigError, match=r"own.toml has no \[shape\]"):
        read_shape("own")
