"""How pools keep narrow floats: on the CPU as their bits, where XLA would widen a whole array to write to it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

BITS = {1: jnp.dtype(jnp.uint8), 2: jnp.dtype(jnp.uint16)}


def as_bits(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The array that keeps the bits of narrow floats; any other as it is."""
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize in BITS
    return jax.ShapeDtypeStruct(array.shape, BITS[array.dtype.itemsize]) if narrow else array


def keep(values: Array, dtype: Any, kept: Any) -> Array:
    """Numbers of any type as an array of type `kept` keeps those of `dtype`."""
    narrow = values.astype(dtype)
    return narrow if kept == dtype else jax.lax.bitcast_convert_type(narrow, kept)


def numbers(array: Array, dtype: Any) -> Array:
    """What of the pool was read, as the numbers of `dtype` that it holds."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
