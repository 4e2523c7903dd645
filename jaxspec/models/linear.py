"""The one door through which every weight meets its activations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.quantization import BLOCK, Quantized, halves, row_scales


def linear(x: Float[Array, "*batch in"], weight: Float[Array, "*features in"] | Quantized) -> Float[Array, "..."]:
    """`x @ weight.T`, `[*batch, *features]`, in the order that the backend does best.

    Weights keep the [.., out, in] storage of Hugging Face, and may be `Quantized`.
    """
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Quantized):
        features = weight.values.shape[:-1]
        y = _quantised_product(flat, weight)
    else:
        features = weight.shape[:-1]
        y = _product(flat, weight.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], *features)


def _quantised_product(x: Float[Array, "N in"], weight: Quantized) -> Float[Array, "N out"]:
    """The product reads the narrow numbers and its sums are scaled, as far as scales allow it. A matrix of
    dequantised numbers would take memory, and time to be written and read."""
    if weight.scale.ndim == weight.values.ndim:
        values = _in_blocks(weight.values.reshape(-1, x.shape[-1]).astype(x.dtype))
        sums = jnp.einsum("nbi,obi->bno", _in_blocks(x), values, preferred_element_type=jnp.float32)
        return jnp.sum(sums * row_scales(weight).T[:, None], axis=0).astype(x.dtype)
    if weight.values.dtype == jnp.uint8:
        # Woven together, the two codes of each byte would go through memory in float32.
        even, odd = halves(weight, x.dtype)
        sums = _sums(x[:, ::2], even) + _sums(x[:, 1::2], odd)
    else:
        sums = _sums(x, weight.values.astype(x.dtype))
    return (sums * weight.scale.reshape(-1)).astype(x.dtype)


def _sums(x: Float[Array, "N in"], numbers: Float[Array, "*features in"]) -> Float[Array, "N out"]:
    return jnp.dot(x, numbers.reshape(-1, x.shape[-1]).T, preferred_element_type=jnp.float32)


def _in_blocks(a: Float[Array, "N in"]) -> Float[Array, "N blocks 128"]:
    padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % BLOCK)))
    return padded.reshape(a.shape[0], -1, BLOCK)


def _product(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> Float[Array, "N out"]:
    if jax.default_backend() == "cpu" and _weight_goes_left(x.shape[0], *weight.shape):
        # The barriers keep XLA from turning the product round again.
        barrier = jax.lax.optimization_barrier
        return barrier(jnp.dot(weight, barrier(x.T))).T
    return x @ weight.T


def _weight_goes_left(tokens: int, outputs: int, inputs: int) -> bool:
    """Measured on XLA:CPU: few tokens, or a wide weight and not many, run up to twice as fast as `weight @ x.T`."""
    return tokens <= 16 or (tokens <= 64 and inputs > outputs)
