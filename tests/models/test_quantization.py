"""Every scheme of quantised weights: its error against float64, hard rows, its pytree, its place in a model."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxspec.errors import ConfigError, LoadError
from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.families import llama
from jaxspec.models.quantization import (
    BLOCK,
    SUFFIXES,
    Quantized,
    dequantize,
    get_scheme,
    is_matrix,
    scheme_names,
    scheme_of,
    stored_tree,
)
from jaxspec.models.quantization._groups import pack
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward, init_params, logits_of
from jaxspec.types import Params, Sequences
from pallas_kernels import Rows
from tests.driver import stack_layers

SPEC = ModelSpec(
    vocab_size=96,
    valid_vocab=90,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=160,
    norm_eps=1e-5,
    inv_freq=tuple(10000.0 ** (-i / 16) for i in range(16)),
    max_context=64,
    tied_embeddings=False,
    qkv_bias=True,
)
SHAPES = [(5, 64), (2, 3, 192), (3, 4, 32, 96), (300, 160), (2, 129, 288), (1, 32)]
SCHEMES = scheme_names()


def random_weight(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Like a trained one: rows of very different sizes, some numbers far from the rest."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, shape) * np.exp(rng.normal(0, 2, (*shape[:-1], 1)))).astype(np.float32)


def spread(shared: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The scale, step or zero that numbers share, for each of them, in float64; by counting, not by repeating."""
    shared = np.asarray(shared, np.float64)
    if shared.ndim < len(shape):
        return np.broadcast_to(shared[..., None], shape)
    row, column = np.arange(shape[-2]), np.arange(shape[-1])
    if shared.shape[-1] * 32 == shape[-1] and shared.shape[-2] == shape[-2]:
        return shared[..., row[:, None], (column // 32)[None, :]]
    return shared[..., (row // BLOCK)[:, None], (column // BLOCK)[None, :]]


def step(weight: Quantized, shape: tuple[int, ...]) -> np.ndarray:
    """Between two codes that follow each other, in float64."""
    scale = spread(weight.scale, shape)
    return scale if weight.steps is None else scale * spread(weight.steps, shape)


def meaning(weight: Quantized, shape: tuple[int, ...]) -> np.ndarray:
    """What a weight stands for, in float64, written out apart from `dequantize`."""
    values = np.asarray(weight.values)
    if values.dtype != np.uint8:
        return values.astype(np.float64) * step(weight, shape)
    codes = np.empty(shape)
    codes[..., 0::2], codes[..., 1::2] = values % 16, values // 16
    zero = 8 if weight.zero is None else spread(weight.zero, shape) / 16
    return (codes - zero) * step(weight, shape)


def bound(name: str, weight: np.ndarray, quantised: Quantized) -> np.ndarray:
    """The most that each number may be off: half a step, and what the ends lose where the step itself was rounded, by
    half a scale."""
    steps, scale = step(quantised, weight.shape), spread(quantised.scale, weight.shape)
    if name == "int8":
        return 0.5 * steps
    if name == "int4_symmetric":
        return 0.5 * steps + 7 * 0.5 * scale
    if name == "int4":
        return (0.5 + 1 / 32) * steps + 15 * 0.5 * scale
    return np.maximum(np.abs(weight.astype(np.float64)) * 2.0**-4, scale * 2.0**-10)


def fields(weight: Quantized) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(weight)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_error_of_every_number_is_bounded(name: str, shape: tuple[int, ...]) -> None:
    weight = random_weight(shape)
    quantised = get_scheme(name).quantize(weight)
    error = np.abs(meaning(quantised, shape) - weight)
    assert np.all(error <= bound(name, weight, quantised) * (1 + 1e-5))
    assert error.max() > 0.1 * bound(name, weight, quantised).max()  # so that the bound says something


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_layout_is_what_quantising_gives(name: str, shape: tuple[int, ...]) -> None:
    layout, quantised = get_scheme(name).layout(shape), get_scheme(name).quantize(random_weight(shape))
    assert jax.tree.structure(layout) == jax.tree.structure(quantised)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(layout)] == [(a.shape, a.dtype) for a in fields(quantised)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_dequantising_is_the_formula(name: str, shape: tuple[int, ...]) -> None:
    quantised = get_scheme(name).quantize(random_weight(shape))
    found = dequantize(jax.tree.map(jnp.asarray, quantised), np.float32)
    np.testing.assert_allclose(found, meaning(quantised, shape), rtol=1e-6, atol=1e-7)


BITS = {"int8": 8, "fp8": 8, "fp8_block": 8, "int4": 4.5, "int4_symmetric": 4.25}


@pytest.mark.parametrize("name", SCHEMES)
def test_bits_a_number(name: str) -> None:
    shape = (4, 1024, 4096)
    taken = sum(field.size * field.dtype.itemsize for field in jax.tree.leaves(get_scheme(name).layout(shape)))
    assert 8 * taken / np.prod(shape) == pytest.approx(BITS[name], rel=2e-3)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 3e-3, 1e30, 1e-30, 1e-40, -1e-44], ids=lambda value: f"{value:g}")
def test_rows_of_one_value(name: str, value: float) -> None:
    """Exact up to rounding; zero stays zero, and numbers too small for float32 may become it."""
    weight = np.full((3, 64), value, np.float32)
    found = meaning(get_scheme(name).quantize(weight), weight.shape)
    assert np.all(np.isfinite(found))
    np.testing.assert_allclose(found, weight, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("name", SCHEMES)
def test_one_outlier_costs_only_those_that_share_its_scale(name: str) -> None:
    weight = random_weight((256, 256))
    wild = weight.copy()
    wild[7, 9] = 1e6 * np.abs(weight).max()
    calm, hit = (meaning(get_scheme(name).quantize(w), weight.shape) for w in (weight, wild))
    assert hit[7, 9] == pytest.approx(wild[7, 9], rel=1e-5)
    touched = np.argwhere(calm != hit)
    rows = BLOCK if name == "fp8_block" else 1
    columns = BLOCK if name == "fp8_block" else 256
    assert np.all(touched[:, 0] // rows == 7 // rows)
    assert np.all(touched[:, 1] // columns == 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_known_codes(name: str) -> None:
    """A row that holds every code of its scheme comes back as it is."""
    codes = {"int8": np.arange(-127, 128), "int4_symmetric": np.arange(-7, 8), "int4": np.arange(-5, 11)}
    held = codes.get(name, np.append(np.arange(-16, 17), 448)).astype(np.float32)
    weight = np.resize(np.repeat(held, 2) if "int4" in name else held, (2, 32 if "int4" in name else 256)) * 0.25
    quantised = get_scheme(name).quantize(weight)
    np.testing.assert_allclose(step(quantised, weight.shape), 0.25, rtol=1e-6)
    np.testing.assert_allclose(meaning(quantised, weight.shape), weight, rtol=1e-6)


def test_groups_of_very_different_sizes_keep_a_step() -> None:
    """The steps of a row are multiples of one scale: the small ones are rounded, never to 0."""
    weight = np.ones((1, 96), np.float32)
    weight[:, 32:64] *= 1e-4
    weight[:, 64:] = 0
    for name in ("int4", "int4_symmetric"):
        np.testing.assert_array_equal(get_scheme(name).quantize(weight).steps, [[255, 1, 0]])


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_may_be_cut_at_blocks(name: str) -> None:
    weight = random_weight((300, 160))
    scheme = get_scheme(name)
    pieces = [scheme.quantize(weight[i : i + BLOCK]) for i in range(0, 300, BLOCK)]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)
    for whole, part in zip(fields(scheme.quantize(weight)), fields(joined), strict=True):
        np.testing.assert_array_equal(whole, part)


@given(arrays(np.int64, (2, 3, 32), elements=st.integers(0, 15)))
@settings(max_examples=20, deadline=None)
def test_packed_codes_come_back(codes: np.ndarray) -> None:
    values = pack(codes)
    assert values.shape == (2, 48)
    zero = np.zeros((2, 3), np.uint8)
    weight = jax.tree.map(jnp.asarray, Quantized(values, np.ones(2, np.float32), zero + 1, zero))
    np.testing.assert_array_equal(dequantize(weight, np.float32), codes.reshape(2, 96))


@pytest.mark.parametrize("codes", [[-3.0, 0.4, 0.6, 15.4, 15.6, 99.0]])
def test_packing_rounds_and_clips(codes: list[float]) -> None:
    low, high = pack(np.array([[codes]])) % 16, pack(np.array([[codes]])) // 16
    np.testing.assert_array_equal(np.stack([low, high], -1).ravel(), [0, 0, 1, 15, 15, 15])


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'int3'.*fp8, fp8_block, int4, int4_symmetric, int8"):
        get_scheme("int3")


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4}, None),
        ({"quant_method": "jaxspec", "weights": "int4"}, "int4"),
    ],
)
def test_the_scheme_of_a_config(settings: Any, scheme: str | None) -> None:
    assert scheme_of({"quantization_config": settings}) == scheme


