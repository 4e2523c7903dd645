"""What the schemes share: dividing by scales of which some are 0, and the layout of one scale a row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantization import Quantized


def divide(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`weight / scale`. Where the scale is 0, all that it serves is 0 or too small to matter, and is left as it is."""
    return weight / np.where(scale > 0, scale, np.float32(1))


def one_a_row(dtype: Any) -> Callable[[tuple[int, ...]], Quantized]:
    """The layout of values in `dtype` with one float32 scale for each row."""
    return lambda shape: Quantized(
        jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.dtype(jnp.float32))
    )
