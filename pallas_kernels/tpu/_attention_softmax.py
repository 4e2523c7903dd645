"""The arithmetic of the attention kernel: an online softmax (Milakov & Gimelshein, 2018; FlashAttention, Dao et al.,
2022) over the slots of a buffered block.

Queries of a head lie in Q rows, token by token with the token's group together. A running number per query is kept in
all 128 lanes of `[Q, 128]`, except the total, whose lanes are summed at the end.
"""

from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layout import WORD
from pallas_kernels.tpu._attention_work import Item, Plan, Scalar, for_each, needed
from pallas_kernels.tpu.blocks import LANES, SUBLANES, tile_of

MASKED = -1e30
NOTHING = MASKED / 2
"""The peak before any slot was seen: above what is masked, so that the weight of that is 0 from the start."""
LOW_PART = 256
"""A query's high part counts as many of its low part (see `paged_attention.split`)."""


class _Part(NamedTuple):
    """Some pages of a buffer that are added in one step."""

    item: Item
    slot: Scalar
    """Which buffer."""
    pages: list
    """Which of its pages."""
    begin: Scalar
    """The item's slot that is the first in them."""
    masked: bool
    """Whether a query may not see all of it."""


def reset(plan: Plan, refs: SimpleNamespace) -> None:
    """Begin an item: nothing seen yet."""
    refs.peak[...] = jnp.full(refs.peak.shape, NOTHING, jnp.float32)
    refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    refs.mixed[...] = jnp.zeros(refs.mixed.shape, jnp.float32)
    if plan.variant.mass:
        refs.logits[...] = jnp.full(refs.logits.shape, MASKED, jnp.float32)


def add_visible_block(plan: Plan, refs: SimpleNamespace, item: Item, block, slot) -> None:
    """Add what buffer `slot` holds, the item's logical block `block`, all of which every query sees."""
    size = plan.blocks.compute_tokens
    parts = plan.block // size

    def add_parts(head, rows) -> None:
        # Side by side they fill each other's gaps.
        for i in range(parts):
            _add(plan, refs, head, rows, _part(plan, item, block, slot, i, size, masked=False))

    _for_queries(refs, add_parts)


