"""Paged attention against dense float64 attention over the slots that each query may see."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tree import Tree
from pallas_kernels import Rows, Variant, paged_attention
from pallas_kernels.layout import PLAIN

PAGE, TABLE_WIDTH, DIM = 8, 12, 16
SEQUENCES = 7
"""Sequences and rows of every call, for few compiled shapes: those a case does not name are empty."""
PAGES = SEQUENCES * TABLE_WIDTH + 7
POISON = {0: np.nan, 1: 1e30}
"""Unused keys and values; a value is finite because zero times NaN is NaN even in right code."""


def read(arrays, pages, which):
    return arrays["kv"][pages, :, which]


attend = jax.jit(partial(paged_attention, read=read, page=PAGE, scale=DIM**-0.5), static_argnames="variant")


@dataclass
class Case:
    """Sequences with random keys and values, spread over pages in random order amid poison."""

    rows: list[tuple[int, int, int]]
    """Sequence, start and count of every row."""
    width: int
    heads: int = 2
    group: int = 3
    dtype: str = "float32"
    seed: int = 0
    tree: Tree | None = None
    variant: Variant = PLAIN

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        lengths = [max([0, *(start + n for s, start, n in self.rows if s == seq)]) for seq in range(SEQUENCES)]
        self.kv = [rng.normal(size=(2, length, self.heads, DIM)).astype(self.dtype) for length in lengths]
        self.q = rng.normal(size=(SEQUENCES, self.width, self.heads, self.group, DIM)).astype(np.float32)
        self.sink_q = rng.normal(size=self.q.shape).astype(np.float32)
        self.table = rng.permutation(PAGES)[: SEQUENCES * TABLE_WIDTH].reshape(SEQUENCES, -1)
        pool = np.zeros((PAGES, self.heads, 2, PAGE, DIM), self.dtype)
        pool[:, :, 0], pool[:, :, 1] = POISON[0], POISON[1]
        for seq, kv in enumerate(self.kv):
            for slot in range(kv.shape[1]):
                page = self.table[seq, slot // PAGE]
                pool[page, :, :, slot % PAGE] = kv[:, slot].transpose(1, 0, 2)
        self.pool = pool

    @property
    def ancestors(self) -> jax.Array | None:
        if self.tree is None or self.tree.ancestor_words is None:
            return None
        return jnp.broadcast_to(self.tree.ancestor_words, (SEQUENCES, *self.tree.ancestor_words.shape))

    def run(self, **change):
        """The implementation's result `[R, T, K, G, D]`, and the mass where the variant asks for it."""
        values = {"q": self.q, "pool": self.pool, "rows": self.rows, "table": self.table} | change
        empty = [(0, 0, 0)] * (SEQUENCES - len(values["rows"]))
        rows = Rows(*jnp.array([*values["rows"], *empty], jnp.int32).T)
        found = attend(
            jnp.asarray(values["q"]),
            {"kv": jnp.asarray(values["pool"])},
            rows=rows,
            page_table=jnp.asarray(values["table"]),
            ancestors=self.ancestors,
            sink_queries=jnp.asarray(self.sink_q) if self.variant.sinks else None,
            variant=self.variant,
        )
        return jax.tree.map(np.asarray, found)

    def seen(self, row: int, token: int) -> list[int]:
        """Slots that one query attends to."""
        start = self.rows[row][1]
        if self.tree is None:
            slots = range(start + token + 1)
            position = start + token
        else:
            slots = [*range(start), *(start + int(j) for j in np.flatnonzero(self.tree.is_ancestor[token]))]
            position = start + self.tree.depths[token]
        window, sinks = self.variant.window, self.variant.sinks
        own = range(start, start + self.width) if self.tree else ()
        return [s for s in slots if window is None or s > position - window or s < sinks or s in own]

    def weights(self, row: int, token: int) -> np.ndarray:
        """Softmax over the slots that one query attends to `[K, G, seen]`, in float64."""
        seen = np.array(self.seen(row, token))
        keys = self.kv[self.rows[row][0]][0, seen].astype(np.float64)
        score, turned = (
            np.einsum("kgd,skd->kgs", q[row, token].astype(np.float64), keys) * DIM**-0.5 for q in (self.q, self.sink_q)
        )
        score = np.where(seen < self.variant.sinks, turned, score)
        if self.variant.soft_cap is not None:
            score = self.variant.soft_cap * np.tanh(score / self.variant.soft_cap)
        weight = np.exp(score - score.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True)

    def check(self, found: np.ndarray, tolerance: float = 2e-6) -> None:
        """Every real token's result is the dense one."""
        for row, (seq, _, count) in enumerate(self.rows):
            for token in range(count):
                values = self.kv[seq][1, self.seen(row, token)].astype(np.float64)
                expected = np.einsum("kgs,skd->kgd", self.weights(row, token), values)
                np.testing.assert_allclose(found[row, token], expected, atol=tolerance, rtol=tolerance)


