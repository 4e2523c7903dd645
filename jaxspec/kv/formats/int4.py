"""Keys and values in 4 bits, two to a byte: keys scaled by channel, values by token, as KIVI has it (Liu et al., 2024).

A few channels of keys are large in every token: a scale shared by a token's channels would drown the others in their
rounding. Channels of a key are therefore scaled over a group of slots, which is written once it is whole.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxspec.errors import ConfigError
from jaxspec.kv.bits import keep, numbers
from jaxspec.kv.format import Format
from jaxspec.kv.formats import int8
from pallas_kernels.codes import LEAST, SCALE

GROUP = 64
"""Slots that share the scales of a key's channels."""
CHANNELS = 64
"""Channels of a value that share a scale, where its dimension is a multiple of this; else all do."""
LEVELS = 15


def grouped(group: int) -> Format:
    """The format with keys scaled over so many slots. Every scale comes with the number that code 0 means, both in
    bfloat16; codes are of numbers less that one as it is stored, so that its rounding loses nothing."""

    def arrays(pages: int, page: int, heads: int, dim: int) -> dict[str, jax.ShapeDtypeStruct]:
        if page % group:
            raise ConfigError(f"kv_dtype int4 needs pages of a multiple of {group} slots, not of {page}")
        if dim % 2:
            raise ConfigError(f"kv_dtype int4 needs heads of an even dimension, not of {dim}")
        return {
            "kv": jax.ShapeDtypeStruct((pages, heads, 2, page, dim // 2), jnp.uint8),
            "key_scale": jax.ShapeDtypeStruct((pages, heads, page // group, 2, dim), SCALE),
            "value_scale": jax.ShapeDtypeStruct((pages, heads, page, dim // _shared(dim), 2), SCALE),
        }

    def write(arrays, pages, offsets, k, v):
        k, v = (jnp.moveaxis(a, -3, -2).astype(jnp.float32) for a in (k, v))  # [.., K, group, D]
        key_codes, key_scale = _quantise(k, -2)
        parts = v.reshape(*v.shape[:-1], -1, _shared(v.shape[-1]))
        value_codes, value_scale = _quantise(parts, -1)
        codes = jnp.stack([_packed(key_codes), _packed(value_codes.reshape(v.shape))], axis=-3)
        key_scale = keep(key_scale, SCALE, arrays["key_scale"].dtype)
        value_scale = keep(value_scale, SCALE, arrays["value_scale"].dtype)
        index = offsets // group
        slots = offsets[..., None] + jnp.arange(group)
        return {
            "kv": arrays["kv"].at[pages[..., None], :, :, slots].set(jnp.moveaxis(codes, -2, pages.ndim), mode="drop"),
            "key_scale": arrays["key_scale"].at[pages, :, index].set(key_scale, mode="drop"),
            "value_scale": arrays["value_scale"]
            .at[pages[..., None], :, slots]
            .set(jnp.moveaxis(value_scale, -3, pages.ndim), mode="drop"),
        }

    def read(arrays, pages, which):
        codes = _unpacked(arrays["kv"][pages, :, which])
        if which == 0:
            scale = numbers(arrays["key_scale"][pages], SCALE).astype(jnp.float32)  # [R, K, page/group, 2, D]
            parts = codes.reshape(*scale.shape[:-2], group, -1)
            return (parts * scale[..., :1, :] + scale[..., 1:, :]).reshape(codes.shape)
        scale = numbers(arrays["value_scale"][pages], SCALE).astype(jnp.float32)  # [R, K, page, D/shared, 2]
        parts = codes.reshape(*scale.shape[:-1], -1)
        return (parts * scale[..., :1] + scale[..., 1:]).reshape(codes.shape)

    return Format(arrays, write, read, None, group, int8.FORMAT)


def _shared(dim: int) -> int:
    return dim if dim % CHANNELS else CHANNELS


def _quantise(wide: Float[Array, "..."], axis: int) -> tuple[Array, Array]:
    """Codes 0 to 15 as floats, and scale and zero, stacked where `axis` was."""
    least, most = (reduce(wide, axis=axis, keepdims=True) for reduce in (jnp.min, jnp.max))
    zero = least.astype(SCALE)
    span = most - zero.astype(jnp.float32)
    scale = jnp.maximum(span / LEVELS, LEAST).astype(SCALE)
    codes = jnp.round((wide - zero.astype(jnp.float32)) / scale.astype(jnp.float32))
    return jnp.clip(codes, 0, LEVELS), jnp.concatenate([scale, zero], axis=axis)


def _packed(codes: Float[Array, "*batch D"]) -> UInt8[Array, "*batch half"]:
    """The first half of the channels in the low bits, the second in the high."""
    low, high = jnp.split(codes.astype(jnp.uint8), 2, axis=-1)
    return low | high << 4


def _unpacked(stored: UInt8[Array, "*batch half"]) -> Float[Array, "*batch D"]:
    return jnp.concatenate([stored & LEVELS, stored >> 4], axis=-1).astype(jnp.float32)


FORMAT = grouped(GROUP)
