"""Four-bit integers from the least to the greatest of 32 neighbouring inputs of a row, with a byte for the step between
them and one for where zero lies: 4.5 bits a number, and a float32 scale a row.

A grid of its own for every group holds what 4-bit checkpoints of other makers hold almost as it is: SmolLM2's Q4_1.
"""

from functools import partial

import numpy as np

from jaxspec.models.quantization import ZERO_UNIT, Quantized, Scheme
from jaxspec.models.quantization._groups import GROUP, in_groups, layout, pack, stored_steps
from jaxspec.models.quantization._scaling import divide


def _quantize(weight: np.ndarray) -> Quantized:
    groups = in_groups(weight)
    least, greatest = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scale, multiples, steps = stored_steps((greatest - least) / np.float32(15))
    zero = np.clip(np.rint(divide(-least, steps) / ZERO_UNIT), 0, 255)
    codes = divide(groups, steps[..., None]) + (zero * np.float32(ZERO_UNIT))[..., None]
    return Quantized(pack(codes), scale, multiples, zero.astype(np.uint8))


SCHEME = Scheme(partial(layout, zero=True), _quantize, GROUP)
