"""Where tokens go and what they see, against loops over single tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tree import Tree
from pallas_kernels import Rows, page_slots, visible_slots

PAGE, PAGES = 4, 5
TABLE = np.random.default_rng(0).permutation(40)[: 3 * PAGES].reshape(3, PAGES)
"""Physical pages of three sequences, in no order."""


def rows_of(*rows: tuple[int, int, int]) -> Rows:
    return Rows(*(jnp.array(part) for part in zip(*rows, strict=True)))


@pytest.mark.parametrize("width", [1, 3, 9])
def test_a_token_lies_where_its_slot_says(width: int) -> None:
    starts = [(seq, start) for seq in range(3) for start in range(PAGE * PAGES)]
    rows = [(seq, start, count) for seq, start in starts for count in {0, 1, width}]
    pages, offsets = page_slots(rows_of(*rows), jnp.asarray(TABLE), PAGE, width)
    for i, (seq, start, count) in enumerate(rows):
        for t in range(width):
            slot = start + t
            if t < count and slot < PAGE * PAGES:
                assert (pages[i, t], offsets[i, t]) == (TABLE[seq, slot // PAGE], slot % PAGE)
            else:
                # Far out of range even after a layer's offset was added: a scatter that drops must drop it.
                assert pages[i, t] == 2**31 - 1


def test_two_rows_may_be_parts_of_one_sequence() -> None:
    pages, offsets = page_slots(rows_of((1, 0, 5), (1, 5, 5)), jnp.asarray(TABLE), PAGE, 5)
    slots = np.arange(10)
    np.testing.assert_array_equal(np.ravel(pages), TABLE[1, slots // PAGE])
    np.testing.assert_array_equal(np.ravel(offsets), slots % PAGE)


def test_a_chain_sees_all_that_came_before() -> None:
    rows, slots = rows_of((0, 0, 4), (1, 7, 4), (2, 3, 0)), np.arange(16)
    visible = visible_slots(rows, jnp.asarray(slots), 4, None)
    for row, start in enumerate((0, 7, 3)):
        for t in range(4):
            np.testing.assert_array_equal(visible[row, t], slots <= start + t)


def test_a_chain_needs_no_words() -> None:
    rows, slots = rows_of((0, 0, 5), (1, 6, 5)), jnp.arange(12)
    triangle = jnp.array([(2 << t) - 1 for t in range(5)], jnp.int32)[:, None]
    words = jnp.broadcast_to(triangle, (2, 5, 1))
    np.testing.assert_array_equal(visible_slots(rows, slots, 5, words), visible_slots(rows, slots, 5, None))


@pytest.mark.parametrize("size", [5, 31, 32, 40, 63])
def test_a_tree_sees_the_prefix_and_its_own_line(size: int) -> None:
    """More than 32 nodes take a second word; bit 31 is the sign of an int32."""
    rng = np.random.default_rng(size)
    trees = [Tree((0, 0, *(int(rng.integers(i + 1)) for i in range(2, size)))) for _ in range(2)]
    words = jnp.stack([jnp.asarray(tree.ancestor_words) for tree in trees])
    width, slots = size + 1, np.arange(3, 90)
    starts = (0, 17)
    visible = np.asarray(visible_slots(rows_of((0, 0, width), (1, 17, width)), jnp.asarray(slots), width, words))
    for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
        for t in range(width):
            line = {t}
            node = t
            while node:
                node = tree.parents[node - 1]
                line.add(node)
            expected = [slot < start or slot - start in line for slot in slots]
            np.testing.assert_array_equal(visible[row, t], expected)
