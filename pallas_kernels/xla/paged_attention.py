"""Paged attention as a loop over pages with an online softmax.

Cost follows the lengths of the sequences, not the width of the page table: rows are taken in order of length, and when
the shorter half of them needs no more pages the loop goes on with the longer half. A page that a row does not need is
masked whole, which leaves that row's running maximum, sum and result unchanged to the bit. With a window every row
begins at the first page that it sees; the sinks' pages come before.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import PLAIN, Rows, Tail, Variant, visible_slots

# Finite, so that a page masked whole gives exp(0) and not NaN; the first visible slot then wipes it out.
MASKED = -1e30
FEW = 4
"""Rows that are not worth dividing."""


class _Asked(NamedTuple):
    """What rows ask for; the arrays have these first."""

    queries: Float[Array, "R K Q D"]
    sink_queries: Float[Array, "R K Q D"] | None
    rows: Rows
    table: Int[Array, "R P"]
    first: Int[Array, "R"]
    """The first page after the sinks' that the row looks at."""
    ancestors: Int[Array, "R T W"] | None
    tail: Tail | None


class _Sums(NamedTuple):
    """An online softmax as far as it has come."""

    peak: Float[Array, "R K Q"]
    total: Float[Array, "R K Q"]
    mixed: Float[Array, "R K Q D"]
    logits: Float[Array, "R P K G page"] | None
    """Of each row's first token, by page, where its mass is asked for: pages are not looked at a second time, as they
    may have been written to by then, which would have XLA copy them all."""


class _Task(NamedTuple):
    """What is the same for all rows."""

    arrays: dict[str, Array]
    read: Callable
    page: int
    width: int
    variant: Variant


