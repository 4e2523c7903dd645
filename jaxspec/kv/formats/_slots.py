"""Formats that store every slot by itself, in arrays `[pages, heads, 2, page, ..]`: a page is one contiguous block.

Pallas kernels read and write them, too, by their names: `kv`, and `scale` of 8-bit numbers.
"""

import jax
import jax.numpy as jnp

from jaxspec.kv.bits import keep, numbers
from jaxspec.kv.format import Format
from pallas_kernels.codes import SCALE, quantise


def plain(dtype: jnp.dtype) -> Format:
    """Every number as it is, in `dtype`."""

    def write(arrays, pages, offsets, k, v):
        return {"kv": _store(arrays["kv"], pages, offsets, jnp.stack([k, v], axis=-2), dtype)}

    def read(arrays, pages, which):
        # One gather: indexing pages first and the half second would copy keys and values both times.
        found = numbers(arrays["kv"][pages, :, which], dtype)
        # Bits are kept on the CPU, which multiplies in float32 whatever it is given; widening once is cheaper.
        return found if found.dtype == arrays["kv"].dtype else found.astype(jnp.float32)

    def arrays(pages, page, heads, dim):
        return {"kv": jax.ShapeDtypeStruct((pages, heads, 2, page, dim), dtype)}

    return Format(arrays, write, read, _move)


def scaled(dtype: jnp.dtype) -> Format:
    """8-bit numbers of `dtype`, and a bfloat16 scale for every key and value vector (`pallas_kernels.codes`)."""

    def write(arrays, pages, offsets, k, v):
        codes, scale = quantise(jnp.stack([k, v], axis=-2).astype(jnp.float32), dtype)
        return {
            "kv": _store(arrays["kv"], pages, offsets, codes, dtype),
            "scale": _store(arrays["scale"], pages, offsets, scale[..., 0], SCALE),
        }

    def read(arrays, pages, which):
        codes = numbers(arrays["kv"][pages, :, which], dtype)
        scale = numbers(arrays["scale"][pages, :, which], SCALE)
        return codes.astype(jnp.float32) * scale[..., None].astype(jnp.float32)

    def arrays(pages, page, heads, dim):
        return {
            "kv": jax.ShapeDtypeStruct((pages, heads, 2, page, dim), dtype),
            "scale": jax.ShapeDtypeStruct((pages, heads, 2, page), SCALE),
        }

    return Format(arrays, write, read, _move)


def _store(array, pages, offsets, values, dtype):
    return array.at[pages, :, :, offsets].set(keep(values, dtype, array.dtype), mode="drop")


def _move(arrays, source, target):
    def one(array):
        taken = array.at[source[0], :, :, source[1]].get(mode="clip")
        return array.at[target[0], :, :, target[1]].set(taken, mode="drop")

    return jax.tree.map(one, arrays)
