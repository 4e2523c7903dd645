"""Which rows of a checkpoint's tensors an array of parameters is made of, and the pieces in which they are read."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jaxspec.models.families import Parameter, Part

_PART = 2**40
"""In a map of rows, row r of the n-th part (from 1) is n · _PART + r; 0 is a row of no tensor, which stays zero."""

RowMap = Int64[np.ndarray, "..."]


class Piece(NamedTuple):
    """Neighbouring rows of a tensor that are neighbours in an array, too."""

    name: str
    start: int
    stop: int
    at: int
    """Where the first of them is in the array, whose features are counted through."""


def features_of(parameter: Parameter) -> tuple[int, ...]:
    """The dimensions of a parameter that are rows of its tensors; what follows are their inputs."""
    return parameter.shape[: len(parameter.shape) + 1 - len(parameter.parts[0].shape)]


def row_map(parameter: Parameter, features: tuple[int, ...]) -> RowMap:
    """The row that each of `features` is. Where the parameter has another number of them, they are those of the same
    model with more or fewer words, or with more key/value heads (`ModelSpec.spread`)."""
    found = np.zeros(features_of(parameter), np.int64)
    for number, part in enumerate(parameter.parts, 1):
        rows = number * _PART + np.arange(part.shape[0])
        found[part.index] = rows.reshape(found[part.index].shape)
    if found.shape == features:
        return found
    return _of_words(found, features) if found.ndim == 1 else _of_heads(found, features)


def _of_words(rows: RowMap, features: tuple[int, ...]) -> RowMap:
    """`[V]`, padded or cut."""
    found = np.zeros(features, np.int64)
    found[: len(rows)] = rows[: len(found)]
    return found


def _of_heads(rows: RowMap, features: tuple[int, ...]) -> RowMap:
    """`[K, G+2, ..]` with every key/value head several times, and some of its queries beside each."""
    kv_heads, joined, *rest = features
    queries = rows[:, :-2].reshape(kv_heads, joined - 2, *rest)
    return np.concatenate([queries, rows[:, -2:].repeat(kv_heads // len(rows), axis=0)], axis=1)


def pieces(rows: RowMap, parts: Sequence[Part], step: int, height: int) -> Iterator[Piece]:
    """All rows that are some tensor's: at most `step` at once, and never of two matrices, which have `height` each."""
    flat = rows.ravel()
    breaks = np.flatnonzero(np.diff(flat) != 1) + 1
    edges = np.union1d(breaks, np.arange(0, flat.size + 1, height)).tolist()
    for begin, end in pairwise(edges):
        number, row = divmod(int(flat[begin]), _PART)
        for at in range(begin, end, step) if number else ():
            start = row + at - begin
            yield Piece(parts[number - 1].name, start, start + min(step, end - at), at)
