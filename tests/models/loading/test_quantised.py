"""Matrices quantised while they are read, and checkpoints that hold them quantised already."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import find_family
from jaxspec.models.loading import load_model
from jaxspec.models.quantization import (
    SUFFIXES,
    Quantized,
    Scheme,
    dequantize,
    get_scheme,
    is_matrix,
    scheme_names,
)

Change = Callable[[dict[str, np.ndarray]], object]
SIZES = {"intermediate_size": 160}
"""Inputs in multiples of 32, and rows that end within a block."""


def quantised(tensors: dict[str, np.ndarray], scheme: Scheme, height: int) -> dict[str, np.ndarray]:
    """A checkpoint of our own layout; `height` is the rows of a head."""
    written = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "embed" in name:
            written[name] = tensor
            continue
        joined = any(f"{x}_proj" in name for x in "qkv")
        fields = scheme.quantize(tensor.reshape(-1, height, tensor.shape[1]) if joined else tensor)
        for suffix, field in zip(SUFFIXES, fields, strict=True):
            if field is not None:
                width = field.shape[-1:] if field.ndim == (3 if joined else 2) else ()
                written[name + suffix] = field.reshape(-1, *width)
    return written


@pytest.fixture
def own_folder(folder: Any, tiny_config: Any, random_tensors: Any) -> Callable[..., Path]:
    """A folder of the tiny config with changes, quantised as it is written; `change` may spoil its tensors."""

    def write(name: str, change: Change = lambda tensors: None, settings: Any = None, **changes: Any) -> Path:
        config = tiny_config | SIZES | changes
        tensors = quantised(random_tensors(config), get_scheme(name), config["hidden_size"] // 8)
        change(tensors)
        asked = {"quant_method": "jaxspec", "weights": name} if settings is None else settings
        return folder(tensors, **SIZES, **changes, quantization_config=asked)

    return write


def by_quantising(name: str, params: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What loading with a scheme must give, from what loading without one gives."""
    family = find_family("LlamaForCausalLM")
    quantise = get_scheme(name).quantize
    return jax.tree.map_with_path(
        lambda path, p, weight: quantise(np.asarray(weight)) if is_matrix(path, p) else weight,
        family.parameters(family.spec(config, 480)),
        params,
    )


def assert_trees_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7 * 64, 140 * 64, 2**19])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", scheme_names())
def test_quantised_while_loading(
    name: str,
    tied: bool,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
    folder: Any,
    random_tensors: Any,
    tiny_config: Any,
) -> None:
    monkeypatch.setattr("jaxspec.models.loading.shards.CHUNK", chunk)
    changes = SIZES | {"tie_word_embeddings": tied, "attention_bias": True}
    config = tiny_config | changes
    tensors = random_tensors(config)
    path = str(folder(tensors, **changes))
    found = load_model(path, name, packed=True).params
    assert_trees_equal(found, by_quantising(name, load_model(path).params, config))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_from_gguf_types(kind: Any, gguf_file: Any, random_tensors: Any, tiny_config: Any) -> None:
    config = tiny_config | SIZES
    path = str(gguf_file(random_tensors(config), kind, **SIZES))
    found = load_model(path, "int8", packed=True).params
    assert_trees_equal(found, by_quantising("int8", load_model(path).params, config))


def test_the_cpu_dequantises_and_says_so(
    caplog: pytest.LogCaptureFixture, folder: Any, random_tensors: Any, tiny_config: Any
) -> None:
    path = str(folder(random_tensors(tiny_config)))
    found = load_model(path, "int8").params
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: int8 weights are dequantised to float32: XLA has no fast products of them here"
    ]
    packed = load_model(path, "int8", packed=True).params
    assert len(caplog.records) == 1
    expected = jax.tree.map(
        lambda node: dequantize(node, np.float32) if isinstance(node, Quantized) else node,
        packed,
        is_leaf=lambda node: isinstance(node, Quantized),
    )
    assert_trees_equal(found, expected)


@pytest.mark.parametrize("name", ["int4", "int4_symmetric"])
def test_inputs_that_are_no_whole_groups(name: str, folder: Any) -> None:
    with pytest.raises(LoadError, match=r"down_proj.weight has 80 inputs, not a multiple of the 32 .*such as int8"):
        load_model(str(folder(intermediate_size=80)), name)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", scheme_names())
def test_weights_that_are_not_finite(
    name: str, value: float, folder: Any, random_tensors: Any, tiny_config: Any
) -> None:
    tensors = random_tensors(tiny_config)
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 3] = value
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        load_model(str(folder(tensors)), name)


@pytest.mark.parametrize("weights", ["auto", "as stored"])
@pytest.mark.parametrize("name", scheme_names())
def test_a_quantised_checkpoint_comes_back_bit_by_bit(
    name: str, weights: str, own_folder: Any, random_tensors: Any, tiny_config: Any, fused: Any
) -> None:
    config = tiny_config | SIZES
    found = load_model(str(own_folder(name)), name if weights == "as stored" else weights, packed=True).params
    assert_trees_equal(found, by_quantising(name, fused(random_tensors(config), config), config))


SCALE = "model.layers.0.mlp.down_proj.weight_scale"


@pytest.mark.parametrize("name", scheme_names())
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), f"{SCALE} is missing"),
        (lambda t: t.update({SCALE: t[SCALE][:-1]}), rf"{SCALE} has shape \[.*\], not \["),
        (lambda t: t.update({SCALE: t[SCALE][..., None]}), rf"{SCALE} has shape \[.*\], not \["),
        (lambda t: t[SCALE].ravel().__setitem__(-1, np.nan), f"{SCALE} holds NaN or infinity"),
        (lambda t: t[SCALE].ravel().__setitem__(0, -np.inf), f"{SCALE} holds NaN or infinity"),
        (lambda t: t.update({SCALE: t[SCALE].astype(np.float16)}), f"{SCALE} is of type float16, not"),
        (
            lambda t: t.update({SCALE.removesuffix("_scale"): np.ones((64, 160), np.float32)}),
            "down_proj.weight (is of type float32, not|has shape)",
        ),
        (lambda t: t.update({SCALE + "s": t[SCALE]}), f"{SCALE}s is unexpected"),
    ],
)
def test_damaged_quantised_checkpoints(name: str, change: Change, message: str, own_folder: Any) -> None:
    with pytest.raises(LoadError, match=message):
        load_model(str(own_folder(name, change)))


def test_codes_that_are_no_numbers(own_folder: Any) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    with pytest.raises(LoadError, match=f"{name} holds NaN"):
        load_model(str(own_folder("fp8", lambda t: t[name].view(np.uint8)[2].fill(0x7F))))


def test_a_quantised_checkpoint_is_not_quantised_again(own_folder: Any) -> None:
    with pytest.raises(ConfigError, match="holds int8 weights: ask for these or auto, not int4"):
        load_model(str(own_folder("int8")), "int4")
    with pytest.raises(ConfigError, match="holds int8 weights: ask for these or auto, not float32"):
        load_model(str(own_folder("int8")), "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantization_config \(gptq\) is not supported"),
        ({"quant_method": "jaxspec", "weights": "int3"}, "weights 'int3'.*there are: fp8"),
        ({"quant_method": "jaxspec", "weights": "int4"}, "is of type int8, not|has shape"),
    ],
)
def test_quantised_by_others_or_not_as_said(settings: Any, message: str, own_folder: Any) -> None:
    with pytest.raises(LoadError, match=message):
        load_model(str(own_folder("int8", settings=settings)))
