"""The noise: Gumbel-distributed, independent whatever two draws differ in, a function of its keys and ids alone."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import noise

IDS = 1 << 14
Make = Callable[[jax.Array, jax.Array], jax.Array]


@partial(jax.jit, static_argnames="purpose")
def keys_of(seed, sample, ordinal, purpose: int = noise.TARGET):
    return noise.noise_keys(seed, sample, ordinal, purpose)


def keys(seed: int = 9, sample: int = 0, ordinals: Sequence[int] = range(64), purpose: int = noise.TARGET) -> jax.Array:
    """Key words `[ordinals, 2]` of one row."""
    words = jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
    return keys_of(words, jnp.array([sample], jnp.int32), jnp.array([list(ordinals)], jnp.int32), purpose)[0]


def variates(row_keys: jax.Array, ids: int = IDS, make: Make | None = None) -> np.ndarray:
    return np.asarray((make or GUMBEL)(row_keys, jnp.arange(ids)))


GUMBEL = jax.jit(noise.gumbel)


def uniform(values: np.ndarray) -> np.ndarray:
    """What Gumbel variates are if their distribution is right: uniform in [0, 1]."""
    return np.exp(-np.exp(-values.astype(np.float64)))


def distribution_p(values: np.ndarray) -> float:
    return float(stats.kstest(values.ravel()[:200_000].astype(np.float64), "gumbel_r").pvalue)


def pair_p(first: np.ndarray, second: np.ndarray, bins: int = 16) -> float:
    """χ² of two aligned sets of variates over a grid of equally likely cells: wrong margins fail, dependence too."""
    cells = [np.minimum((uniform(x).ravel() * bins).astype(int), bins - 1) for x in (first, second)]
    return float(stats.chisquare(np.bincount(cells[0] * bins + cells[1], minlength=bins * bins)).pvalue)


def worst_lag(first: np.ndarray, second: np.ndarray) -> float:
    """The largest correlation over all shifts of two rows of ids against each other, in standard deviations."""
    a, b = (uniform(x) - 0.5 for x in (first, second))
    spectrum = np.fft.rfft(a) * np.conj(np.fft.rfft(b))
    correlation = np.fft.irfft(spectrum, n=a.shape[-1]) * 12 / np.sqrt(a.shape[-1])
    return float(np.abs(correlation[..., 1:]).max())


def test_variates_have_the_gumbel_distribution() -> None:
    values = variates(keys())
    n = values.size
    assert abs(values.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / n)
    assert abs(values.var() / (np.pi**2 / 6) - 1) < 5 * np.sqrt(4.4 / n)
    assert distribution_p(values) > 1e-6
    for line in (values[:, :64].T, values[3:4, :], values[:, 100:101]):
        assert distribution_p(line) > 1e-6


def test_the_tail_reaches_as_far_as_it_should() -> None:
    """Ten million variates: the best of them decides a large vocabulary's draws."""
    chunk = jax.jit(lambda k: jnp.sum(noise.gumbel(k, jnp.arange(50_000))[..., None] > LEVELS, axis=(0, 1)))
    top = jax.jit(lambda k: jnp.max(noise.gumbel(k, jnp.arange(50_000))))
    parts = [keys(ordinals=range(first, first + 40)) for first in range(0, 200, 40)]
    above = np.sum([np.asarray(chunk(part)) for part in parts], axis=0)
    assert max(float(top(part)) for part in parts) > 14
    expected = -np.expm1(-np.exp(-LEVELS.astype(np.float64))) * 200 * 50_000
    np.testing.assert_array_less(np.abs(above - expected), 6 * np.sqrt(expected) + 1)


LEVELS = np.array([-2.5, -2, 4, 6, 8, 10, 12], np.float32)


def test_values_are_finite_at_the_ends_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = jnp.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], jnp.uint32)
    monkeypatch.setattr(noise, "_mix", lambda x: jnp.broadcast_to(ends, x.shape))
    values = np.asarray(noise.gumbel(jnp.zeros(2, jnp.uint32), jnp.arange(5)))
    assert np.isfinite(values).all()
    assert np.all(np.diff(values) <= 0)
    assert values[0] > 22
    assert values[-1] < -2.7


def neighbours(**change) -> tuple[jax.Array, jax.Array]:
    """The same draws but for one thing that noise may depend on."""
    return keys(), keys(**change)


