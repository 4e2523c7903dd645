"""The transformer against itself: unrolled and scanned layers, chunks, padding. Its oracle is in tests/parity."""

from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import Pool, PoolSpec
from jaxspec.models.families import llama
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward, init_params, logits_of, rotate, rotation_at
from jaxspec.types import Params, Sequences
from pallas_kernels import Rows
from tests.driver import stack_layers

SPEC = ModelSpec(
    vocab_size=96,
    valid_vocab=90,
    num_layers=3,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    mlp_dim=40,
    norm_eps=1e-5,
    inv_freq=tuple(10000.0 ** (-i / 6) for i in range(6)),
    max_context=64,
    tied_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
TOKENS = np.random.default_rng(0).integers(0, SPEC.valid_vocab, 29)
PAGE = 5


@cache
def random_params(spec: ModelSpec = SPEC, dtype: Any = jnp.float32) -> Params:
    """Laid out as by `init_params`, but with norms and biases that show where they are left out."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(partial(init_params, spec, dtype=dtype), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(leaf.ndim == 1, 0.2, leaf.shape), leaf.dtype), shapes)


def _paged(spec: ModelSpec, kv: str) -> tuple[PoolSpec, Sequences]:
    """A pool that TOKENS fit into, and where they lie in it."""
    width = -(-len(TOKENS) // PAGE)
    table = jnp.asarray(np.random.default_rng(1).permutation(width + 2)[None, None, :width], jnp.int32)
    none = jnp.zeros((1, 1), jnp.int32)
    pool_spec = PoolSpec(get_format(kv), spec.num_layers, width + 2, PAGE, spec.num_kv_heads, spec.head_dim)
    return pool_spec, Sequences(table, none, none, none[0])


def feed(
    params: Params, chunk: int, spec: ModelSpec = SPEC, kv: str = "float32", offset: int = 0
) -> tuple[np.ndarray, Pool]:
    """Hidden states of TOKENS written `chunk` at a time, one row a call, and the pool they leave; the text begins at
    position `offset`."""
    pool_spec, sequences = _paged(spec, kv)

    @partial(jax.jit, donate_argnums=1)
    def call(params, pool, rows, tokens):
        positions = offset + rows.start[:, None] + jnp.arange(chunk)
        return forward(params, spec, pool_spec, rows, tokens, positions, None, pool, sequences)

    pool, hidden = pool_spec.allocate(1), []
    for start in range(0, len(TOKENS), chunk):
        ids = TOKENS[start : start + chunk]
        rows = Rows(*(jnp.asarray([value]) for value in (0, start, len(ids))))
        out, pool = call(params, pool, rows, jnp.asarray(np.pad(ids, (0, chunk - len(ids)))[None]))
        hidden.append(np.asarray(out[0, : len(ids)], np.float32))
    return np.concatenate(hidden), pool


def test_scanned_layers_do_what_unrolled_ones_do() -> None:
    params = random_params()
    hidden, pool = feed(params, 8)
    scanned_hidden, scanned_pool = feed(stack_layers(params), 8)
    np.testing.assert_allclose(scanned_hidden, hidden, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scanned_pool["kv"], pool["kv"], rtol=0, atol=1e-5)


def test_every_layer_writes_every_token_and_nothing_else() -> None:
    _, pool = feed(random_params(), 8)
    slots = np.asarray(pool["kv"]).reshape(SPEC.num_layers, -1, SPEC.num_kv_heads, 2, PAGE, SPEC.head_dim)
    written = np.any(slots != 0, axis=-1)  # layer, page, head, key or value, offset
    assert np.all(written == written[:1, :, :1, :1])
    assert written[0, :, 0, 0].sum() == len(TOKENS)


@pytest.mark.parametrize("chunk", [1, 3, 8, 32])
def test_chunks_of_any_size_give_the_same_logits(chunk: int) -> None:
    params = random_params()
    whole, some = (logits_of(params, SPEC, jnp.asarray(feed(params, size)[0])) for size in (len(TOKENS), chunk))
    np.testing.assert_allclose(some, whole, rtol=0, atol=1e-5)


def test_bfloat16_runs_and_stays_near_float32() -> None:
    params = random_params(dtype=jnp.bfloat16)
    hidden, pool = feed(params, 8, kv="bfloat16")
    assert pool["kv"].dtype.itemsize == 2
    wide, _ = feed(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), 8)
    assert 0 < np.abs(hidden - wide).mean() < 0.03 * np.abs(wide).mean()
    logits = logits_of(params, SPEC, jnp.asarray(hidden, jnp.bfloat16))
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize("tied", [False, True])
def test_padding_ids_get_minus_infinity(tied: bool) -> None:
    spec = replace(SPEC, tied_embeddings=tied)
    params = random_params(spec)
    hidden = jax.random.normal(jax.random.key(0), (7, spec.embed_dim))
    logits = logits_of(params, spec, hidden)
    assert np.all(np.isneginf(logits[:, spec.valid_vocab :]))
    full = logits_of(params, replace(spec, valid_vocab=spec.vocab_size), hidden)
    assert np.all(np.isfinite(full))
    np.testing.assert_array_equal(full[:, : spec.valid_vocab], logits[:, : spec.valid_vocab])


def test_rotation_is_a_rotation_by_position() -> None:
    """Lengths stay, and a query's product with a key depends on their distance alone."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 1, SPEC.head_dim))

    def at(x: jax.Array, position: int) -> jax.Array:
        return rotate(x, rotation_at(SPEC, jnp.array([[position]])))

    np.testing.assert_allclose(jnp.sum(at(q, 17) ** 2), jnp.sum(q**2), rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(at(q, 9) * at(k, 4)), jnp.sum(at(q, 25) * at(k, 20)), rtol=1e-4, atol=1e-5)
    assert abs(jnp.sum(at(q, 9) * at(k, 4)) - jnp.sum(at(q, 9) * at(k, 5))) > 1e-3


def test_angles_are_right_at_any_position() -> None:
    positions = np.array([[0, 1, 255, 8_191, 65_536, 10**6, 10**6 + 1, 2**24 + 1, 2**30 - 1]])
    angles = positions[..., None] * np.float64(np.float32(SPEC.inv_freq))
    spec = replace(SPEC, inv_freq=tuple(np.float32(SPEC.inv_freq).tolist()))
    cos, sin = jax.jit(partial(rotation_at, spec))(jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=2e-6)


@pytest.mark.skipif(version("jax").startswith("0.10."), reason="XLA:CPU drops barriers before it fuses")
def test_cosines_are_counted_once_for_all_layers() -> None:
    pool_spec, sequences = _paged(SPEC, "float32")
    rows, tokens = Rows(*(jnp.asarray([value]) for value in (0, 0, 5))), jnp.zeros((1, 5), jnp.int32)

    def call(params, pool, tokens, positions):
        return forward(params, SPEC, pool_spec, rows, tokens, positions, None, pool, sequences)

    compiled = jax.jit(call).lower(random_params(), pool_spec.allocate(1), tokens, tokens).compile()
    assert (compiled.as_text() or "").count(" cosine(") == 1


def test_a_text_says_the_same_a_million_positions_further_on() -> None:
    """Distances between queries and keys are all that counts, and stay right."""
    here, there = (feed(random_params(), 8, offset=offset)[0] for offset in (0, 10**6))
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_random_parameters_are_laid_out_as_loaded_ones(tied: bool, biases: bool) -> None:
    spec = replace(SPEC, tied_embeddings=tied, qkv_bias=biases, o_bias=biases, mlp_bias=biases)
    shapes = jax.eval_shape(partial(init_params, spec), jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(lambda parameter: parameter.shape, llama.parameters(spec))


def test_random_parameters_differ_by_key_and_layer() -> None:
    init = jax.jit(partial(init_params, replace(SPEC, num_layers=2)))
    params, other = init(jax.random.key(0)), init(jax.random.key(1))
    first, second = (layer["qkv"]["weight"] for layer in params["layers"])
    assert np.abs(first - second).mean() > 0.1
    assert np.abs(first - other["layers"][0]["qkv"]["weight"]).mean() > 0.1
    np.testing.assert_allclose(jnp.std(first), SPEC.embed_dim**-0.5, rtol=0.1)
    np.testing.assert_array_equal(params["norm"]["weight"], jnp.ones(SPEC.embed_dim))
