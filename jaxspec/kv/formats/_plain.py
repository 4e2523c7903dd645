"""Keys and values stored as they are, in one array `[pages, heads, 2, page, dim]`: a page is one contiguous block."""

import jax
import jax.numpy as jnp

from jaxspec.kv.format import Format


def plain(dtype: jnp.dtype) -> Format:
    """A format that stores every number in `dtype`."""
    return Format(
        arrays=lambda pages, page, heads, dim: {"kv": jax.ShapeDtypeStruct((pages, heads, 2, page, dim), dtype)},
        write=_write,
        read=_read,
        move=_move,
    )


def _write(arrays, pages, offsets, k, v):
    pool = arrays["kv"]
    return {"kv": pool.at[pages, :, :, offsets].set(jnp.stack([k, v], axis=-2).astype(pool.dtype), mode="drop")}


def _read(arrays, pages, which):
    # One gather: indexing pages first and the half second would copy keys and values both times.
    return arrays["kv"][pages, :, which]


def _move(arrays, source, target):
    pool = arrays["kv"]
    taken = pool.at[source[0], :, :, source[1]].get(mode="clip")
    return {"kv": pool.at[target[0], :, :, target[1]].set(taken, mode="drop")}
