"""The page pool: all layers in one array per stored kind, carried through the rounds and donated."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.kv import scores, tail
from jaxspec.kv.bits import as_bits
from jaxspec.kv.format import Format
from jaxspec.kv.policy import FIRST, FULL, Policy
from jaxspec.parallel import MODEL
from jaxspec.target import platform
from jaxspec.types import Sequences
from pallas_kernels import (
    XLA,
    Kernels,
    Rows,
    Tail,
    append_pages,
    commit_pages,
    page_slots,
    paged_attention,
    writes_pages,
)

Pool = dict[str, Array]
OF_SEQUENCES = (tail.TAIL, scores.SCORES)
"""Arrays of a pool that have the batch first, and not pages."""
TOGETHER = 64
"""Slots that are moved as one row."""
SHARED = PartitionSpec(None, MODEL)
"""Several devices share a pool by key/value heads: pages have them second."""


@dataclass(frozen=True)
class PoolSpec:
    """The static shape of what a device has of a pool. Page p of layer l is physical page `l * num_pages + p`."""

    format: Format
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    look_ahead: int = 0
    """Draft nodes of a round, for which tails have room."""
    kernels: Kernels = XLA
    """What reads and writes the pages."""
    policy: Policy = FULL
    """What tokens see of what is stored."""
    slots: int = 0
    """Of a sequence at most, where the policy scores them."""

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The stored arrays."""
        pages = self.num_layers * self.num_pages
        return self._kept(self.format.arrays(pages, self.page_size, self.num_kv_heads, self.head_dim))

    def tails(self, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What `batch` sequences have apart from their pages: see `jaxspec.kv.tail` and `jaxspec.kv.scores`."""
        arrays, each = {}, (batch, self.num_layers, self.num_kv_heads)
        if self.format.group:
            shape = (*each, 2, self.format.group + self.look_ahead, self.head_dim)
            arrays[tail.TAIL] = jax.ShapeDtypeStruct(shape, tail.DTYPE)
        if self.policy.variant.mass:
            arrays[scores.SCORES] = jax.ShapeDtypeStruct((*each, self.slots), scores.DTYPE)
        return self._kept(arrays)

    def allocate(self, batch: int) -> Pool:
        """An empty pool for so many sequences: zeros, so that a masked value is never NaN."""
        return {
            name: jnp.zeros(array.shape, array.dtype) for name, array in (self.shapes() | self.tails(batch)).items()
        }

    def of_draft(self, num_layers: int, num_kv_heads: int, head_dim: int) -> "PoolSpec":
        """The pool of a draft model: as many pages, of as many slots."""
        form = self.format.draft or self.format
        return replace(self.silent, format=form, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)

    @property
    def silent(self) -> "PoolSpec":
        """The same pool for tokens that score nothing."""
        return replace(self, policy=self.policy.silent)

    @property
    def limit(self) -> int | None:
        """Committed slots from which on a sequence waits until it is condensed; None where that never happens."""
        return None if self.policy.budget is None else self.policy.budget + self.page_size

    @property
    def round_pages(self) -> int | None:
        """Pages of a sequence that rounds look at or write to; None where that may be any."""
        return None if self.limit is None else -(-(self.limit + self.look_ahead) // self.page_size)

    def _kept(self, arrays: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        bits = self.kernels == XLA and platform() == "cpu"
        return {name: as_bits(array) for name, array in arrays.items()} if bits else arrays

    @property
    def has_kernels(self) -> bool:
        """Whether Pallas kernels write the pages, and not the format."""
        return self.kernels != XLA and writes_pages(self.shapes(), self.kernels)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, everything the format stores included."""
        return _bytes(self.shapes()) // self.num_pages

    @property
    def tail_bytes(self) -> int:
        """Bytes that a sequence takes apart from its pages."""
        return _bytes(self.tails(1))

    @property
    def token_bytes(self) -> float:
        """Bytes of one token over all layers, in a page that is full."""
        return self.page_bytes / self.page_size


def partition(spec: PoolSpec, shared: bool = True) -> dict[str, Any]:
    """How the devices of a mesh share the arrays of a pool, or that each has all of them."""
    arrays = dict.fromkeys(spec.shapes(), SHARED) | dict.fromkeys(spec.tails(1), PartitionSpec(None, *SHARED))
    return arrays if shared else dict.fromkeys(arrays, PartitionSpec())


def write_and_attend(
    spec: PoolSpec,
    pool: Pool,
    layer,
    rows: Rows,
    table: Int[Array, "B P"],
    ancestors,
    q: Float[Array, "R T K G D"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K D"],
    distinct: bool = False,
    sink_queries: Float[Array, "R T K G D"] | None = None,
) -> tuple[Float[Array, "R T K G D"], Pool]:
    """Store the rows' keys and values in one layer; then the attention of their queries over what is stored.

    `distinct` promises that no two rows are of one sequence; `sink_queries` as in `paged_attention`.
    """
    group = spec.format.group
    if not group:
        pool = append(spec, pool, layer, rows, table, k, v, distinct)
        return attend(spec, pool, layer, rows, table, ancestors, q, None, sink_queries)
    block = tail.own_group(pool, group, layer, rows, k, v)
    pool = tail.extend(pool, group, layer, rows, k, v)
    if ancestors is None:
        end = tail.place(rows.start, group) + rows.count
        pages, offsets = _begin_of_group(spec, rows.sequence, rows.start, table)
        pool = tail.store(spec.format, pool, end >= group, _physical(spec, layer, pages), offsets, block)
    last = tail.visible(block, group, rows)
    return attend(spec, pool, layer, rows, table, ancestors, q, last, sink_queries)


def append(
    spec: PoolSpec,
    pool: Pool,
    layer,
    rows: Rows,
    table: Int[Array, "B P"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K D"],
    distinct: bool = False,
) -> Pool:
    """Write the rows' keys and values into their slots of one layer; padding tokens are dropped."""
    pages, stored = table + layer * spec.num_pages, _stored(spec, pool)
    if spec.has_kernels:
        return pool | append_pages(stored, rows, pages, k, v, distinct=distinct, kernels=spec.kernels)
    pages, offsets = page_slots(rows, table, spec.page_size, k.shape[1])
    return pool | spec.format.write(stored, _physical(spec, layer, pages), offsets, k, v)


def attend(
    spec: PoolSpec,
    pool: Pool,
    layer,
    rows: Rows,
    table: Int[Array, "B P"],
    ancestors,
    q: Float[Array, "R T K G D"],
    last: Tail | None = None,
    sink_queries: Float[Array, "R T K G D"] | None = None,
) -> tuple[Float[Array, "R T K G D"], Pool]:
    """Attention of one layer's queries over what is stored, the rows' own tokens included; and the pool with the scores
    that come of it, where the policy wants them."""
    found = paged_attention(
        q,
        _stored(spec, pool),
        spec.format.read,
        rows,
        table + layer * spec.num_pages,
        ancestors,
        last,
        sink_queries,
        page=spec.page_size,
        scale=spec.head_dim**-0.5,
        variant=spec.policy.variant,
        kernels=spec.kernels,
    )
    if isinstance(found, tuple):
        mixed, mass = found
        return mixed, scores.vote(pool, layer, rows, mass)
    return found, pool


def compact(spec: PoolSpec, pool: Pool, sequences: Sequences, path: Int[Array, "B D"], count: Int[Array, "B"]) -> Pool:
    """Move an accepted tree path together: row index `path[b, i]` goes to index i, for i below `count[b]`."""
    depth = path.shape[1]
    batch = jnp.arange(path.shape[0])
    table, length = sequences.page_table[0], sequences.length[0]
    if spec.format.move is None:
        return _compact_tails(spec, pool, table, length, path, count)
    if spec.has_kernels:
        size = {"num_layers": spec.num_layers, "num_pages": spec.num_pages}
        moved = commit_pages(_stored(spec, pool), table, length, path, count, **size, kernels=spec.kernels)
        return pool | moved
    target = page_slots(Rows(batch, length, count), table, spec.page_size, depth)
    slot = length[:, None] + path
    source = table[batch[:, None], jnp.minimum(slot // spec.page_size, table.shape[1] - 1)], slot % spec.page_size
    layers = jnp.arange(spec.num_layers)[:, None, None]

    def every_layer(pages, offsets):
        return _physical(spec, layers, pages[None]), jnp.broadcast_to(offsets, (spec.num_layers, *offsets.shape))

    return pool | spec.format.move(_stored(spec, pool), every_layer(*source), every_layer(*target))


def _compact_tails(spec: PoolSpec, pool: Pool, table, length, path, count) -> Pool:
    group = spec.format.group
    pool = tail.move(pool, group, length, path, count)
    pages, offsets = _begin_of_group(spec, jnp.arange(path.shape[0]), length, table)
    pages = _physical(spec, jnp.arange(spec.num_layers), pages[:, None])
    whole = tail.place(length, group) + count >= group
    return tail.store(spec.format, pool, whole[:, None], pages, offsets[:, None], pool[tail.TAIL])


def condense(
    spec: PoolSpec,
    pool: Pool,
    row: Int[Array, ""],
    length: Int[Array, ""],
    source: Int[Array, "P"],
    target: Int[Array, "P"],
) -> Pool:
    """Leave of a sequence's `length` slots those that its policy lets stay, moved together: they are in the pages
    `source` and go to `target`, which may have pages in common. A pool without scores keeps the first and the last.

    In each layer every slot is read before any is written; what else is in the target's pages means nothing afterwards.
    What was read is written as any other row is, in pages where they lie, and is stored as it was before.
    """
    policy, heads = spec.policy, jnp.arange(spec.num_kv_heads)[:, None]
    if scores.SCORES in pool:
        stay, left = scores.heaviest(pool[scores.SCORES][row], length, policy.heavy, policy.recent)
        pool = pool | {scores.SCORES: pool[scores.SCORES].at[row].set(left)}
    else:
        stay = scores.ends(length, FIRST, policy.heavy + policy.recent - FIRST)
    size = stay.shape[-1]
    stay = jnp.broadcast_to(stay, (spec.num_layers, spec.num_kv_heads, size))
    starts = jnp.arange(0, size, TOGETHER)
    rows = Rows(jnp.zeros_like(starts), starts, jnp.minimum(size - starts, TOGETHER))

    def of_layer(layer, pool: Pool) -> Pool:
        def found(which: int) -> Float[Array, "R T K D"]:
            stored = spec.format.read(pool, source + layer * spec.num_pages, which)  # [P, K, page, D]
            kept = stored[stay[layer] // spec.page_size, heads, stay[layer] % spec.page_size].swapaxes(0, 1)
            missing = len(starts) * TOGETHER - size
            return jnp.pad(kept, ((0, missing), (0, 0), (0, 0))).reshape(len(starts), TOGETHER, *kept.shape[1:])

        return append(spec, pool, layer, rows, target[None], found(0), found(1))

    return jax.lax.fori_loop(0, spec.num_layers, of_layer, pool)


def duplicate(spec: PoolSpec, pool: Pool, source: Int[Array, ""], target: Int[Array, ""]) -> Pool:
    """Copy one page of every layer to another."""
    layers = jnp.arange(spec.num_layers) * spec.num_pages
    return pool | {name: pool[name].at[layers + target].set(pool[name][layers + source]) for name in spec.shapes()}


def take_pages(spec: PoolSpec, pool: Pool, pages: Int[Array, "N"]) -> Pool:
    """Pages of every layer as they are stored, `[N, L, ..]`; tails are no part of them."""
    return {name: pool[name][_of_layers(spec, pages)] for name in spec.shapes()}


def put_pages(spec: PoolSpec, pool: Pool, pages: Int[Array, "N"], stored: Pool) -> Pool:
    """The pool with these pages of every layer as `take_pages` took them; pages out of range are dropped."""
    rows = _of_layers(spec, pages)
    return pool | {name: pool[name].at[rows].set(stored[name], mode="drop") for name in spec.shapes()}


def _of_layers(spec: PoolSpec, pages: Int[Array, "N"]) -> Int[Array, "N L"]:
    return _physical(spec, jnp.arange(spec.num_layers), pages[:, None])


def _stored(spec: PoolSpec, pool: Pool) -> Pool:
    """What is in pages, without what sequences have apart from them."""
    return {name: pool[name] for name in spec.shapes()}


def _begin_of_group(spec: PoolSpec, sequence, slot, table) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """Page and offset at which the groups of these slots begin."""
    begin = slot - tail.place(slot, spec.format.group)
    return table[sequence, jnp.minimum(begin // spec.page_size, table.shape[1] - 1)], begin % spec.page_size


def _bytes(arrays: dict[str, jax.ShapeDtypeStruct]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays.values())


def _physical(spec: PoolSpec, layer, pages):
    """Pages of one layer as physical pages; what was out of range stays out of range."""
    dropped = jnp.iinfo(jnp.int32).max
    return jnp.where(pages < spec.num_pages, pages + layer * spec.num_pages, dropped)
