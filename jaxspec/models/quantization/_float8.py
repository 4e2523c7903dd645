"""The 8-bit float of four exponent and three mantissa bits (Micikevicius et al., 2022)."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantization._scaling import divide

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = np.float32(448)
"""Of E4M3, which has no infinity: what is larger becomes NaN."""


def rounded(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`weight / scale` in E4M3."""
    return np.clip(divide(weight, scale), -LARGEST, LARGEST).astype(E4M3)