def paged_attention(
    q: Float[Array, "R T K G D"],
    arrays: dict[str, Array],
    read,
    rows: Rows,
    page_table: Int[Array, "B P"],
    ancestors: Int[Array, "R T W"] | None,
    tail: Tail | None = None,
    sink_queries: Float[Array, "R T K G D"] | None = None,
    *,
    page: int,
    scale: float,
    variant: Variant = PLAIN,
) -> Float[Array, "R T K G D"] | tuple[Float[Array, "R T K G D"], Float[Array, "R K S"]]:
    """See `pallas_kernels.api.paged_attention`."""
    num_rows, width, heads, group, dim = q.shape
    task = _Task(arrays, read, page, width, variant)

    def by_head(x):
        return (x * scale).transpose(0, 2, 1, 3, 4).reshape(num_rows, heads, width * group, dim)

    end = rows.start + rows.count if tail is None else tail.start
    pages = jnp.where(rows.count > 0, (end + page - 1) // page, 0)
    first = jnp.zeros_like(pages)
    if variant.window is not None:
        first = jnp.maximum(rows.start - variant.window + 1, 0) // page
        first = jnp.minimum(jnp.maximum(first, _sink_pages(task)), pages)
    used = pages - first
    turned = None if sink_queries is None else by_head(sink_queries)
    asked = _Asked(by_head(q), turned, rows, page_table[rows.sequence], first, ancestors, tail)
    order = None
    if num_rows > FEW:
        order = jnp.argsort(-used)
        asked, used = jax.tree.map(lambda a: a[order], (asked, used))
    beyond = asked if variant.window is None else asked._replace(sink_queries=None)
    sums = _over_pages(task, beyond, _over_sinks(task, asked), used)
    if asked.tail is not None:
        sums = _add(sums, *_of_tail(task, asked, asked.tail))
    out = sums.mixed / jnp.maximum(sums.total, 1e-30)[..., None]
    mass = None if sums.logits is None else _mass(task, asked, sums, sums.logits)
    if order is not None:
        out, mass = jax.tree.map(lambda a: a[jnp.argsort(order)], (out, mass))
    out = out.reshape(num_rows, heads, width, group, dim).transpose(0, 2, 1, 3, 4).astype(q.dtype)
    return out if mass is None else (out, mass)


def _sink_pages(task: _Task) -> int:
    """Pages that are read for their sinks whatever the window."""
    return 0 if task.variant.window is None else -(-task.variant.sinks // task.page)


def _over_sinks(task: _Task, asked: _Asked) -> _Sums:
    """The sums over the sinks' pages, where a window would leave them out; else empty ones."""
    empty = jnp.zeros(asked.queries.shape[:-1], jnp.float32)
    logits, (num_rows, heads, queries) = None, empty.shape
    if task.variant.mass:
        shape = num_rows, asked.table.shape[1], heads, queries // task.width, task.page
        logits = jnp.full(shape, MASKED, jnp.float32)
    sums = _Sums(empty + MASKED, empty, jnp.zeros(asked.queries.shape, jnp.float32), logits)
    for index in range(_sink_pages(task)):
        sums = _add_page(task, asked, sums, jnp.full_like(asked.first, index))
    return sums


def _over_pages(task: _Task, asked: _Asked, sums: _Sums, used: Int[Array, "R"]) -> _Sums:
    """Add the pages that rows use: fewer from row to row where there are many; the half that is done drops out."""
    size, begin = len(used), jnp.int32(0)
    while True:
        half = (size + 1) // 2 if size > FEW else 0
        part = jax.tree.map(lambda a, size=size: a[:size], asked)

        def add_page(index, sums: _Sums, part: _Asked = part) -> _Sums:
            return _add_page(task, part, sums, part.first + index)

        end = jnp.maximum(begin, used[half] if half else jnp.max(used))
        done = jax.lax.fori_loop(begin, end, add_page, jax.tree.map(lambda a, size=size: a[:size], sums))
        sums = jax.tree.map(lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, 0, 0), sums, done)
        if not half:
            return sums
        size, begin = half, end


def _add_page(task: _Task, asked: _Asked, sums: _Sums, index: Int[Array, "R"]) -> _Sums:
    """The softmax with one page of each row in it."""
    score, values = _of_page(task, asked, index)
    sums = _add(sums, score, values)
    if sums.logits is None:
        return sums
    first = score[:, :, : sums.logits.shape[3]]
    return sums._replace(logits=sums.logits.at[jnp.arange(len(index)), index].set(first, mode="drop"))


def _of_page(task: _Task, asked: _Asked, index: Int[Array, "R"]):
    """Scores of one page of each row, masked, and its values."""
    at = jnp.minimum(index, asked.table.shape[1] - 1)
    pages = jnp.take_along_axis(asked.table, at[:, None], axis=1)[:, 0]
    slots = index[:, None] * task.page + jnp.arange(task.page)
    keys, values = (task.read(task.arrays, pages, which) for which in (0, 1))
    return _scores(task, asked, slots, keys, None if asked.tail is None else asked.tail.start), values


def _of_tail(task: _Task, asked: _Asked, tail: Tail):
    """Scores of the tails, masked, and their values."""
    return _scores(task, asked, _slots_of(tail), tail.keys), tail.values


def _slots_of(tail: Tail) -> Int[Array, "R S"]:
    return tail.start[:, None] + jnp.arange(tail.keys.shape[2])


def _scores(
    task: _Task,
    asked: _Asked,
    slots: Int[Array, "R S"],
    keys: Float[Array, "R K S D"],
    end: Int[Array, "R"] | None = None,
) -> Float[Array, "R K Q S"]:
    """Logits of all queries; what they do not see, or lies from `end` on, is masked."""

    def product(queries):
        return jnp.einsum("rkqd,rkcd->rkqc", queries, keys, preferred_element_type=jnp.float32)

    score, cap = product(asked.queries), task.variant.soft_cap
    if asked.sink_queries is not None:
        score = jnp.where((slots < task.variant.sinks)[:, None, None], product(asked.sink_queries), score)
    if cap is not None:
        score = cap * jnp.tanh(score / cap)
    visible = visible_slots(asked.rows, slots, task.width, asked.ancestors, task.variant)
    if end is not None:
        visible &= (slots < end[:, None])[:, None, :]
    shape = score.shape
    score = score.reshape(*shape[:2], task.width, -1, shape[-1])
    return jnp.where(visible[:, None, :, None, :], score, MASKED).reshape(shape)


def _add(sums: _Sums, score: Float[Array, "R K Q S"], values: Float[Array, "R K S D"]) -> _Sums:
    """The softmax with some more slots in it."""
    peak = jnp.maximum(sums.peak, score.max(-1))
    weight = jnp.exp(score - peak[..., None])
    fade = jnp.exp(sums.peak - peak)
    update = jnp.einsum("rkqc,rkcd->rkqd", weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
    total = sums.total * fade + weight.sum(-1)
    return sums._replace(peak=peak, total=total, mixed=sums.mixed * fade[..., None] + update)


def _mass(task: _Task, asked: _Asked, sums: _Sums, logits: Float[Array, "R P K G page"]) -> Float[Array, "R K S"]:
    """The softmax weights of each row's first token at all slots of the page table, a mean over its queries."""
    num_rows, pages, heads, group, page = logits.shape
    peak, total = sums.peak[:, :, :group, None], jnp.maximum(sums.total, 1e-30)[:, :, :group, None]

    def weights(score):
        return jnp.where(score > MASKED / 2, jnp.exp(score - peak) / total, 0).mean(2)

    mass = weights(jnp.moveaxis(logits, 1, 3).reshape(num_rows, heads, group, pages * page))
    if asked.tail is None:
        return mass
    found = weights(_of_tail(task, asked, asked.tail)[0][:, :, :group])
    rows = jnp.arange(found.shape[0])[:, None]
    return mass.at[rows, :, _slots_of(asked.tail)].add(jnp.moveaxis(found, 1, 2), mode="drop")
