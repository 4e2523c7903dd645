"""What one device has of a model: all devices together have all of it."""

import math
from typing import Any

import jax
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.families import llama
from jaxspec.models.quantization import scheme_names
from jaxspec.models.spec import ModelSpec
from jaxspec.plan.part import Part, part_of
from jaxspec.plan.shape import Shape, read_shape
from jaxspec.plan.tiles import held_bytes
from jaxspec.plan.weights import arrays_of, count_of, weights_of

CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def tiny(**changes: Any) -> Shape:
    spec = llama.spec(CONFIG | changes, 2048)
    return Shape("tiny", spec, llama.parameters(spec), family=llama)


def numbers(part: Part, *names: str) -> int:
    return sum(math.prod(leaf.shape) for name in names for leaf in jax.tree.leaves(part.arrays[name]))


@pytest.mark.parametrize("weights", ["float32", "bfloat16", *scheme_names()])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_one_device_has_all(model: str, weights: str) -> None:
    shape = read_shape(model)
    part = part_of(shape, weights, 1)
    assert held_bytes(part.arrays, tiled=False) == weights_of(arrays_of(shape.parameters or {}))[0][weights]
    assert part.local == shape.spec


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_devices_share_what_is_large(weights: str) -> None:
    shape = tiny()
    alone, shared = part_of(shape, weights, 1), part_of(shape, weights, 4)
    for name in ("embed", "lm_head"):
        assert numbers(shared, name) * 4 == numbers(alone, name)
    norms = 2 * 3 * 512
    scales = 0 if weights == "bfloat16" else 2 * 3 * 512  # of rows that all devices add to: o and down
    assert (numbers(shared, "layers") - norms - scales) * 4 == numbers(alone, "layers") - norms - scales


def test_counts_are_those_of_the_arrays() -> None:
    part = part_of(tiny(), "bfloat16", 2)
    assert part.local.layer_count == numbers(part, "layers") - 2 * 3 * 512
    assert part.head_count == numbers(part, "lm_head")
    assert part.head_bytes == 2 * part.head_count
    assert part.layer_bytes == 2 * (part.local.layer_count + 2 * 3 * 512 + 512)
    tied = part_of(tiny(tie_word_embeddings=True), "int8", 2)
    assert "lm_head" not in tied.arrays
    assert tied.head_bytes == 2 * tied.head_count == 2 * numbers(tied, "embed")  # an embedding is not quantised


def test_few_heads_are_repeated_and_the_vocabulary_is_padded() -> None:
    part = part_of(tiny(num_key_value_heads=1, vocab_size=2000), "bfloat16", 4)
    assert part.local.num_kv_heads == 1
    assert part.arrays["layers"]["qkv"]["weight"].shape == (3, 1, 2 + 2, 64, 512)
    assert part.arrays["embed"]["weight"].shape == (512, 512)


def test_eight_devices_with_a_70b_model() -> None:
    """Figures of a compiled step (prototypes/tpu_70b_step_sketch.py): 141 GB in bfloat16, 70.6 in int8."""
    shape = read_shape("llama-3.3-70b")
    assert isinstance(shape.spec, ModelSpec)
    parameters = count_of(arrays_of(shape.parameters or {}))
    wide, narrow = (held_bytes(part_of(shape, w, 8).arrays, tiled=True) for w in ("bfloat16", "int8"))
    assert 8 * wide == pytest.approx(2 * parameters, rel=0.001)
    assert 8 * narrow == pytest.approx(parameters + 128_256 * 8192, rel=0.002)  # the embedding stays in 16 bits


@pytest.mark.parametrize(
    ("changes", "weights", "share", "message"),
    [
        ({}, "bfloat16", 3, "tiny: 8 query heads, 4 key/value heads .* take 1, 2, 4, 8"),
        ({}, "bfloat16", 16, "cannot be shared by 16 devices"),
        (
            {"intermediate_size": 1000},
            "int4",
            1,
            "tiny: tensor .*down_proj.* has 1000 inputs, not .* the 32 that share",
        ),
        ({"intermediate_size": 1056}, "int4", 2, "tiny: .* has 528 inputs on each of 2 devices, not .* 32 that share"),
        (
            {"intermediate_size": 1152},
            "fp8_block",
            2,
            "tiny: .* has 576 .* on each of 2 devices, not .* 128",
        ),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, Any], weights: str, share: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        part_of(tiny(**changes), weights, share)


def test_a_cache_alone() -> None:
    with pytest.raises(ConfigError, match="deepseek-v3 cannot be run yet"):
        part_of(read_shape("deepseek-v3"), "bfloat16", 1)
