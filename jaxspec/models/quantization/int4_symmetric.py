"""Four-bit integers evenly about 0, with a byte for the step of 32 neighbouring inputs of a row: 4.25 bits a number,
and a float32 scale a row."""

from functools import partial

import numpy as np

from jaxspec.models.quantization import Quantized, Scheme
from jaxspec.models.quantization._groups import GROUP, in_groups, layout, pack, stored_steps
from jaxspec.models.quantization._scaling import divide


def _quantize(weight: np.ndarray) -> Quantized:
    groups = in_groups(weight)
    scale, multiples, steps = stored_steps(np.abs(groups).max(axis=-1) / np.float32(7))
    return Quantized(pack(divide(groups, steps[..., None]) + 8), scale, multiples)


SCHEME = Scheme(partial(layout, zero=False), _quantize, GROUP)
