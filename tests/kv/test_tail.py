"""Groups and tails: what a query sees is a matter of its slot alone, however its sequence came about."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats.int4 import grouped
from jaxspec.kv.pool import PoolSpec, compact, duplicate, write_and_attend
from jaxspec.kv.tail import TAIL, room
from jaxspec.tree import Tree
from jaxspec.types import Sequences
from pallas_kernels import Rows

GROUP, PAGE, LAYERS, HEADS, QUERIES, DIM, NODES, LENGTH = 4, 8, 2, 2, 3, 6, 6, 40
SPEC = PoolSpec(grouped(GROUP), LAYERS, 13, PAGE, HEADS, DIM, NODES)
TABLE = np.random.default_rng(0).permutation(13)[:10].reshape(2, 5)
RNG = np.random.default_rng(1)
K, V = RNG.normal(size=(2, 2, LAYERS, LENGTH + NODES, HEADS, DIM)).astype(np.float32)
"""Keys and values `[sequence, layer, slot, heads, dim]` of two texts."""
K[..., 2] *= 20
Q = RNG.normal(size=(2, LAYERS, LENGTH, HEADS, QUERIES, DIM)).astype(np.float32)
WRONG = RNG.normal(size=(NODES, HEADS, DIM)).astype(np.float32)


def rounded(array: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(array).astype(jnp.bfloat16), np.float64)


def coded(numbers: np.ndarray, axis: int) -> np.ndarray:
    """What 4 bits make of bfloat16 numbers, in float64."""
    numbers = rounded(numbers)
    zero = rounded(numbers.min(axis, keepdims=True))
    scale = rounded((numbers.max(axis, keepdims=True) - zero) / 15)
    return np.clip(np.round((numbers - zero) / scale), 0, 15) * scale + zero


def expected(sequence: int, layer: int, slot: int) -> np.ndarray:
    """Attention `[heads, queries, dim]` of one slot's queries: earlier groups as stored, its own as it is."""
    begin = slot - slot % GROUP
    k, v = (rounded(a[sequence, layer, : slot + 1]) for a in (K, V))
    for at in range(0, begin, GROUP):
        k[at : at + GROUP] = coded(K[sequence, layer, at : at + GROUP], 0)
        v[at : at + GROUP] = coded(V[sequence, layer, at : at + GROUP], -1)
    score = np.einsum("hqd,shd->hqs", Q[sequence, layer, slot], k) / np.sqrt(DIM)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hqs,shd->hqd", weight / weight.sum(-1, keepdims=True), v)


@partial(jax.jit, static_argnames=(), donate_argnums=0)
def call(pool, layer, rows, ancestors, q, k, v):
    return write_and_attend(SPEC, pool, layer, rows, jnp.asarray(TABLE), ancestors, q, k, v)


def run(pool, rows: list[tuple[int, int, int]], width: int, nodes=None, ancestors=None):
    """Run rows (sequence, first slot, tokens) through both layers and check every query.

    `nodes`: the slot whose key, value and query each token of the only row has, and -1 for rubbish.
    """
    for layer in range(LAYERS):
        q = np.zeros((len(rows), width, HEADS, QUERIES, DIM), np.float32)
        k, v = np.zeros((2, len(rows), width, HEADS, DIM), np.float32)
        for r, (sequence, start, count) in enumerate(rows):
            for t in range(count):
                slot = start + t if nodes is None else nodes[t]
                if slot < 0:
                    k[r, t] = v[r, t] = WRONG[t % NODES]
                else:
                    q[r, t], k[r, t], v[r, t] = (a[sequence, layer, slot] for a in (Q, K, V))
        words = None if ancestors is None else jnp.asarray(ancestors)[None]
        table = Rows(*jnp.asarray(rows, jnp.int32).T)
        out, pool = call(pool, jnp.int32(layer), table, words, *map(jnp.asarray, (q, k, v)))
        for r, (sequence, start, count) in enumerate(rows):
            for t in range(count):
                slot = start + t if nodes is None else nodes[t]
                if slot >= 0:
                    np.testing.assert_allclose(np.asarray(out)[r, t], expected(sequence, layer, slot), atol=2e-5)
    return pool


