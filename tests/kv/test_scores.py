"""Who is looked at, and what stays: by sorting, head by head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv import scores
from jaxspec.kv.formats import get_format
from jaxspec.kv.policy import FIRST, Policy
from jaxspec.kv.pool import PoolSpec, condense, write_and_attend
from jaxspec.kv.scores import SCORES, clear, ends, heaviest
from pallas_kernels import Rows
from pallas_kernels.layout import Variant

LAYERS, HEADS, GROUP, DIM, PAGE, PAGES, SLOTS = 2, 3, 2, 4, 4, 20, 40
POLICY = Policy(Variant(mass=True), heavy=5, recent=6)
SOURCE, TARGET = [3, 9, 1, 14, 6, 2], [14, 1, 7]
"""Pages in common, in another order."""


def spec_of(kv_dtype: str) -> PoolSpec:
    return PoolSpec(get_format(kv_dtype), LAYERS, PAGES, PAGE, HEADS, DIM, policy=POLICY, slots=SLOTS)


def stays(found: np.ndarray, length: int) -> np.ndarray:
    """By a stable sort: of equals the lower slot."""
    old = length - POLICY.recent
    best = np.argsort(-found[..., :old], axis=-1, kind="stable")[..., : POLICY.heavy]
    recent = np.broadcast_to(np.arange(old, length), (*found.shape[:2], POLICY.recent))
    return np.concatenate([np.sort(best), recent], axis=-1)


@pytest.mark.parametrize("length", [11, 12, 23, SLOTS])
def test_the_last_stay_and_the_best_of_the_others_with_their_scores(length: int) -> None:
    rng = np.random.default_rng(length)
    found = rng.choice([0.0, 0.25, 0.5, 1.0, 7.0], size=(LAYERS, HEADS, SLOTS)).astype(np.float32)  # many ties
    stay, left = jax.jit(heaviest, static_argnums=(2, 3))(found, jnp.int32(length), POLICY.heavy, POLICY.recent)
    expected = stays(found, length)
    np.testing.assert_array_equal(stay, expected)
    np.testing.assert_array_equal(left[..., :11], np.take_along_axis(found, expected, axis=-1))
    assert not np.any(left[..., 11:])


def test_without_scores_the_first_and_the_last_stay() -> None:
    assert ends(jnp.int32(20), 4, 3)[0, 0].tolist() == [0, 1, 2, 3, 17, 18, 19]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("scored", [True, False])
def test_slots_move_head_by_head_as_they_are_stored(kv_dtype: str, scored: bool) -> None:
    """To the bit, though pages are read and written; nothing else changes but what was in the target."""
    spec, rng, length = spec_of(kv_dtype), np.random.default_rng(0), 22
    spec = spec if scored else spec.silent
    k, v = jnp.asarray(rng.normal(size=(2, LAYERS * PAGES, PAGE, HEADS, DIM)), jnp.float32)
    every = (
        np.broadcast_to(np.arange(LAYERS * PAGES)[:, None], k.shape[:2]),
        np.broadcast_to(np.arange(PAGE), k.shape[:2]),
    )
    pool = spec.allocate(2) | spec.format.write(spec.allocate(2), *every, k, v)
    if scored:
        pool[SCORES] = jnp.asarray(rng.uniform(size=pool[SCORES].shape), jnp.float32)
    arrays = jax.tree.map(np.asarray, pool)
    pad = partial(np.resize, new_shape=SLOTS // PAGE)
    after = jax.jit(partial(condense, spec))(arrays, jnp.int32(1), jnp.int32(length), pad(SOURCE), pad(TARGET))
    if scored:
        stay = stays(arrays[SCORES][1], length)
        np.testing.assert_array_equal(after[SCORES][0], arrays[SCORES][0])
        np.testing.assert_array_equal(after[SCORES][1, ..., :11], np.take_along_axis(arrays[SCORES][1], stay, axis=-1))
    else:
        stay = np.broadcast_to([*range(FIRST), *range(length - 7, length)], (LAYERS, HEADS, 11))
        assert after.keys() == spec.shapes().keys()
    for name in spec.shapes():
        expected = arrays[name].copy()
        for layer, head, slot in np.ndindex(*stay.shape):
            old, new = stay[layer, head, slot], slot
            page, to = (table[at // PAGE] + layer * PAGES for table, at in ((SOURCE, old), (TARGET, new)))
            expected[to, head, :, new % PAGE] = arrays[name][page, head, :, old % PAGE]
        np.testing.assert_array_equal(after[name], expected)


def weights(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`[K, S]`, a mean over the queries of a head."""
    logits = np.einsum("kgd,skd->kgs", np.float64(q), np.float64(keys)) / np.sqrt(DIM)
    found = np.exp(logits - logits.max(-1, keepdims=True))
    return (found / found.sum(-1, keepdims=True)).mean(1)


def test_first_tokens_of_rows_vote_and_no_others() -> None:
    """Two rows of a sequence in one call, one of drafts, and one without tokens; a pool that is silent counts none."""
    spec, rng = spec_of("float32"), np.random.default_rng(1)
    width, table = 3, jnp.asarray(np.random.default_rng(2).permutation(PAGES).reshape(2, SLOTS // PAGE))
    rows = Rows(jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 0, 0]), jnp.array([1, 3, 2, 0]))
    q = rng.normal(size=(4, width, HEADS, GROUP, DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 4, width, HEADS, DIM)).astype(np.float32)
    votes = rng.uniform(size=(2, LAYERS, HEADS, SLOTS)).astype(np.float32)
    pool = spec.allocate(2) | {SCORES: jnp.asarray(votes)}
    for here, changes in ((spec, True), (spec.silent, False)):
        _, after = write_and_attend(here, pool, 1, rows, table, None, *map(jnp.asarray, (q, k, v)))
        expected = np.float64(votes)
        if changes:
            expected[0, 1, :, :1] += weights(q[0, 0], k[0, :1])
            expected[0, 1, :, :2] += weights(q[1, 0], np.concatenate([k[0, :1], k[1, :1]]))
            expected[1, 1, :, :1] += weights(q[2, 0], k[2, :1])
        np.testing.assert_allclose(after[SCORES], expected, atol=1e-6)
    cleared = clear(pool, jnp.int32(1))[SCORES]
    assert not np.any(cleared[1])
    np.testing.assert_array_equal(cleared[0], votes[0])
    assert clear({"kv": jnp.zeros(1)}, jnp.int32(0)).keys() == {"kv"}


def test_scores_take_memory_of_each_sequence() -> None:
    spec = spec_of("int8")
    assert spec.tail_bytes == LAYERS * HEADS * SLOTS * scores.DTYPE.itemsize
    assert spec.of_draft(1, 1, 8).tail_bytes == 0
    assert spec.limit == POLICY.heavy + POLICY.recent + PAGE
