"""The page pool: all layers in one array per stored kind, carried through the rounds and donated."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.kv.format import Format
from jaxspec.types import Sequences
from pallas_kernels import Rows, page_slots, paged_attention

Pool = dict[str, Array]


@dataclass(frozen=True)
class PoolSpec:
    """The static shape of a pool. Page p of layer l is physical page `l * num_pages + p`."""

    format: Format
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The stored arrays."""
        return self.format.arrays(self.num_layers * self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)

    def allocate(self) -> Pool:
        """An empty pool: zeros, so that a masked value is never NaN."""
        return {name: jnp.zeros(array.shape, array.dtype) for name, array in self.shapes().items()}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, everything the format stores included."""
        return sum(a.size * a.dtype.itemsize for a in self.shapes().values()) // self.num_pages


def append(
    spec: PoolSpec, pool: Pool, layer, rows: Rows, table: Int[Array, "B P"], k: Float[Array, "R T K D"], v
) -> Pool:
    """Write the rows' keys and values into their slots of one layer; padding tokens are dropped."""
    pages, offsets = page_slots(rows, table, spec.page_size, k.shape[1])
    return spec.format.write(pool, _physical(spec, layer, pages), offsets, k, v)


def attend(
    spec: PoolSpec, pool: Pool, layer, rows: Rows, table: Int[Array, "B P"], ancestors, q: Float[Array, "R T K G D"]
) -> Float[Array, "R T K G D"]:
    """Attention of one layer's queries over what is stored, the rows' own tokens included."""
    table, scale = table + layer * spec.num_pages, spec.head_dim**-0.5
    return paged_attention(q, pool, spec.format.read, rows, table, ancestors, page=spec.page_size, scale=scale)


def compact(spec: PoolSpec, pool: Pool, sequences: Sequences, path: Int[Array, "B D"], count: Int[Array, "B"]) -> Pool:
    """Move an accepted tree path together: row index `path[b, i]` goes to index i, for i below `count[b]`."""
    depth = path.shape[1]
    batch = jnp.arange(path.shape[0])
    table, length = sequences.page_table[0], sequences.length[0]
    target = page_slots(Rows(batch, length, count), table, spec.page_size, depth)
    slot = length[:, None] + path
    source = table[batch[:, None], jnp.minimum(slot // spec.page_size, table.shape[1] - 1)], slot % spec.page_size
    layers = jnp.arange(spec.num_layers)[:, None, None]

    def every_layer(pages, offsets):
        return _physical(spec, layers, pages[None]), jnp.broadcast_to(offsets, (spec.num_layers, *offsets.shape))

    return spec.format.move(pool, every_layer(*source), every_layer(*target))


def duplicate(spec: PoolSpec, pool: Pool, source: Int[Array, ""], target: Int[Array, ""]) -> Pool:
    """Copy one page of every layer to another."""
    layers = jnp.arange(spec.num_layers) * spec.num_pages
    return {name: array.at[layers + target].set(array[layers + source]) for name, array in pool.items()}


def _physical(spec: PoolSpec, layer, pages):
    """Pages of one layer as physical pages; what was out of range stays out of range."""
    dropped = jnp.iinfo(jnp.int32).max
    return jnp.where(pages < spec.num_pages, pages + layer * spec.num_pages, dropped)
