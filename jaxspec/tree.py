"""Draft trees. A chain is a tree, and plain decoding is a tree with no draft nodes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxspec.config import MAX_NODES
from jaxspec.errors import ConfigError
from pallas_kernels.layout import WORD


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
