"""What one step of the attention kernel's grid has to do, as scalars: which pages to read, which slots to look at.

A *work item* is one tile of a row's query tokens against all the slots it sees; items lie row by row, tile by tile. An
item goes over *blocks*: groups of `fetch_pages` logical pages, fetched together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.layout import Variant
from pallas_kernels.tpu.blocks import LANES, Blocks

Scalar = Int[Array, ""]


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for."""

    variant: Variant
    blocks: Blocks
    dtype: jnp.dtype
    """What is multiplied, unless keys are in int8: queries and weights are in it, stored numbers are widened to it."""
    tree: bool
    sink_queries: bool
    width: int
    """Query tokens of a row."""
    tiles: int
    """Work items of a row."""
    group: int
    """Queries a token has for each head."""
    page: int
    turned: bool
    """Pages lie [dim, page], not [page, dim]."""
    table_width: int
    """Pages a sequence may have."""

    @property
    def block(self) -> int:
        """Slots of a block."""
        return self.blocks.fetch_pages * self.page

    @property
    def masked_tokens(self) -> int:
        """Slots of a step of the softmax with a mask."""
        half = self.blocks.compute_tokens // 2
        return half if self.width > 1 and half % self.page == 0 and half % LANES == 0 else self.blocks.compute_tokens

    @property
    def sink_pages(self) -> int:
        """First pages that are read whatever the window."""
        return 0 if self.variant.window is None else -(-self.variant.sinks // self.page)

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink_pages // self.blocks.fetch_pages)


class Item(NamedTuple):
    """A work item."""

    sequence: Scalar
    tile: Scalar
    start: Scalar
    """Slot of its row's first token."""
    end: Scalar
    """No query sees a slot from here on; 0 where the item has no real token."""
    low: Scalar
    """No query sees a slot before this one, but sinks."""
    full_from: Scalar
    full_to: Scalar
    """Every real query sees each slot from `full_from` up to `full_to`."""
    skipped: Scalar
    """Blocks between the sinks' and the window's that are left out."""
    blocks: Scalar
    """How many blocks it goes over: one, of nothing, where there are none."""


def item_at(plan: Plan, refs: SimpleNamespace, index) -> Item:
    """The work item of this index."""
    row, tile = (index, 0) if plan.tiles == 1 else (jax.lax.div(index, plan.tiles), jax.lax.rem(index, plan.tiles))
    start, count = refs.start[row], refs.count[row]
    first = tile * plan.blocks.query_tokens
    real = jnp.clip(count - first, 0, plan.blocks.query_tokens)
    window = plan.variant.window
    if plan.tree:
        # Nodes may lie anywhere between the root and a depth of width - 1.
        end, shallowest, deepest, full_to = start + count, 0, plan.width - 1, start
    else:
        end, shallowest, deepest = start + first + real, first, first + real - 1
        full_to = start + first + 1
    end = jnp.where(real > 0, end, 0)
    full_to = jnp.minimum(full_to, end)
    low = 0 if window is None else jnp.clip(start + shallowest + 1 - window, 0, end)
    full_from = 0 if window is None else start + deepest + 1 - window
    if plan.sink_queries:
        full_from = jnp.maximum(full_from, plan.variant.sinks)
    stop = jax.lax.div(end + (plan.block - 1), plan.block)
    lead = jnp.minimum(plan.sink_blocks, stop)
    skipped = 0 if window is None else jnp.maximum(jax.lax.div(low, plan.block) - lead, 0)
    blocks = jnp.maximum(stop - skipped, 1)
    return Item(*map(jnp.int32, (refs.sequence[row], tile, start, end, low, full_from, full_to, skipped, blocks)))


def block_at(plan: Plan, item: Item, index):
    """Logical block that an item's `index`-th is."""
    if plan.variant.window is None:
        return index
    return jnp.where(index < plan.sink_blocks, index, index + item.skipped)


def wanted_pages(plan: Plan, item: Item, block):
    """Three scalars: of a block's pages the item looks at those before the first and those from the second up to the
    third, in ascending order. Without a window the first two are a plain 0."""
    first = block * plan.blocks.fetch_pages
    pages = jax.lax.div(item.end + (plan.page - 1), plan.page)
    high = jnp.clip(pages - first, 0, plan.blocks.fetch_pages)
    if plan.variant.window is None:
        return 0, 0, high
    sinks = jnp.clip(plan.sink_pages - first, 0, high)
    return sinks, jnp.clip(jax.lax.div(item.low, plan.page) - first, sinks, high), high


def needed(plan: Plan, item: Item, begin, size: int):
    """Whether the item sees any of `size` slots from `begin` on."""
    seen = begin < item.end
    if plan.variant.window is None:
        return seen
    return seen & ((begin + size > item.low) | (begin < plan.variant.sinks))


def all_visible(plan: Plan, item: Item, block):
    """Whether every query of the item sees each slot of a block, and with its first queries."""
    begin = block * plan.block
    seen = begin + plan.block <= item.full_to
    return seen if plan.variant.window is None and not plan.sink_queries else seen & (begin >= item.full_from)


def for_each(begin, end, call: Callable) -> None:
    """`call(i)` for i from `begin` up to `end`; no loop around a single one, for the compiler to see the code beside
    it."""

    def step(i, carry):
        call(i)
        return carry

    if isinstance(begin, int) and isinstance(end, int) and end == begin + 1:
        call(begin)
    else:
        jax.lax.fori_loop(begin, end, step, 0)
