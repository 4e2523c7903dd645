"""The page pool: what is written where, what is moved, and that nothing else is touched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats import format_names, get_format
from jaxspec.kv.pool import PoolSpec, append, attend, compact, put_pages, take_pages
from jaxspec.tree import Tree
from jaxspec.types import Sequences
from pallas_kernels import Rows

SPEC = PoolSpec(get_format("float32"), num_layers=3, num_pages=13, page_size=4, num_kv_heads=2, head_dim=6)
TABLE = np.random.default_rng(0).permutation(13)[:12].reshape(3, 4)
"""Pages of three sequences; one page is free."""

write = jax.jit(partial(append, SPEC))
move = jax.jit(partial(compact, SPEC))


def random_pool(seed: int = 0) -> np.ndarray:
    shape = SPEC.shapes()["kv"].shape
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows_of(*rows: tuple[int, int, int]) -> Rows:
    return Rows(*(jnp.array(part) for part in zip(*rows, strict=True)))


def cell(pool: np.ndarray, layer: int, sequence: int, slot: int) -> np.ndarray:
    """A view of one slot's keys and values `[K, 2, D]`."""
    page = layer * SPEC.num_pages + TABLE[sequence, slot // SPEC.page_size]
    return pool[page, :, :, slot % SPEC.page_size]


def appended(pool: np.ndarray, layer: int, rows: list[tuple[int, int, int]], width: int):
    rng = np.random.default_rng(layer)
    k, v = (rng.normal(size=(len(rows), width, 2, 6)).astype(np.float32) for _ in range(2))
    out = write({"kv": jnp.asarray(pool)}, layer, rows_of(*rows), jnp.asarray(TABLE), jnp.asarray(k), jnp.asarray(v))
    return np.asarray(out["kv"]), k, v


@pytest.mark.parametrize("layer", range(3))
def test_tokens_are_written_to_their_slots_and_nothing_else_changes(layer: int) -> None:
    """Rows of padding only, rows cut short, page borders, and a row at the end of its table."""
    rows = [(0, 2, 5), (1, 0, 1), (2, 9, 0), (2, 14, 2), (0, 7, 3)]
    before = random_pool()
    after, k, v = appended(before, layer, rows, 5)
    expected = before.copy()
    for row, (sequence, start, count) in enumerate(rows):
        for token in range(count):
            cell(expected, layer, sequence, start + token)[:] = np.stack([k[row, token], v[row, token]], axis=1)
    np.testing.assert_array_equal(after, expected)


def test_a_row_of_padding_writes_nothing() -> None:
    before = random_pool()
    after, _, _ = appended(before, 2, [(0, 0, 0), (1, 5, 0), (2, 15, 0)], 4)
    np.testing.assert_array_equal(after, before)


def test_tokens_past_the_table_are_dropped() -> None:
    before = random_pool()
    after, _, _ = appended(before, 1, [(1, 15, 4)], 4)
    changed = np.flatnonzero((after != before).any(axis=(1, 2, 3, 4)))
    assert changed.tolist() == [SPEC.num_pages + TABLE[1, 3]]


@pytest.mark.parametrize("layer", range(3))
def test_attention_reads_its_own_layer(layer: int) -> None:
    """All other layers hold NaN; what was appended is what is attended to."""
    pool = np.full_like(random_pool(), np.nan)
    pool[layer * SPEC.num_pages : (layer + 1) * SPEC.num_pages] = 0
    rows = [(0, 0, 5), (1, 0, 3), (2, 0, 1)]
    pool, k, v = appended(pool, layer, rows, 5)
    q = np.random.default_rng(9).normal(size=(3, 5, 2, 2, 6)).astype(np.float32)
    found, _ = attend(SPEC, {"kv": jnp.asarray(pool)}, layer, rows_of(*rows), jnp.asarray(TABLE), None, jnp.asarray(q))
    for row, (_, _, count) in enumerate(rows):
        for token in range(count):
            score = np.einsum("kgd,skd->kgs", q[row, token], k[row, : token + 1]) / np.sqrt(6)
            weight = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
            expected = np.einsum("kgs,skd->kgd", weight, v[row, : token + 1])
            np.testing.assert_allclose(np.asarray(found)[row, token], expected, atol=1e-5)


def compacted(pool: np.ndarray, lengths: list[int], paths: list[list[int]], counts: list[int]) -> np.ndarray:
    length = jnp.asarray(lengths)
    sequences = Sequences(jnp.asarray(TABLE)[None], length[None], length[None] * 0, length)
    out = move({"kv": jnp.asarray(pool)}, sequences, jnp.asarray(paths), jnp.asarray(counts))
    return np.asarray(out["kv"])


def check_compact(lengths: list[int], paths: list[list[int]], counts: list[int]) -> None:
    before = random_pool()
    expected = before.copy()
    for sequence, (length, path, count) in enumerate(zip(lengths, paths, counts, strict=True)):
        for layer in range(SPEC.num_layers):
            for index in range(count):
                cell(expected, layer, sequence, length + index)[:] = cell(before, layer, sequence, length + path[index])
    np.testing.assert_array_equal(compacted(before, lengths, paths, counts), expected)


def test_an_accepted_path_moves_together_in_every_layer() -> None:
    """Across page borders, with targets that are sources of later moves; the rest stays as it was."""
    check_compact([2, 5, 7], [[0, 2, 3, 5], [0, 1, 2, 3], [0, 3, 4, 7]], [4, 4, 3])


def test_what_lies_past_the_count_does_not_move() -> None:
    check_compact([2, 5, 0], [[0, 5, 5, 5], [0, 7, 0, 0], [0, 9, 1, 2]], [1, 2, 0])


def test_any_path_of_a_tree_moves_right() -> None:
    tree = Tree((0, 0, 1, 2, 2, 3, 5, 6))
    rng = np.random.default_rng(3)
    for _ in range(20):
        paths = []
        for node in rng.integers(tree.width, size=3):
            line = np.flatnonzero(tree.is_ancestor[node]).tolist()
            paths.append(line + [0] * (tree.max_depth + 1 - len(line)))
        counts = [int(rng.integers(1 + sum(p > 0 for p in path) + 1)) for path in paths]
        check_compact(rng.integers(0, 16 - tree.width, size=3).tolist(), paths, counts)


def test_a_pool_starts_empty_and_knows_its_size() -> None:
    pool = SPEC.allocate(1)
    assert set(pool) == set(SPEC.shapes())
    assert all(not np.asarray(array).any() for array in pool.values())
    # Layers, heads, keys and values, slots, numbers, bytes.
    assert SPEC.page_bytes == 3 * 2 * 2 * 4 * 6 * 4
    assert SPEC.page_bytes * SPEC.num_pages == sum(array.nbytes for array in pool.values())
    half = PoolSpec(get_format("bfloat16"), 3, 13, 4, 2, 6)
    assert half.page_bytes * 2 == SPEC.page_bytes


@pytest.mark.parametrize("name", format_names())
def test_pages_are_taken_and_put_back_to_the_bit(name: str) -> None:
    """Any bits, NaN among them; of every layer, to other pages, and no other page changes."""
    spec = PoolSpec(get_format(name), num_layers=3, num_pages=5, page_size=64, num_kv_heads=2, head_dim=8)
    pools = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        kept = {name: array for name, array in spec.allocate(1).items() if name in spec.tails(1)}
        bits = {name: rng.bytes(array.size * array.dtype.itemsize) for name, array in spec.shapes().items()}
        numbers = {name: np.frombuffer(data, spec.shapes()[name].dtype) for name, data in bits.items()}
        pools.append({name: jnp.asarray(a.reshape(spec.shapes()[name].shape)) for name, a in numbers.items()} | kept)
    source, target = pools
    dropped = np.iinfo(np.int32).max
    stored = take_pages(spec, source, jnp.array([4, 1, 0]))
    after = put_pages(spec, target, jnp.array([0, 3, dropped]), stored)
    assert after.keys() == target.keys()
    for array in spec.shapes():
        was, now, there = (np.asarray(pool[array]).reshape(3, 5, -1).view(np.uint8) for pool in (target, after, source))
        np.testing.assert_array_equal(now[:, [0, 3]], there[:, [4, 1]])
        np.testing.assert_array_equal(now[:, [1, 2, 4]], was[:, [1, 2, 4]])
        assert stored[array].shape[:2] == (3, 3)
