"""What drafts come to: accepted tokens of chains and trees."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxspec.config import MAX_NODES, find_config
from jaxspec.drafters._heads import ASSUMED, TREE_FILE, TreeFile
from jaxspec.errors import ConfigError
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading.heads import load_heads
from jaxspec.models.spec import ModelSpec
from jaxspec.plan.shape import Shape
from jaxspec.tree import Tree, grow

HEADS = 4
"""Of a model that has none yet: Medusa's own (Cai et al., 2024), one block each, with the model's projection."""


class Guesses(NamedTuple):
    """Heads and the nodes of their tree, the most promising first."""

    spec: HeadsSpec
    paths: Sequence[tuple[int, ...]]
    chances: Sequence[float]
    """Of each node to be right."""
    measured: bool
    """Whether the chances are of these heads, or of heads that nobody measured."""

    def tree(self, size: int) -> Tree:
        """Of the first nodes."""
        return Tree.of_paths(self.paths[:size])


def guesses_of(shape: Shape, folder: str | None) -> Guesses:
    """The heads of a folder, or of configs/medusa under the model's name; else heads with common accuracies.

    ConfigError, LoadError where the folder holds something else.
    """
    spec = shape.spec
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"{shape.name} cannot be run yet, and so has no heads")
    path = None if folder is None else Path(folder)
    if path is None:
        with suppress(ConfigError):
            path = find_config("medusa", shape.name, "")
    if path is None:
        return _assumed(HeadsSpec(HEADS, spec.embed_dim, spec.vocab_size))
    heads, _ = load_heads(path, spec, "bfloat16")
    tree = (path if path.is_dir() else path.parent) / TREE_FILE
    if not tree.is_file():
        return _assumed(heads)
    try:
        said = msgspec.json.decode(tree.read_bytes(), type=TreeFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{tree}: {error}") from error
    return Guesses(heads, said.nodes[:MAX_NODES], said.chances[:MAX_NODES], measured=True)


def _assumed(heads: HeadsSpec) -> Guesses:
    nodes, chances = zip(*grow(ASSUMED[: heads.num_heads], MAX_NODES), strict=True)
    return Guesses(heads, nodes, chances, measured=False)


def chain_tokens(acceptance: float, drafts: int) -> float:
    """Expected tokens of a round whose drafts, one after the other, are each accepted with this chance if all before
    them are (Leviathan et al., 2023, equation 1)."""
    return sum(acceptance**i for i in range(drafts + 1))


def tree_tokens(guesses: Guesses, drafts: int) -> float:
    """Expected tokens of a round with the first nodes of a tree: siblings exclude each other."""
    return 1 + sum(guesses.chances[:drafts])
