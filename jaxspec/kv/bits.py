"""How pools keep narrow floats: on the CPU as their bits, where XLA would widen a whole array to write to it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

BITS = {1: jnp.dtype(jnp.uint8), 2: jnp.dtype(jnp.uint16)}


def kept(dtype: Any) -> jnp.dtype:
    """The type of an array that holds numbers of `dtype`."""
    dtype = jnp.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in BITS
    return BITS[dtype.itemsize] if narrow and jax.default_backend() == "cpu" else dtype


def keep(values: Array, dtype: Any) -> Array:
    """Numbers of any type as the pool holds them."""
    narrow = values.astype(dtype)
    return narrow if kept(dtype) == dtype else jax.lax.bitcast_convert_type(narrow, kept(dtype))


def numbers(array: Array, dtype: Any) -> Array:
    """What of the pool was read, as the numbers of `dtype` that it holds."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