@pytest.mark.parametrize("first", [0, 1, 3, 4, 9])
def test_chunks_steps_and_their_mixture_see_the_same(first: int) -> None:
    """Several groups of a prompt in one call, beside another sequence; then single tokens, over the groups' ends."""
    pool = run(SPEC.allocate(2), [(0, 0, first % GROUP or 1), (1, 0, 1), (0, 0, 0)], GROUP)
    start = first % GROUP or 1
    rows = [(0, start, GROUP - start)] + [(0, at, GROUP) for at in range(GROUP, 16, GROUP)] + [(0, 16, 2)]
    pool = run(pool, [*rows, (1, 1, 3)], GROUP)
    for step in range(12):
        pool = run(pool, [(0, 18 + step, 1), (1, 4 + step, 1)], 1)


def test_rejected_drafts_leave_no_trace() -> None:
    """Chains of drafts run into and past a group's end; what comes after sees the right tokens there."""
    pool, length = SPEC.allocate(2), 0
    for accepted in (2, 0, 1, 0, 0, 3, 1, 0, 2, 2, 0, 1):
        allowed = min(accepted, int(room(SPEC.format, jnp.array([length]))[0]))
        nodes = [length + i if i <= allowed else -1 for i in range(NODES)]
        pool = run(pool, [(0, length, NODES)], NODES, nodes)
        length += 1 + allowed


def test_an_accepted_path_of_a_tree_is_what_a_chain_would_have_left() -> None:
    tree = Tree((0, 0, 1, 2, 4))
    path = [0, 2, 4, 5]
    pool, length = SPEC.allocate(2), 0
    for accepted in (1, 3, 0, 2, 1, 3, 3, 0, 1, 2, 3):
        depth = min(accepted, int(room(SPEC.format, jnp.array([length]))[0]))
        nodes = [-1] * tree.width
        for step, node in enumerate(path[: depth + 1]):
            nodes[node] = length + step
        pool = run(pool, [(0, length, tree.width)], tree.width, nodes, tree.ancestor_words)
        here = jnp.array([[length, 0]])
        sequences = Sequences(jnp.asarray(TABLE)[None], here, here * 0, here[0])
        pool = compact(SPEC, pool, sequences, jnp.array([path, path]), jnp.array([depth + 1, 0]))
        length += depth + 1


def test_whole_pages_can_be_shared_and_tails_move_with_their_rows() -> None:
    """A prefix hit brings no tail: at a page's end there is none; a row that moves takes its own along."""
    pool = run(SPEC.allocate(2), [(0, at, GROUP) for at in range(0, 16, GROUP)] + [(0, 16, 3)], GROUP)
    pool |= {TAIL: pool[TAIL][jnp.array([1, 0])]}
    table = TABLE.copy()
    TABLE[1] = table[0]
    K[1], V[1], Q[1] = K[0], V[0], Q[0]
    try:
        call.clear_cache()
        pool = run(pool, [(1, 19, 1)], 1)
        # The other row starts after two whole pages of the first.
        run(duplicate(SPEC, pool, jnp.int32(12), jnp.int32(11)), [(0, 16, 3)], GROUP)
    finally:
        TABLE[:] = table
        call.clear_cache()


def test_a_group_leaves_so_many_drafts() -> None:
    assert room(SPEC.format, jnp.arange(9)).tolist() == [3, 2, 1, 0, 3, 2, 1, 0, 3]
    assert room(SPEC.format.draft, jnp.arange(9)) is None


def test_tails_count() -> None:
    assert SPEC.tail_bytes == LAYERS * HEADS * 2 * (GROUP + NODES) * DIM * 2
    assert sum(a.nbytes for a in SPEC.allocate(3).values()) == SPEC.num_pages * SPEC.page_bytes + 3 * SPEC.tail_bytes
    assert SPEC.of_draft(1, 1, 8).tail_bytes == 0
