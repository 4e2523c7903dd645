"""Bytes of weights: published counts of parameters, and what quantised trees really take."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.models.families import llama
from jaxspec.models.quantization import get_scheme, is_matrix, scheme_names
from jaxspec.plan.shape import read_shape
from jaxspec.plan.weights import arrays_of, count_of, weights_of

CONFIG: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.3-70b", 70_553_706_496),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-2-70b", 68_976_648_192),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-7b", 6_738_415_616),
        ("vicuna-7b-v1.5", 6_738_415_616),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-1.7b", 1_711_376_384),
        ("smollm2-360m", 361_821_120),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_counts_of_parameters(model: str, parameters: int) -> None:
    arrays = arrays_of(read_shape(model).parameters or {})
    assert count_of(arrays) == parameters
    assert weights_of(arrays)[0]["bfloat16"] == 2 * parameters
    assert weights_of(arrays)[0]["float32"] == 4 * parameters


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("scheme", scheme_names())
def test_bytes_are_those_of_quantised_arrays(scheme: str, changes: dict[str, Any]) -> None:
    tree = llama.parameters(llama.spec(CONFIG | changes, 80))
    taken = 0
    for path, parameter in jax.tree.leaves_with_path(tree):
        numbers = np.ones(parameter.shape, np.float32)
        if is_matrix(path, parameter):
            taken += sum(leaf.nbytes for leaf in jax.tree.leaves(get_scheme(scheme).quantize(numbers)))
        else:
            taken += 2 * numbers.size
    assert weights_of(arrays_of(tree))[0][scheme] == taken


def test_what_quantising_saves() -> None:
    """Of 70 billion numbers 1.05 are the embedding, which stays in 16 bits."""
    sizes, refused = weights_of(arrays_of(read_shape("llama-3.3-70b").parameters or {}))
    assert not refused
    embedding = 2 * 128_256 * 8192
    ratio = {name: (sizes["bfloat16"] - embedding) / (size - embedding) for name, size in sizes.items()}
    assert 1.99 < ratio["int8"] < 2
    assert 3.5 < ratio["int4"] < 3.56  # 4.5 bits a number
    assert 3.7 < ratio["int4_symmetric"] < 3.77  # 4.25 bits
    assert 1.99 < ratio["fp8_block"] < 2
    assert list(sizes) == sorted(sizes, key=lambda name: -sizes[name])


def test_schemes_that_cannot_be_are_named() -> None:
    tree = llama.parameters(llama.spec(CONFIG | {"intermediate_size": 150}, 80))
    sizes, refused = weights_of(arrays_of(tree))
    assert refused["int4"] == "weights int4 need inputs of a multiple of 32, and a matrix here has 150"
    assert set(sizes) | set(refused) == {"float32", "bfloat16", *scheme_names()}
    assert math.prod(sizes.values()) > 0
