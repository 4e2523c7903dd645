"""Eight-bit floats (E4M3) with one float32 scale for each block of 128 × 128 (DeepSeek-V3, section 3.3).

Blocks lie within a matrix `[features[-1], in]`: in one head of the joined queries, keys and values, in gate or in up.
Where the size of a head is a multiple of 128, as it mostly is, these are the blocks of each tensor by itself.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantization import BLOCK, Quantized, Scheme
from jaxspec.models.quantization._float8 import E4M3, LARGEST, rounded


def _layout(shape: tuple[int, ...]) -> Quantized:
    *lead, rows, inputs = shape
    blocks = (*lead, -(-rows // BLOCK), -(-inputs // BLOCK))
    return Quantized(jax.ShapeDtypeStruct(shape, E4M3), jax.ShapeDtypeStruct(blocks, jnp.dtype(jnp.float32)))


def _quantize(weight: np.ndarray) -> Quantized:
    rows, inputs = weight.shape[-2:]
    largest = np.maximum.reduceat(np.abs(weight), np.arange(0, rows, BLOCK), axis=-2)
    scale = np.maximum.reduceat(largest, np.arange(0, inputs, BLOCK), axis=-1) / LARGEST
    spread = scale.repeat(BLOCK, axis=-2)[..., :rows, :].repeat(BLOCK, axis=-1)[..., :inputs]
    return Quantized(rounded(weight, spread), scale)


SCHEME = Scheme(_layout, _quantize)