TREES = {"small": Tree((0, 0, 1, 1, 2)), "wide": Tree(tuple(i // 3 for i in range(45)))}


def rows_over(starts: list[int], count: int) -> list[tuple[int, int, int]]:
    return [(seq, start, count) for seq, start in enumerate(starts)]


@pytest.mark.parametrize(("heads", "group"), [(1, 4), (4, 1), (2, 3)], ids=["MQA", "MHA", "GQA"])
def test_decoding_ragged_sequences(heads: int, group: int) -> None:
    """Page borders, one token, and the table's last slot among the lengths."""
    last = PAGE * TABLE_WIDTH - 1
    case = Case(rows_over([0, 1, PAGE - 2, PAGE - 1, PAGE, 3 * PAGE + 5, last], 1), 1, heads, group)
    case.check(case.run())


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6])
def test_any_number_of_rows_in_any_order_of_length(count: int) -> None:
    """The longest row may come first or last, and fewer rows than are worth dividing may be all there are."""
    case = Case(rows_over([3, 60, 2 * PAGE, 5, PAGE * TABLE_WIDTH - 1, 30, 9][:count], 1), 1)
    rows = Rows(*jnp.array(case.rows, jnp.int32).T)
    found = attend(
        jnp.asarray(case.q[:count]),
        {"kv": jnp.asarray(case.pool)},
        rows=rows,
        page_table=jnp.asarray(case.table),
        ancestors=None,
    )
    case.check(np.asarray(found))


@pytest.mark.parametrize("name", TREES)
def test_trees_see_their_own_line_only(name: str) -> None:
    tree = TREES[name]
    case = Case(rows_over([0, 1, PAGE - 3, PAGE, 33], tree.width), tree.width, tree=tree)
    case.check(case.run())


def test_chains_shorter_than_their_row() -> None:
    case = Case([(0, 5, 4), (1, 0, 3), (2, 14, 1), (3, 6, 2)], 4)
    case.check(case.run())


def test_several_chunks_of_one_prompt_in_one_call() -> None:
    """All were written before any attends: a later chunk sees the earlier ones of the same call."""
    case = Case([(0, 0, 10), (0, 10, 10), (1, 3, 10), (0, 20, 4), (1, 13, 7)], 10)
    case.check(case.run())


def test_rows_without_tokens_disturb_nobody() -> None:
    case = Case(rows_over([5, 20, 0], 4), 4)
    found = case.run(rows=[(0, 5, 4), (1, 20, 4), (2, 90, 0)])
    case.rows[2] = (2, 90, 0)
    case.check(found)


def test_bfloat16_pages() -> None:
    """The keys and values are what bfloat16 holds; the weights of the values are rounded once more."""
    case = Case(rows_over([2, 11, 40], 4), 4, dtype="bfloat16")
    case.check(case.run(), tolerance=1e-2)


def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    case = Case(rows_over([3, 30], 4), 4)
    for scale in (1e-20, 1e3):
        q = case.q
        case.q = (q * np.float32(scale)).astype(np.float32)
        case.check(case.run(), tolerance=1e-3)
        case.q = q


def test_scores_far_below_zero_are_not_taken_for_masked_ones() -> None:
    """All keys alike: the result is the mean of the visible values, however low the score."""
    case = Case(rows_over([3, 30, PAGE - 1], 4), 4)
    for kv in case.kv:
        kv[0] = 1
    keys = case.pool[:, :, 0]
    keys[np.isfinite(keys)] = 1
    case.q[:] = -1e6
    case.check(case.run())


STARTS = [0, 1, PAGE - 3, 2 * PAGE, 33, 60]
VARIANTS = {
    "window within a page": Variant(window=6),
    "window of some pages": Variant(window=21),
    "sinks": Variant(window=9, sinks=4),
    "sinks that cross a page": Variant(window=11, sinks=PAGE + 1),
    "soft cap": Variant(soft_cap=0.5),
    "all": Variant(window=9, sinks=4, soft_cap=0.5, mass=True),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tree", [None, TREES["small"]], ids=["chain", "tree"])
def test_variants(name: str, tree: Tree | None) -> None:
    case = Case(rows_over(STARTS, 6), 6, tree=tree, variant=VARIANTS[name])
    found = case.run()
    case.check(found[0] if case.variant.mass else found)


def test_a_window_shorter_than_a_prompt_chunk() -> None:
    case = Case([(0, 0, 10), (0, 10, 10), (1, 3, 10), (2, 40, 7)], 10, variant=Variant(window=4, sinks=2))
    case.check(case.run())


@pytest.mark.parametrize("variant", [Variant(mass=True), Variant(window=9, sinks=4, mass=True)], ids=["full", "sinks"])
def test_mass_is_the_softmax_of_each_rows_first_token(variant: Variant) -> None:
    case = Case(rows_over(STARTS, 6), 6, tree=TREES["small"], variant=variant)
    out, mass = case.run()
    case.check(out)
    for row in range(len(case.rows)):
        expected = np.zeros(mass.shape[1:])
        expected[:, case.seen(row, 0)] = case.weights(row, 0).mean(1)
        np.testing.assert_allclose(mass[row], expected, atol=2e-6)


# Law 3a and law 5


def test_a_row_is_the_same_to_the_bit_when_others_grow_or_turn_bad() -> None:
    """The loop then runs over more pages, which are masked whole for the short rows."""
    case = Case([*rows_over([3, 13, 6, 80], 4), (4, 0, 4)], 4)
    alone = [(seq, start, count if seq == kept else 0) for kept in (0, 1) for seq, start, count in case.rows]
    whole, size = case.run(), len(case.rows)
    for kept in (0, 1):
        found = case.run(rows=alone[kept * size : (kept + 1) * size])
        np.testing.assert_array_equal(found[kept], whole[kept])
    pool = case.pool.copy()
    pool[case.table[3]] = np.nan
    found = case.run(pool=pool)
    np.testing.assert_array_equal(found[:3], whole[:3])


def test_physical_pages_do_not_matter() -> None:
    case = Case(rows_over([3, 33, 60], 4), 4)
    order = np.random.default_rng(1).permutation(len(case.pool))
    moved = np.empty_like(case.pool)
    moved[order] = case.pool
    found = case.run(pool=moved, table=order[case.table])
    np.testing.assert_array_equal(found[: len(case.rows)], case.run()[: len(case.rows)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_poison_reaches_a_result(dtype: str) -> None:
    """Unused slots of a row's own pages, its unused pages and all free pages may hold anything."""
    case = Case(rows_over([0, 3, PAGE - 1, 41], 4), 4, dtype=dtype)
    clean = case.pool.copy()
    clean[~np.isfinite(clean.astype(np.float32)) | (np.abs(clean.astype(np.float32)) > 1e20)] = 0
    poisoned = case.run()
    assert np.isfinite(poisoned[: len(case.rows)]).all()
    np.testing.assert_array_equal(poisoned[: len(case.rows)], case.run(pool=clean)[: len(case.rows)])


def test_what_is_out_of_sight_of_a_tree_does_not_matter() -> None:
    """A sibling's key may be NaN for all that a node knows."""
    tree = TREES["wide"]
    case = Case(rows_over([0, 21], tree.width), tree.width, tree=tree)
    whole = case.run()
    for node in (1, 31, 32, 45):
        pool = case.pool.copy()
        for seq, start, _ in case.rows:
            slot = start + node
            pool[case.table[seq, slot // PAGE], :, 0, slot % PAGE] = np.nan
            pool[case.table[seq, slot // PAGE], :, 1, slot % PAGE] = 1e30
        blind = ~tree.is_ancestor[:, node]
        found = case.run(pool=pool)
        np.testing.assert_array_equal(found[:2, blind], whole[:2, blind])
        assert np.isnan(found[:2, ~blind]).all()