def add_block(plan: Plan, refs: SimpleNamespace, item: Item, block, slot) -> None:
    """Add what buffer `slot` holds, with a mask; in smaller parts, for masks want registers too, and without those that
    no query sees."""
    size = plan.masked_tokens

    def add_part(i) -> None:
        part = _part(plan, item, block, slot, i, size, masked=True)

        @pl.when(needed(plan, item, part.begin, size))
        def _() -> None:
            _for_queries(refs, lambda head, rows: _add(plan, refs, head, rows, part))

    for_each(0, plan.block // size, add_part)


def finish(plan: Plan, refs: SimpleNamespace, item: Item) -> None:
    """Write the item's result, and the mass of its row's first token if that is asked for."""

    def write(head) -> None:
        refs.out[0, head] = (refs.mixed[head] / _total(refs, head)).astype(refs.out.dtype)

    def write_mass(head) -> None:
        rows = refs.logits.shape[1]
        weight = jnp.exp(refs.logits[head] - refs.peak[head, :rows, :1]) / _total(refs, head)[:rows]
        weight = jnp.where(jax.lax.broadcasted_iota(jnp.int32, weight.shape, 0) < plan.group, weight, 0)
        refs.mass[0, pl.ds(head, 1)] = jnp.sum(weight, axis=0, keepdims=True) * (1 / plan.group)

    for_each(0, refs.peak.shape[0], write)
    if plan.variant.mass:
        pl.when(item.tile == 0)(lambda: for_each(0, refs.peak.shape[0], write_mass))


def _part(plan: Plan, item: Item, block, slot, index, size: int, *, masked: bool) -> _Part:
    """The `index`-th `size` slots of a block."""
    count = size // plan.page
    begin = pl.multiple_of(block * plan.block + index * size, LANES)
    return _Part(item, slot, [index * count + j for j in range(count)], begin, masked)


def _for_queries(refs: SimpleNamespace, call: Callable) -> None:
    """`call(head, rows)` for every head and every tile of its queries."""
    heads, queries, _ = refs.peak.shape
    size = tile_of(queries)

    def visit(head) -> None:
        for_each(0, queries // size, lambda i: call(head, pl.ds(pl.multiple_of(i * size, SUBLANES), size)))

    for_each(0, heads, visit)


def _total(refs: SimpleNamespace, head):
    return jnp.maximum(jnp.sum(refs.total[head], axis=1, keepdims=True), 1e-30)


def _add(plan: Plan, refs: SimpleNamespace, head, rows, part: _Part) -> None:
    """Add a part to the sums of some rows of one head's queries."""
    logits = _logits(plan, refs, head, rows, part)
    if plan.variant.mass:
        _keep_logits(refs, head, rows, part, logits)
    columns = [logits[:, at : at + LANES] for at in range(0, logits.shape[1], LANES)]
    peak = refs.peak[head, rows]
    higher = jnp.maximum(peak, jnp.max(reduce(jnp.maximum, columns), axis=1, keepdims=True))
    weights = [jnp.exp(column - higher) for column in columns]
    fade = jnp.exp(peak - higher)
    refs.peak[head, rows] = higher
    refs.total[head, rows] = refs.total[head, rows] * fade + reduce(jnp.add, weights)
    mixed = _mixed(plan, refs, head, part, jnp.concatenate(weights, axis=1))
    refs.mixed[head, rows] = refs.mixed[head, rows] * _wide(fade, mixed.shape[1]) + mixed


def _logits(plan: Plan, refs: SimpleNamespace, head, rows, part: _Part):
    """Logits [Q, S] of some rows of a head's queries over a part."""
    keys = _stored(plan, refs, head, part, 0)
    logits = _product(plan, refs, "q", head, rows, keys)
    slots = part.begin + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if part.masked and plan.sink_queries:
        logits = jnp.where(slots < plan.variant.sinks, _product(plan, refs, "sink_q", head, rows, keys), logits)
    if hasattr(refs, "scale"):
        logits *= _scales(refs, head, part, 0)
    cap = plan.variant.soft_cap
    if cap is not None:
        logits = cap * jnp.tanh(logits * (1 / cap))
    return jnp.where(_visible(plan, refs, part.item, rows, slots), logits, MASKED) if part.masked else logits


def _product(plan: Plan, refs: SimpleNamespace, name: str, head, rows, keys):
    """Queries times keys, [Q, S] in float32. Queries in two parts of 8 bits, one under the other, are multiplied as
    integers, without loss; they are few, and all taken."""
    queries = getattr(refs, name)
    dims = (((1,), (0 if plan.turned else 1,)), ((), ()))
    if not plan.blocks.int8_keys:
        return _dot(queries[0, head, rows], keys, dims)
    parts = jax.lax.dot_general(queries[0, head], keys, dims, preferred_element_type=jnp.int32)
    half = parts.shape[0] // 2
    unit = _wide(getattr(refs, f"{name}_unit")[0, head], parts.shape[1])
    return (parts[:half] * LOW_PART + parts[half:]).astype(jnp.float32) * unit


def _mixed(plan: Plan, refs: SimpleNamespace, head, part: _Part, weights):
    """Weights [Q, S] times values, [Q, D]."""
    if hasattr(refs, "scale"):
        weights *= _scales(refs, head, part, 1)
    values = _stored(plan, refs, head, part, 1)
    return _dot(weights.astype(plan.dtype), values, (((1,), (1 if plan.turned else 0,)), ((), ())))


def _dot(left, right, dims):
    """Their product in the left one's type, summed in float32; float32 ones are multiplied as such."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left, right.astype(left.dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )


def _visible(plan: Plan, refs: SimpleNamespace, item: Item, rows, slots):
    """Which slots [Q, S] each query sees: `visible_slots` for an item, and none that its tile does not need."""
    relative = slots - item.start
    marks = refs.marks[0, rows] if plan.width > 1 else jnp.zeros((slots.shape[0], 1), jnp.int32)
    depth = marks[:, :1]
    own = (relative >= 0) & (relative < plan.width)
    if plan.tree:
        word = marks[:, 1:2]
        for i in range(1, marks.shape[1] - 1):
            word = jnp.where(relative >= i * WORD, marks[:, i + 1 : i + 2], word)
        seen = (relative < 0) | (own & ((jnp.right_shift(word, relative & (WORD - 1)) & 1) == 1))
    else:
        seen = relative <= depth
    if plan.variant.window is not None:
        near = relative > depth - plan.variant.window
        near = near | own if plan.tree else near
        seen &= near | (slots < plan.variant.sinks) if plan.variant.sinks else near
    return seen & (slots < item.end)


def _stored(plan: Plan, refs: SimpleNamespace, head, part: _Part, which: int):
    """A head's keys (0) or values (1) in a part, [S, D]; turned, [D, S]."""
    pages = [refs.kv_buffer[part.slot, page, head, which] for page in part.pages]
    return jnp.concatenate(pages, axis=int(plan.turned))


def _scales(refs: SimpleNamespace, head, part: _Part, which: int):
    """Scales of the same, [1, S]."""
    pairs = [refs.scale_buffer[part.slot, page, head].astype(jnp.float32) for page in part.pages]
    return jnp.concatenate([pair[which : which + 1] for pair in pairs], axis=1)


def _keep_logits(refs: SimpleNamespace, head, rows, part: _Part, logits) -> None:
    """Remember the logits of the row's first token until its peak is known."""

    @pl.when((part.item.tile == 0) & (rows.start == 0))
    def _() -> None:
        refs.logits[head, :, pl.ds(part.begin, logits.shape[1])] = logits[: refs.logits.shape[1]]


def _wide(x, size: int):
    """`[Q, 128]` with all lanes alike, in `size` lanes."""
    return jnp.concatenate([x] * pl.cdiv(size, LANES), axis=1)[:, :size]
