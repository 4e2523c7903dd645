"""What the 4-bit schemes share: groups of neighbouring inputs, their steps, and two codes a byte."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantization import Quantized
from jaxspec.models.quantization._scaling import divide

GROUP = 32
"""Inputs of a row that share a step."""
BYTE = jnp.dtype(jnp.uint8)


def layout(shape: tuple[int, ...], zero: bool) -> Quantized:
    """Half a byte an input, a byte for each group's step and one for its zero, and a float32 scale a row."""
    *features, inputs = shape
    shared = jax.ShapeDtypeStruct((*features, inputs // GROUP), BYTE)
    return Quantized(
        jax.ShapeDtypeStruct((*features, inputs // 2), BYTE),
        jax.ShapeDtypeStruct((*features,), jnp.dtype(jnp.float32)),
        shared,
        shared if zero else None,
    )


def in_groups(weight: np.ndarray) -> np.ndarray:
    """`[.., in]` as `[.., groups, GROUP]`."""
    return weight.reshape(*weight.shape[:-1], -1, GROUP)


def stored_steps(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps `[.., groups]` as whole multiples, in a byte, of a scale `[..]`, and the steps that these make.

    Scales in turn quantised: Dettmers et al. (2023), QLoRA, section 3. A step that is wanted is never 0.
    """
    scale = wanted.max(axis=-1) / np.float32(255)
    multiples = np.rint(divide(wanted, scale[..., None]))
    multiples = np.where(wanted > 0, np.clip(multiples, 1, 255), 0).astype(BYTE)
    return scale, multiples, multiples * scale[..., None]


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes `[.., groups, GROUP]` as bytes `[.., in / 2]`, after rounding and clipping to what 4 bits hold."""
    whole = np.clip(np.rint(codes), 0, 15).astype(BYTE)
    pairs = whole.reshape(*codes.shape[:-2], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
