"""Eight-bit floats (E4M3) with one float32 scale a row (an output channel)."""

import numpy as np

from jaxspec.models.quantization import Quantized, Scheme
from jaxspec.models.quantization._float8 import E4M3, LARGEST, rounded
from jaxspec.models.quantization._scaling import one_a_row


def _quantize(weight: np.ndarray) -> Quantized:
    scale = np.abs(weight).max(axis=-1) / LARGEST
    return Quantized(rounded(weight, scale[..., None]), scale)


SCHEME = Scheme(one_a_row(E4M3), _quantize)
