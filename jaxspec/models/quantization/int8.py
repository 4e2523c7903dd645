"""Eight-bit integers, evenly about 0, with one float32 scale a row (an output channel)."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantization import Quantized, Scheme
from jaxspec.models.quantization._scaling import divide, one_a_row

LARGEST = 127


def _quantize(weight: np.ndarray) -> Quantized:
    scale = np.abs(weight).max(axis=-1) / np.float32(LARGEST)
    codes = np.rint(divide(weight, scale[..., None]))
    return Quantized(np.clip(codes, -LARGEST, LARGEST, out=codes).astype(np.int8), scale)


SCHEME = Scheme(one_a_row(jnp.dtype(jnp.int8)), _quantize)
