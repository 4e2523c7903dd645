"""Operations over a vocabulary of which eight devices have a slice each: numpy says what must come of the whole."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import parallel, vocabulary

DEVICES, WIDTH = 8, 16
VOCAB = DEVICES * WIDTH
SHARED, WHOLE = PartitionSpec(None, parallel.MODEL), PartitionSpec()


def some_rows() -> np.ndarray:
    """Rows of numbers, the hard ones too; the last has none."""
    usual = np.random.default_rng(5).normal(size=(6, VOCAB)).astype(np.float32)
    few = np.full_like(usual, -np.inf)
    few[:, [3, 77]] = 1.5, 0.25
    last = np.where(np.arange(VOCAB) == VOCAB - 1, usual, -np.inf).astype(np.float32)
    ties = np.round(usual) + 0.0  # there is no -0, which sorts below 0
    none = np.full_like(usual[:1], -np.inf)
    return np.concatenate([usual, usual * 1e4, ties, np.zeros_like(usual), few, last, none])


ROWS = some_rows()


def placed(x: np.ndarray, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec) if mesh else None)


@pytest.fixture(scope="module", params=[1, DEVICES])
def on_devices(request: pytest.FixtureRequest):
    """Runs a function on the slices that devices have, and on a single one, which the same numpy must judge."""
    mesh = parallel.mesh_of(request.param)

    def call(fn, x: np.ndarray, *others: Any, out: Any = WHOLE) -> Any:
        """`others` are alike on all devices."""
        arguments = [placed(x, mesh, SHARED), *(placed(one, mesh, WHOLE) for one in others)]
        found = jax.jit(lambda *arguments: parallel.on_each(fn, out, *arguments))(*arguments)
        return jax.tree.map(np.asarray, found)

    return call


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)


def test_reductions(on_devices):
    def all_of(x):
        found = (vocabulary.maximum(x), vocabulary.argmax(x), vocabulary.logsumexp(x), vocabulary.total(x))
        return *found, *(vocabulary.any_of(one) for one in (x > 2.5, x == -np.inf))

    best, likeliest, norm, total, *some = on_devices(all_of, ROWS, out=(WHOLE,) * 6)
    np.testing.assert_array_equal(best, ROWS.max(-1))
    np.testing.assert_array_equal(likeliest, ROWS.argmax(-1))
    assert likeliest.dtype == np.int32
    top = np.where(np.isfinite(ROWS.max(-1)), ROWS.max(-1), 0)[:, None].astype(np.float64)
    with np.errstate(divide="ignore"):
        same(norm, np.log(np.exp(ROWS - top).sum(-1)) + top[:, 0])
    np.testing.assert_allclose(total, ROWS.sum(-1, dtype=np.float64), rtol=1e-5, atol=0.1)
    same(total[:6], ROWS[:6].sum(-1, dtype=np.float64))
    for found, wanted in zip(some, (ROWS > 2.5, np.isneginf(ROWS)), strict=True):
        assert found.dtype == bool
        np.testing.assert_array_equal(found, wanted.any(-1))


def test_nan_shows(on_devices):
    """In the row where it stands, whichever device has it."""
    x = ROWS.copy()
    x[2, 100], x[4, 0] = np.nan, np.nan
    found = on_devices(lambda x: (vocabulary.any_of(jax.numpy.isnan(x)), vocabulary.total(x)), x, out=(WHOLE,) * 2)
    for one in (found[0], np.isnan(found[1])):
        np.testing.assert_array_equal(one, np.isnan(x).any(-1))


def test_softmax(on_devices):
    x = ROWS[:-1].astype(np.float64)
    weight = np.exp(x - x.max(-1, keepdims=True))
    same(on_devices(vocabulary.softmax, ROWS[:-1], out=SHARED), weight / weight.sum(-1, keepdims=True))


@pytest.mark.parametrize("k", [1, WIDTH, WIDTH + 1, VOCAB])
def test_top_k(on_devices, k: int):
    """More than a device has, too; of equals the lowest ids come first."""
    values, tokens = on_devices(lambda x: vocabulary.top_k(x, k), ROWS, out=(WHOLE, WHOLE))
    order = np.argsort(-ROWS, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(values, np.take_along_axis(ROWS, order, -1))


def test_ids_and_columns(on_devices):
    def found(x):
        width = vocabulary.columns(VOCAB)
        return vocabulary.ids(width) + 0 * x[0].astype(np.int32)

    ids = on_devices(found, np.zeros((1, VOCAB), np.float32), out=PartitionSpec(parallel.MODEL))
    np.testing.assert_array_equal(ids, np.arange(VOCAB))


TOKENS = np.array([0, 1, WIDTH - 1, WIDTH, WIDTH + 1, 5 * WIDTH + 3, VOCAB - 1, -1, -WIDTH, VOCAB, VOCAB + WIDTH])
"""On the edges of slices; the last four are none."""


def test_one_hot(on_devices):
    found = on_devices(
        lambda x, tokens: vocabulary.one_hot(tokens, x.shape[-1]),
        np.zeros((1, VOCAB), np.float32),
        TOKENS.astype(np.int32),
        out=SHARED,
    )
    np.testing.assert_array_equal(found, (TOKENS[:, None] == np.arange(VOCAB)).astype(np.float32))


def test_scatters_reach_the_token_alone(on_devices):
    """A token that is none, or another device's, changes nothing, although negative indices count from the end."""

    def add(x, tokens):
        return x.at[:, vocabulary.column(tokens, x.shape[-1])].add(1.0, mode="drop")

    found = on_devices(add, np.zeros((2, VOCAB), np.float32), TOKENS.astype(np.int32), out=SHARED)
    wanted = np.zeros((2, VOCAB), np.float32)
    wanted[:, TOKENS[:7]] = 1
    np.testing.assert_array_equal(found, wanted)


def test_at(on_devices):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (len(ROWS), 9), np.int32)
    tokens[:, :7] = TOKENS[:7]
    np.testing.assert_array_equal(on_devices(vocabulary.at, ROWS, tokens), np.take_along_axis(ROWS, tokens, -1))


def test_at_is_0_where_a_token_is_none():
    mesh = parallel.mesh_of(DEVICES)
    none = np.tile(TOKENS[7:].astype(np.int32), (len(ROWS), 1))
    x, tokens = placed(ROWS, mesh, SHARED), placed(none, mesh, WHOLE)
    found = jax.jit(lambda x, tokens: parallel.on_each(vocabulary.at, WHOLE, x, tokens))(x, tokens)
    np.testing.assert_array_equal(found, 0)
