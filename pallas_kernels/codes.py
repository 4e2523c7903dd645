"""How vectors become 8-bit numbers and a scale: the same in XLA and in a kernel, to the bit."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

SCALE = jnp.dtype(jnp.bfloat16)
"""The type of scales: half the size of float32, and as wide a range."""
LEAST = 1e-30
"""A scale is no smaller: numbers that are all equal are then divided by it like any others."""


def quantise(
    numbers: Float[Array, "*batch D"], dtype: Any
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch 1"]]:
    """Codes and scales of float32 vectors, both in float32: a vector's largest number becomes the largest of `dtype`.

    Numbers are divided by the scale as `SCALE` stores it, so that its rounding loses nothing.
    """
    exact = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if exact else jnp.finfo(dtype).max)
    peak = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True)
    scale = jnp.maximum(peak / largest, LEAST).astype(SCALE).astype(jnp.float32)
    codes = jnp.clip(numbers / scale, -largest, largest)
    return (jnp.round(codes) if exact else codes), scale
