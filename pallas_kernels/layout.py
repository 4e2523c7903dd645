"""Where a row's tokens live in the pages, and which slots they may see.

A *row* is T consecutive query tokens of one sequence: a decode token, a draft tree or a prompt chunk. A *slot* is a
place in a sequence's cache; slot s lies in page `page_table[sequence, s // page]` at offset `s % page`. Slots are not
positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WORD = 32
"""Draft nodes an ancestor word holds."""


class Rows(NamedTuple):
    """R rows of query tokens. Tokens from `count` on are padding: never written, their results mean nothing."""

    sequence: Int[Array, "R"]
    """Which line of the page table each row belongs to."""
    start: Int[Array, "R"]
    """Slot of each row's first token; every earlier slot of the sequence is visible to the whole row."""
    count: Int[Array, "R"]
    """Tokens of each row, 0 to T."""


class Packing(NamedTuple):
    """How N packed tokens lie in the R rows of T that they attend in."""

    token: Int[Array, "R T"]
    """Packed index of every place of a row; any for padding."""
    row: Int[Array, "N"]
    column: Int[Array, "N"]


class Tail(NamedTuple):
    """The last slots of each row's sequence, where they are kept apart from its pages."""

    keys: Float[Array, "R K S D"]
    values: Float[Array, "R K S D"]
    start: Int[Array, "R"]
    """The slot that lies first in them; what pages hold from there on is not looked at."""


@dataclass(frozen=True)
class Variant:
    """What attention looks at and how it weighs."""

    window: int | None = None
    """The query at position p sees slots after p - window only, p being its row's start and its depth in the row. A
    draft tree's own tokens always see their ancestors: the window is no shorter than the row."""
    sinks: int = 0
    """First slots that stay visible whatever the window (StreamingLLM, Xiao et al., 2024)."""
    soft_cap: float | None = None
    """Logits x become cap * tanh(x / cap), after scaling (Gemma 2, 2024)."""
    mass: bool = False
    """Also tell the softmax weights of each row's first token, a mean over the queries of a head (H2O, Zhang et al.,
    2023)."""


PLAIN = Variant()
"""Causal attention over all slots."""


def pack(rows: Rows, size: int, width: int) -> Packing:
    """For `size` tokens that hold the rows' tokens one row after the other, and padding at the end."""
    ends = jnp.cumsum(rows.count)
    index = jnp.arange(size)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), rows.count.shape[0] - 1)
    begins = ends - rows.count
    column = jnp.minimum(index - begins[row], width - 1)
    return Packing(jnp.minimum(begins[:, None] + jnp.arange(width), size - 1), row, column)


def page_slots(
    rows: Rows, page_table: Int[Array, "B P"], page: int, width: int
) -> tuple[Int[Array, "R T"], Int[Array, "R T"]]:
    """Physical page and offset of every token of every row; padding gets a page far out of range, so writes drop it."""
    step = jnp.arange(width)
    slot = rows.start[:, None] + step
    logical = jnp.minimum(slot // page, page_table.shape[1] - 1)
    pages = page_table[rows.sequence[:, None], logical]
    real = (step < rows.count[:, None]) & (slot < page_table.shape[1] * page)
    return jnp.where(real, pages, jnp.iinfo(jnp.int32).max), slot % page


def visible_slots(
    rows: Rows,
    slots: Int[Array, "S"] | Int[Array, "R S"],
    width: int,
    ancestors: Int[Array, "R T W"] | None,
    variant: Variant = PLAIN,
) -> Bool[Array, "R T S"]:
    """Which of `slots` (the same for all rows, or each row's own) each query sees: all before its row, and within the
    row its ancestors and itself; of these the last `variant.window` and the sinks.

    `ancestors[r, t]` has bit j set where token j of the row is token t's ancestor or t itself, 32 bits a word, least
    significant first; None means a chain: token t sees tokens 0 to t.
    """
    relative = (slots - rows.start[:, None])[:, None, :]
    if ancestors is None:
        depth = jnp.arange(width)[None, :, None]
        seen, own = relative <= depth, False
    else:
        depth = jax.lax.population_count(ancestors).sum(-1)[..., None] - 1
        own = (relative >= 0) & (relative < width)
        bit = jnp.where(own, relative, 0)
        words = jnp.take_along_axis(
            ancestors, jnp.broadcast_to(bit // WORD, (*ancestors.shape[:2], slots.shape[-1])), axis=2
        )
        seen = (relative < 0) | (own & (((words >> (bit % WORD)) & 1) == 1))
    if variant.window is None:
        return seen
    sink = jnp.broadcast_to(slots, (rows.start.shape[0], slots.shape[-1]))[:, None, :] < variant.sinks
    return seen & (own | sink | (relative > depth - variant.window))