CHANGES: list[dict] = [
    *({"ordinals": range(step, 64 + step)} for step in (1, 2, 32)),
    *({"seed": 9 ^ 1 << bit} for bit in (0, 1, 31, 32, 33, 63)),
    {"seed": 10},
    {"seed": 9 << 32},
    {"sample": 1},
    {"purpose": noise.TARGET + 1},
    # What is folded in twice, or added up, would make these the same.
    {"sample": 1, "ordinals": range(-1, 63)},
    {"seed": 10, "ordinals": range(-1, 63)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_draws_that_differ_in_one_thing_are_independent(change: dict) -> None:
    first, second = (variates(k) for k in neighbours(**change))
    assert pair_p(first, second) > 1e-6
    assert worst_lag(first, second) < 7
    for a, b in zip(uniform(first), uniform(second), strict=True):
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / np.sqrt(IDS)


def test_neighbouring_ids_are_independent() -> None:
    values = variates(keys())
    for lag in (1, 2, 3, 5, 8, 64, 128, 1000, 4096, 8192):
        assert pair_p(values[:, :-lag], values[:, lag:]) > 1e-6
    assert worst_lag(values, values) < 7


def test_seeds_count_in_all_their_bits() -> None:
    """No two of these rows share even a handful of values."""
    seeds = [0, *(1 << bit for bit in range(64))]
    rows = np.stack([variates(keys(seed, ordinals=[0]), 64)[0] for seed in seeds])
    for one, other in pairwise(rows):
        assert np.sum(one == other) == 0
    assert len({row.tobytes() for row in rows}) == len(seeds)


def test_values_hardly_repeat() -> None:
    """Float32 makes some equal; a hash that merges its inputs would make many."""
    values = variates(keys(), IDS)
    for row in values[:8]:
        assert np.unique(row).size > 0.995 * IDS
    assert np.unique(values[:, 5]).size == values.shape[0]


def test_no_draw_is_another_one_shifted() -> None:
    """Among 4,096 draws a generator of 32 bits of state would repeat whole stretches of a few others."""
    ids = 4096
    values = variates(keys(ordinals=range(ids)), ids)
    sorted_starts = np.sort(values[:, 0])
    place = np.minimum(np.searchsorted(sorted_starts, values), ids - 1)
    row, column = np.nonzero((sorted_starts[place] == values)[:, 1:-1])
    start = dict(zip(values[:, 0].tolist(), values[:, 1].tolist(), strict=True))
    assert row.size  # single values do repeat
    for r, c in zip(row, column + 1, strict=True):
        assert start[float(values[r, c])] != values[r, c + 1]


def test_the_hash_spreads_every_bit_of_its_key() -> None:
    """Keys as alike as can be, which threefry would hardly give: the hash stands on its own."""
    base = jnp.array([[5, 7]], jnp.uint32)
    first = np.repeat(variates(base), 64, axis=0)
    flips = jnp.array([[1 << bit, 0] for bit in range(32)] + [[0, 1 << bit] for bit in range(32)], jnp.uint32)
    second = variates(base ^ flips)
    assert worst_lag(first, second) < 7
    for one, other in zip(first, second, strict=True):
        assert pair_p(one, other) > 1e-6


def test_any_slice_of_the_vocabulary_is_computed_alone() -> None:
    """To the bit: what a shard computes, and what a longer vocabulary begins with."""
    some = keys(ordinals=range(3))
    whole = np.asarray(GUMBEL(some, jnp.arange(1000)))
    np.testing.assert_array_equal(np.asarray(GUMBEL(some, jnp.arange(250, 750))), whole[:, 250:750])
    np.testing.assert_array_equal(np.asarray(GUMBEL(some, jnp.array([999, 3, 3]))), whole[:, [999, 3, 3]])
    np.testing.assert_array_equal(np.asarray(GUMBEL(some[1], jnp.arange(1000))), whole[1])


def test_a_draw_knows_nothing_of_its_batch() -> None:
    """Keys of a row are the same alone, in a batch, and among more ordinals."""
    words = jnp.array([[9, 0], [10, 0], [9, 1]], jnp.uint32)
    samples, ordinals = jnp.array([0, 1, 0]), jnp.array([[0, 1, 5], [7, 7, 7], [2, 1, 0]])
    batch = np.asarray(keys_of(words, samples, ordinals))
    for row in range(3):
        for column in range(3):
            alone = keys_of(words[row : row + 1], samples[row : row + 1], ordinals[row : row + 1, column : column + 1])
            np.testing.assert_array_equal(batch[row, column], np.asarray(alone)[0, 0])
    assert len({key.tobytes() for key in batch.reshape(-1, 2)}) == 7


def _without_mixing(row_keys, ids):
    bits = ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + row_keys[..., :1]
    return -jnp.log(-jnp.log((bits.astype(jnp.float32) + 0.5) * 2.0**-32))


def _first_word_only(row_keys, ids):
    return noise.gumbel(jnp.stack([row_keys[..., 0] >> 28, row_keys[..., 0] * 0], -1), ids)


def _pairs_of_ids(row_keys, ids):
    return noise.gumbel(row_keys, ids // 2)


def _a_little_wider(row_keys, ids):
    return noise.gumbel(row_keys, ids) * 1.05


@pytest.mark.parametrize("bad", [_without_mixing, _first_word_only, _pairs_of_ids, _a_little_wider])
def test_these_checks_reject_bad_noise(bad: Make) -> None:
    first, second = (variates(k, make=bad) for k in neighbours(seed=10))
    checks = [
        distribution_p(first) > 1e-6,
        pair_p(first, second) > 1e-6,
        pair_p(first[:, :-1], first[:, 1:]) > 1e-6,
        worst_lag(first, second) < 7,
        worst_lag(first, first) < 7,
    ]
    assert not all(checks)
