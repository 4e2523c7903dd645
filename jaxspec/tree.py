"""Draft trees. A chain is a tree, and plain decoding is a tree with no draft nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from jaxspec.config import MAX_NODES
from jaxspec.errors import ConfigError
from pallas_kernels.layout import WORD


def grow(accuracy: Sequence[Sequence[float]], size: int) -> list[tuple[tuple[int, ...], float]]:
    """The most promising nodes of a tree, best first, as (ranks, chance): any first ones are the best tree of so many.

    `accuracy[k][i]` is the chance that the i-th guess at depth k + 1 is right, given that all before it are; a node's
    chance is the product along its path (Cai et al., 2024, section 2.4.2). Fewer than `size` where there are no more.
    """
    nodes: list[tuple[tuple[int, ...], float]] = []
    open_: list[tuple[float, tuple[int, ...]]] = [(-accuracy[0][0], (0,))]
    while open_ and len(nodes) < size:
        chance, ranks = heappop(open_)
        nodes.append((ranks, -chance))
        of_depth = accuracy[len(ranks) - 1]
        if ranks[-1] + 1 < len(of_depth) and of_depth[ranks[-1]] > 0:
            heappush(open_, (chance / of_depth[ranks[-1]] * of_depth[ranks[-1] + 1], (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < len(accuracy):
            heappush(open_, (chance * accuracy[len(ranks)][0], (*ranks, 0)))
    return nodes


@dataclass(frozen=True)
class Tree:
    """The static shape of a draft: node i hangs under `parents[i-1]`; 0 is the root, the last committed token."""

    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parents) > MAX_NODES:
            raise ConfigError(f"a draft tree holds at most {MAX_NODES} nodes, not {len(self.parents)}")
        if any(not 0 <= parent <= i for i, parent in enumerate(self.parents)):
            raise ConfigError("every node of a draft tree must come after its parent")

    @staticmethod
    def chain(length: int) -> "Tree":
        """Each node under the one before it."""
        return Tree(tuple(range(length)))

    @staticmethod
    def of_paths(paths: Sequence[Sequence[int]]) -> "Tree":
        """The tree of nodes given by the ranks on the way to them: (0, 2) is the third child of the first child.

        ConfigError where a node comes before its parent or an elder sibling, or twice.
        """
        known: dict[tuple[int, ...], int] = {(): 0}
        for index, ranks in enumerate(map(tuple, paths), start=1):
            elder = (*ranks[:-1], ranks[-1] - 1) if ranks and ranks[-1] > 0 else ranks[:-1]
            if not ranks or min(ranks) < 0 or ranks in known or elder not in known or ranks[:-1] not in known:
                raise ConfigError(f"node {list(ranks)} of a draft tree must come once, after its parent and siblings")
            known[ranks] = index
        return Tree(tuple(known[ranks[:-1]] for ranks in list(known)[1:]))

    @property
    def size(self) -> int:
        """Draft nodes, the root not counted."""
        return len(self.parents)

    @property
    def width(self) -> int:
        """Tokens in the verify row: the root and the draft nodes."""
        return self.size + 1

    def prefix(self, width: int) -> "Tree":
        """The tree of the first `width` tokens of the verify row."""
        return Tree(self.parents[: width - 1])

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(self.size))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every token of the verify row; the root has 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def is_ancestor(self) -> np.ndarray:
        """bool [width, width]: [t, j] where token j is t's ancestor or t itself."""
        table = np.eye(self.width, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            table[node] |= table[parent]
        return table

    @cached_property
    def paths(self) -> np.ndarray:
        """int32 [width, max_depth + 1]: the tokens from the root to every token; past it 0, which is no token there."""
        table = np.zeros((self.width, self.max_depth + 1), np.int32)
        for node, parent in enumerate(self.parents, start=1):
            table[node] = table[parent]
            table[node, self.depths[node]] = node
        return table

    @cached_property
    def is_first_path(self) -> np.ndarray:
        """bool [width]: the root, its first child, the first child of that, and so on."""
        table = np.zeros(self.width, bool)
        node = 0
        table[0] = True
        while node in self.parents:
            node = self.parents.index(node) + 1
            table[node] = True
        return table

    @cached_property
    def children(self) -> np.ndarray:
        """int32 [width, most children]: the children of every token in order; 0, which nobody has, fills the rest."""
        lists = [[node for node, parent in enumerate(self.parents, start=1) if parent == t] for t in range(self.width)]
        table = np.zeros((self.width, max(map(len, lists))), np.int32)
        for token, nodes in enumerate(lists):
            table[token, : len(nodes)] = nodes
        return table

    @cached_property
    def ancestor_words(self) -> np.ndarray | None:
        """int32 [width, words] for `paged_attention`; None for a chain, which needs no words."""
        if self.is_chain:
            return None
        words = -(-self.width // WORD)
        bits = np.zeros((self.width, words * WORD), np.uint64)
        bits[:, : self.width] = self.is_ancestor
        weights = np.uint64(1) << np.arange(WORD, dtype=np.uint64)
        return (bits.reshape(self.width, words, WORD) * weights).sum(-1).astype(np.uint32).view(np.int32)
