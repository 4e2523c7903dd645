"""The one door through which every weight meets its activations."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.quantization import BLOCK, Quantized, halves, row_scales
from jaxspec.target import platform

FEW = 64
"""Tokens up to which XLA:CPU multiplies `weight @ x.T` faster than `x @ weight.T`, up to twice."""


class Stacked(NamedTuple):
    """A layer's matrix where it lies, in the stack of all layers: kernels read it there, XLA would copy it out."""

    stack: Array
    layer: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.stack.shape[1:]


def of_layer(layers: Any, index: Int[Array, ""]) -> Any:
    """The parameters of one layer of a stack of them."""

    def take(array: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Quantized) and _has_kernel(leaf.values, leaf.scale.ndim == leaf.values.ndim):
            return jax.tree.map(take, leaf._replace(values=None))._replace(values=Stacked(leaf.values, index))
        return jax.tree.map(take, leaf)

    return jax.tree.map(one, layers, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def linear(x: Float[Array, "*batch in"], weight: Float[Array, "*features in"] | Quantized) -> Float[Array, "..."]:
    """`x @ weight.T`, `[*batch, *features]`, in the order that the backend does best.

    Weights keep the [.., out, in] storage of Hugging Face, and may be `Quantized`.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = _quantised_product(flat, weight) if isinstance(weight, Quantized) else _product(flat, weight)
    return y.reshape(*x.shape[:-1], *y.shape[1:])


def _quantised_product(x: Float[Array, "N in"], weight: Quantized) -> Float[Array, "N *features"]:
    """The product reads the narrow numbers and its sums are scaled, as far as scales allow it. A matrix of
    dequantised numbers would take memory, and time to be written and read."""
    values, blocks = weight.values, weight.scale.ndim == len(weight.values.shape)
    if isinstance(values, Stacked) or _has_kernel(values, blocks):
        return _by_kernel(x, weight, blocks)
    if blocks:
        values = _in_blocks(weight.values.reshape(-1, x.shape[-1]).astype(x.dtype))
        sums = jnp.einsum("nbi,obi->bno", _in_blocks(x), values, preferred_element_type=jnp.float32)
        y = jnp.sum(sums * row_scales(weight).T[:, None], axis=0).astype(x.dtype)
        return y.reshape(len(x), *weight.values.shape[:-1])
    if weight.values.dtype == jnp.uint8:
        # Woven together, the two codes of each byte would go through memory in float32.
        even, odd = halves(weight, x.dtype)
        sums = _sums(x[:, ::2], even) + _sums(x[:, 1::2], odd)
    else:
        sums = _sums(x, weight.values.astype(x.dtype))
    return (sums * weight.scale).astype(x.dtype)


def _has_kernel(values: Array, blocks: bool) -> bool:
    """Whether the weights are dequantised in a Pallas kernel: where XLA for TPUs would write wider ones to memory."""
    if platform() != "tpu" or not (blocks or values.dtype == jnp.uint8):
        return False
    from pallas_kernels.tpu import matmul

    return matmul.unsupported(values) is None


def _by_kernel(x: Float[Array, "N in"], weight: Quantized, blocks: bool) -> Float[Array, "N *features"]:
    from pallas_kernels.tpu import matmul

    features, width = weight.values.shape[:-1], weight.values.shape[-1]
    values, layer = weight.values, None
    if isinstance(values, Stacked):
        values, layer = values
    values = values.reshape(*([] if layer is None else [len(values)]), -1, width)
    if blocks:
        scale = row_scales(weight._replace(values=jax.ShapeDtypeStruct((*features, width), values.dtype))).T
        y = matmul.block_matmul(x, values, scale, layer)
    else:
        groups = weight.steps.shape[-1]
        zero = None if weight.zero is None else weight.zero.reshape(-1, groups)
        y = matmul.int4_matmul(x, values, weight.scale.reshape(-1), weight.steps.reshape(-1, groups), zero, layer)
    return y.reshape(len(x), *features)


def _sums(x: Float[Array, "N in"], numbers: Float[Array, "*features in"]) -> Float[Array, "N *features"]:
    return _dot(x, numbers, jnp.float32)


def _dot(x: Float[Array, "N in"], weight: Float[Array, "*features in"], dtype) -> Float[Array, "N *features"]:
    # Features stay apart: with them in one dimension XLA for TPUs would copy the layer out of its stack.
    axes = ((1,), (weight.ndim - 1,)), ((), ())
    return jax.lax.dot_general(x, weight, axes, preferred_element_type=dtype)


def _in_blocks(a: Float[Array, "N in"]) -> Float[Array, "N blocks 128"]:
    padded = jnp.pad(a, ((0, 0), (0, -a.shape[1] % BLOCK)))
    return padded.reshape(a.shape[0], -1, BLOCK)


def _product(x: Float[Array, "N in"], weight: Float[Array, "*features in"]) -> Float[Array, "N *features"]:
    if platform() != "cpu":
        return _dot(x, weight, x.dtype)
    flat = weight.reshape(-1, x.shape[1])
    if len(x) <= FEW:
        # The barriers keep XLA from turning the product round again.
        barrier = jax.lax.optimization_barrier
        y = barrier(jnp.dot(flat, barrier(x.T))).T
    else:
        y = x @ flat.T
    return y.reshape(len(x), *weight.shape[:-1])
