"""Paged attention as a loop over pages with an online softmax.

Cost follows the lengths of the sequences, not the width of the page table: rows are taken in order of length, and when
the shorter half of them needs no more pages the loop goes on with the longer half. A page that a row does not need is
masked whole, which leaves that row's running maximum, sum and result unchanged to the bit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layout import Rows, Tail, visible_slots

# Finite, so that a page masked whole gives exp(0) and not NaN; the first visible slot then wipes it out.
MASKED = -1e30
FEW = 4
"""Rows that are not worth dividing."""


class _Asked(NamedTuple):
    """What rows ask for; the arrays have these first."""

    queries: Float[Array, "R K Q D"]
    rows: Rows
    table: Int[Array, "R P"]
    ancestors: Int[Array, "R T W"] | None
    tail: Tail | None


class _Sums(NamedTuple):
    """An online softmax as far as it has come."""

    peak: Float[Array, "R K Q"]
    total: Float[Array, "R K Q"]
    mixed: Float[Array, "R K Q D"]


def paged_attention(
    q: Float[Array, "R T K G D"],
    arrays: dict[str, Array],
    read,
    rows: Rows,
    page_table: Int[Array, "B P"],
    ancestors: Int[Array, "R T W"] | None,
    tail: Tail | None = None,
    *,
    page: int,
    scale: float,
) -> Float[Array, "R T K G D"]:
    """See `pallas_kernels.api.paged_attention`."""
    num_rows, width, heads, group, dim = q.shape
    queries = (q * scale).transpose(0, 2, 1, 3, 4).reshape(num_rows, heads, width * group, dim)
    end = rows.start + rows.count if tail is None else tail.start
    used = jnp.where(rows.count > 0, (end + page - 1) // page, 0)
    asked = _Asked(queries, rows, page_table[rows.sequence], ancestors, tail)
    order = None
    if num_rows > FEW:
        order = jnp.argsort(-used)
        asked, used = jax.tree.map(lambda a: a[order], (asked, used))
    empty = jnp.zeros(queries.shape[:-1], jnp.float32)
    sums = _Sums(empty + MASKED, empty, jnp.zeros(queries.shape, jnp.float32))
    sums = _over_pages(asked, sums, used, arrays, read, width, page)
    if tail is not None and asked.tail is not None:
        slots = asked.tail.start[:, None] + jnp.arange(tail.keys.shape[2])
        visible = visible_slots(asked.rows, slots, width, asked.ancestors)
        sums = _add(sums, asked.queries, asked.tail.keys, asked.tail.values, visible)
    out = sums.mixed / jnp.maximum(sums.total, 1e-30)[..., None]
    if order is not None:
        out = out[jnp.argsort(order)]
    return out.reshape(num_rows, heads, width, group, dim).transpose(0, 2, 1, 3, 4).astype(q.dtype)


def _over_pages(asked: _Asked, sums: _Sums, used: Int[Array, "R"], arrays, read, width: int, page: int) -> _Sums:
    """Add the pages that rows use: fewer from row to row where there are many; the half that is done drops out."""
    size, begin = len(used), jnp.int32(0)
    while True:
        half = (size + 1) // 2 if size > FEW else 0
        part = jax.tree.map(lambda a, size=size: a[:size], asked)

        def add_page(index, sums: _Sums, part: _Asked = part) -> _Sums:
            pages, slots = part.table[:, index], index * page + jnp.arange(page)
            visible = visible_slots(part.rows, slots, width, part.ancestors)
            if part.tail is not None:
                visible &= (slots < part.tail.start[:, None])[:, None, :]
            return _add(sums, part.queries, read(arrays, pages, 0), read(arrays, pages, 1), visible)

        end = jnp.maximum(begin, used[half] if half else jnp.max(used))
        done = jax.lax.fori_loop(begin, end, add_page, jax.tree.map(lambda a, size=size: a[:size], sums))
        sums = jax.tree.map(lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, 0, 0), sums, done)
        if not half:
            return sums
        size, begin = half, end


def _add(
    sums: _Sums,
    queries: Float[Array, "R K Q D"],
    keys: Float[Array, "R K S D"],
    values: Float[Array, "R K S D"],
    visible: Bool[Array, "R T S"],
) -> _Sums:
    """The softmax with some more slots in it."""
    score = jnp.einsum("rkqd,rkcd->rkqc", queries, keys, preferred_element_type=jnp.float32)
    shape = score.shape
    score = score.reshape(*shape[:2], visible.shape[1], -1, shape[-1])
    score = jnp.where(visible[:, None, :, None, :], score, MASKED).reshape(shape)
    peak = jnp.maximum(sums.peak, score.max(-1))
    weight = jnp.exp(score - peak[..., None])
    fade = jnp.exp(sums.peak - peak)
    update = jnp.einsum("rkqc,rkcd->rkqd", weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return _Sums(peak, sums.total * fade + weight.sum(-1), sums.mixed * fade[..., None] + update)
