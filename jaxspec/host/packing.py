"""Prompt chunks packed into calls of few shapes: a call takes some rows of tokens, one after the other."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Part = tuple[int, int, list[int]]
"""Row of the batch, slot of the first token, and the tokens of one row of a call."""


class Shape(NamedTuple):
    """What prefill compiles for."""

    tokens: int
    """Of all rows together."""
    rows: int

    def takes(self, parts: list[Part]) -> bool:
        """Whether one call of this shape holds all of them."""
        return len(parts) <= self.rows and sum(len(ids) for _, _, ids in parts) <= self.tokens


class Call(NamedTuple):
    """One call; rows without tokens are padding."""

    table: np.ndarray
    """int32 [3, rows]: row of the batch, slot of the first token, tokens."""
    tokens: np.ndarray
    """int32 [tokens], the rows' one after the other and zeros at the end."""


def shapes_of(chunk: int, width: int) -> list[Shape]:
    """The shapes for chunks of `chunk` tokens in rows of `width`: a short prompt, a part of a long one, many short
    ones; the last takes any chunk."""
    return sorted({Shape(width, 4), Shape(chunk, chunk // width), Shape(chunk, chunk // 16)})


def parts_of(row: int, start: int, tokens: list[int], width: int, group: int) -> Iterator[Part]:
    """A chunk in rows of `width` tokens at most, each within one group of slots where the format has those (not 0)."""
    most = min(width, group) if group else width
    end = most - (start % most if group else 0)
    while tokens:
        yield row, start, tokens[:end]
        start, tokens, end = start + end, tokens[end:], most


def packed(parts: list[Part], shapes: list[Shape]) -> Iterator[Call]:
    """The calls that hold the parts in order: the smallest that takes all that is left, else the largest."""
    while parts:
        shape = next((shape for shape in shapes if shape.takes(parts)), shapes[-1])
        now = parts if shape.takes(parts) else parts[: shape.rows]
        parts = parts[len(now) :]
        table, tokens = np.zeros((3, shape.rows), np.int32), np.zeros(shape.tokens, np.int32)
        table[:, : len(now)] = np.array([(row, start, len(ids)) for row, start, ids in now]).T
        flat = np.concatenate([ids for _, _, ids in now])
        tokens[: len(flat)] = flat
        yield Call(table, tokens)
