"""Draft trees: what they say about depth and ancestry, bit by bit, and which they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.errors import ConfigError
from jaxspec.tree import MAX_NODES, Tree, grow


@st.composite
def parents(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.integers(0, node)) for node in range(draw(st.integers(0, MAX_NODES))))


def line_of(tree: Tree, node: int) -> list[int]:
    """From a node up to the root, by walking."""
    line = [node]
    while line[-1]:
        line.append(tree.parents[line[-1] - 1])
    return line


def words_of(tree: Tree) -> np.ndarray:
    words = tree.ancestor_words
    assert words is not None
    assert words.dtype == np.int32
    return words


@given(parents())
def test_ancestry_and_depth_are_those_of_a_walk_to_the_root(parents: tuple[int, ...]) -> None:
    tree = Tree(parents)
    assert tree.width == tree.size + 1 == len(tree.depths)
    assert tree.max_depth == max(tree.depths)
    for node in range(tree.width):
        line = line_of(tree, node)
        assert tree.depths[node] == len(line) - 1
        assert np.flatnonzero(tree.is_ancestor[node]).tolist() == sorted(line)


@given(parents())
def test_ancestor_words_hold_ancestry_bit_by_bit(parents: tuple[int, ...]) -> None:
    tree = Tree(parents)
    if tree.is_chain:
        assert tree.ancestor_words is None
        return
    words = words_of(tree)
    assert words.shape == (tree.width, -(-tree.width // 32))
    for node in range(tree.width):
        for other in range(words.shape[1] * 32):
            bit = (int(words[node, other // 32]) & 0xFFFFFFFF) >> (other % 32) & 1
            assert bit == (other in line_of(tree, node))


def test_bits_31_and_32_fall_on_either_side_of_a_word() -> None:
    star = Tree((0,) * 40)
    words = words_of(star).view(np.uint32)
    assert words[31].tolist() == [1 | 1 << 31, 0]
    assert words[32].tolist() == [1, 1]
    deepest = Tree((0, 0, *range(2, MAX_NODES)))
    assert (words_of(deepest)[-1].view(np.uint32) == [0xFFFFFFFD, 0xFFFFFFFF]).all()


@given(st.integers(0, MAX_NODES))
def test_a_chain_is_a_tree_without_words(length: int) -> None:
    chain = Tree.chain(length)
    assert chain.is_chain
    assert chain.ancestor_words is None
    assert chain.depths == tuple(range(length + 1))
    assert chain == Tree(chain.parents)
    assert hash(chain) == hash(Tree(chain.parents))


@pytest.mark.parametrize("parents", [(1,), (-1,), (0, 2), (0, 1, 3), (0, -1), (0, 0, 7)])
def test_a_node_before_its_parent_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="after its parent"):
        Tree(parents)


def test_too_many_nodes_are_refused() -> None:
    assert Tree.chain(MAX_NODES).width == 64
    with pytest.raises(ConfigError, match="at most 63 nodes, not 64"):
        Tree((0,) * 64)


@given(parents())
def test_paths_lead_from_the_root(parents: tuple[int, ...]) -> None:
    tree = Tree(parents)
    for node in range(tree.width):
        line = line_of(tree, node)[::-1]
        assert tree.paths[node].tolist() == line + [0] * (tree.max_depth + 1 - len(line))


def test_nodes_may_be_given_by_ranks() -> None:
    assert Tree.of_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]) == Tree((0, 0, 1, 1, 2, 3))
    assert np.flatnonzero(Tree.of_paths([(0,), (1,), (0, 0), (0, 0, 0)]).is_first_path).tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("paths", [[(1,)], [(0,), (0,)], [(0, 0)], [(0,), (1, 0)], [()], [(0,), (-1,)], [(0,), (0, 1)]])
def test_nodes_without_a_parent_or_an_elder_sibling_are_refused(paths) -> None:
    with pytest.raises(ConfigError, match="of a draft tree must come once"):
        Tree.of_paths(paths)


@given(st.lists(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 30))
def test_the_best_tree_has_the_likeliest_nodes(accuracy: list[list[float]], size: int) -> None:
    """Against all nodes there are, sorted: where no guess is likelier than the one before it."""
    accuracy = [sorted(row, reverse=True) for row in accuracy]
    level, every = [1.0], []
    for row in accuracy:
        level = [chance * a for chance in level for a in row]
        every += level
    found = grow(accuracy, size)
    np.testing.assert_allclose([chance for _, chance in found], sorted(every, reverse=True)[:size])
    Tree.of_paths([ranks for ranks, _ in found])