def test_a_config_of_a_scheme_that_is_not_there() -> None:
    with pytest.raises(LoadError, match=r"'int3'.*there are: fp8"):
        scheme_of({"quantization_config": {"quant_method": "jaxspec", "weights": "int3"}})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_checkpoint_holds_every_row_under_its_own_name(name: str) -> None:
    """Parts of the fields of a joined matrix are the fields of its parts."""
    scheme, rng = get_scheme(name), np.random.default_rng(0)
    qkv = llama.parameters(SPEC)["layers"][0]["qkv"]["weight"]
    tensors = {part.name: rng.normal(size=part.shape).astype(np.float32) for part in qkv.parts}
    joined = np.empty(qkv.shape, np.float32)
    for part in qkv.parts:
        joined[part.index] = tensors[part.name].reshape(joined[part.index].shape)
    found = stored_tree(llama.parameters(SPEC), scheme)["layers"][0]["qkv"]["weight"]
    for which, (field, parameter, suffix) in enumerate(zip(scheme.quantize(joined), found, SUFFIXES, strict=True)):
        assert (field is None) == (parameter is None)
        for part in parameter.parts if parameter else ():
            assert part.dtype == field.dtype
            own = scheme.quantize(tensors[part.name.removesuffix(suffix)].reshape(-1, SPEC.head_dim, SPEC.embed_dim))
            expected = own[which]
            np.testing.assert_array_equal(field[part.index].reshape(part.shape), expected.reshape(part.shape))


