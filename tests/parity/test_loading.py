"""Loaded parameters against transformers' own models: what it saves, and what it makes of the SmolLM2 GGUF file."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxspec.config import find_config, read_toml  # noqa: E402 (after the skips)
from jaxspec.models.loading import LoadedModel, load_model  # noqa: E402
from jaxspec.models.loading.wheel import Wheel, cached_member  # noqa: E402

pytestmark = pytest.mark.parity

SIZES = {
    "vocab_size": 480,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha-tied": {"num_key_value_heads": 8, "tie_word_embeddings": True},
    "gqa-untied": {"num_key_value_heads": 2},
    "mqa-head-dim": {"num_key_value_heads": 1, "head_dim": 32},
    "biases": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "linear-rope": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    },
    "llama3-rope": {"num_key_value_heads": 2, "head_dim": 64, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
}


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().to(torch.float32).numpy()


def _assert_same(model: LoadedModel, reference: Any) -> None:
    """Every tensor of the reference is where it belongs, and there are no others."""
    spec, state, count = model.spec, reference.state_dict(), 0
    k, g, d = spec.num_kv_heads, spec.group, spec.head_dim

    def same(found: Any, *names: str, shape: tuple[int, ...] | None = None, axis: int | None = None) -> None:
        nonlocal count
        values = [_numpy(state[name]) for name in names]
        if axis is not None:
            values = [value.reshape(k, -1, d, *value.shape[1:]) for value in values]
            expected = np.concatenate(values, axis)
        else:
            expected = np.stack(values) if len(values) > 1 else values[0]
        assert shape is None or found.shape == shape
        np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), expected)
        count += len(names)

    same(model.params["embed"]["weight"], "model.embed_tokens.weight")
    same(model.params["norm"]["weight"], "model.norm.weight")
    assert ("lm_head" in model.params) != spec.tied_embeddings
    if spec.tied_embeddings:
        count += 1  # lm_head.weight, the same tensor once more
    else:
        same(model.params["lm_head"]["weight"], "lm_head.weight")
    for i, layer in enumerate(model.params["layers"]):
        name = f"model.layers.{i}"
        same(layer["attention_norm"]["weight"], f"{name}.input_layernorm.weight")
        same(layer["mlp_norm"]["weight"], f"{name}.post_attention_layernorm.weight")
        for kind, e in (("weight", (spec.embed_dim,)), ("bias", ())):
            if kind in layer["qkv"]:
                names = [f"{name}.self_attn.{x}_proj.{kind}" for x in "qkv"]
                same(layer["qkv"][kind], *names, shape=(k, g + 2, d, *e), axis=1)
                same(layer["o"][kind], f"{name}.self_attn.o_proj.{kind}")
            if kind in layer["gate_up"]:
                same(layer["gate_up"][kind], f"{name}.mlp.gate_proj.{kind}", f"{name}.mlp.up_proj.{kind}")
                same(layer["down"][kind], f"{name}.mlp.down_proj.{kind}")
    assert count == len(state)
    np.testing.assert_allclose(spec.inv_freq, _numpy(reference.model.rotary_emb.inv_freq), rtol=3e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_models(variant: str, shard: str, dtype: str, tmp_path: Path, tiny_model: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **VARIANTS[variant])
    reference = transformers.LlamaForCausalLM(config)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter)  # biases and norms too, which begin as zeros and ones
        parameter.data = parameter.data.to(getattr(torch, dtype))  # RoPE frequencies stay in float32
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "40KB")
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    model = load_model(str(tmp_path), weights=dtype)
    _assert_same(model, reference)
    assert model.spec.norm_eps == config.rms_norm_eps
    assert model.spec.max_context == 256


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2() -> None:
    pytest.importorskip("accelerate")
    config = read_toml(find_config("models", "smollm2-135m"))
    path = cached_member(Wheel(**config["wheel"]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = load_model("smollm2-135m")
    _assert_same(model, reference)
    assert model.spec.norm_eps == pytest.approx(reference.config.rms_norm_eps)
    assert model.spec.max_context == reference.config.max_position_embeddings == 8192
