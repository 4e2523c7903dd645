"""Paged attention as a loop over pages with an online softmax.

Cost follows the longest sequence in the call, not the width of the page table. A page that a row does not need is
masked whole, which leaves that row's running maximum, sum and result unchanged to the bit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Rows, Tail, visible_slots

# Finite, so that a page masked whole gives exp(0) and not NaN; the first visible slot then wipes it out.
MASKED = -1e30


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
    table = page_table[rows.sequence]

    def attend_block(carry, keys, values, visible):
        peak, total, mixed = carry
        score = jnp.einsum("rkqd,rkcd->rkqc", queries, keys, preferred_element_type=jnp.float32)
        shape = score.shape
        score = score.reshape(num_rows, heads, width, group, shape[-1])
        score = jnp.where(visible[:, None, :, None, :], score, MASKED).reshape(shape)
        new_peak = jnp.maximum(peak, score.max(-1))
        weight = jnp.exp(score - new_peak[..., None])
        fade = jnp.exp(peak - new_peak)
        update = jnp.einsum("rkqc,rkcd->rkqd", weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return new_peak, total * fade + weight.sum(-1), mixed * fade[..., None] + update

    def attend_page(index, carry):
        pages, slots = table[:, index], index * page + jnp.arange(page)
        keys, values = read(arrays, pages, 0), read(arrays, pages, 1)
        visible = visible_slots(rows, slots, width, ancestors)
        if tail is not None:
            visible &= (slots < tail.start[:, None])[:, None, :]
        return attend_block(carry, keys, values, visible)

    empty = jnp.zeros((num_rows, heads, width * group), jnp.float32)
    carry = (empty + MASKED, empty, jnp.zeros((*empty.shape, dim), jnp.float32))
    end = rows.start + rows.count if tail is None else tail.start
    used = jnp.max(jnp.where(rows.count > 0, (end + page - 1) // page, 0))
    carry = jax.lax.fori_loop(0, used, attend_page, carry)
    if tail is not None:
        slots = tail.start[:, None] + jnp.arange(tail.keys.shape[2])
        carry = attend_block(carry, tail.keys, tail.values, visible_slots(rows, slots, width, ancestors))
    _, total, mixed = carry
    out = mixed / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(num_rows, heads, width, group, dim).transpose(0, 2, 1, 3, 4).astype(q.dtype)