def test_embedding_norms_and_biases_stay_plain() -> None:
    names = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, p in jax.tree_util.tree_leaves_with_path(llama.parameters(SPEC))
        if is_matrix(path, p)
    }
    layer = {f"layers.{i}.{kind}.weight" for i in range(2) for kind in ("qkv", "o", "gate_up", "down")}
    assert names == layer | {"lm_head.weight"}


def quantised_params(name: str) -> Params:
    quantise = get_scheme(name).quantize
    tree = jax.tree.map_with_path(
        lambda path, p, weight: quantise(np.asarray(weight)) if is_matrix(path, p) else weight,
        llama.parameters(SPEC),
        plain_params(),
    )
    return jax.tree.map(jnp.asarray, tree)


@cache
def plain_params() -> Params:
    return jax.jit(partial(init_params, SPEC))(jax.random.key(0))


@jax.jit
def logits(params: Params) -> jax.Array:
    """Of eight tokens in one row."""
    pool_spec = PoolSpec(get_format("float32"), SPEC.num_layers, 1, 8, SPEC.num_kv_heads, SPEC.head_dim)
    none = jnp.zeros((1, 1), jnp.int32)
    sequences = Sequences(none[None], none, none, none[0])
    rows = Rows(none[0], none[0], none[0] + 8)
    ids = jnp.arange(8)[None]
    hidden, _ = forward(params, SPEC, pool_spec, rows, ids, ids, None, pool_spec.allocate(1), sequences)
    return logits_of(params, SPEC, hidden)[0, :, : SPEC.valid_vocab]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_packed_model_is_the_dequantised_one(name: str) -> None:
    """Stacked and scanned it does what it does dequantised and unrolled; and that is not what the plain one does."""
    params = quantised_params(name)
    plain = jax.tree.map(
        lambda node: dequantize(node, np.float32) if isinstance(node, Quantized) else node,
        params,
        is_leaf=lambda node: isinstance(node, Quantized),
    )
    expected = logits(plain)
    np.testing.assert_allclose(logits(stack_layers(params)), expected, rtol=0, atol=2e-5)
    assert np.abs(logits(plain_params()) - expected).max() > 1e-3
