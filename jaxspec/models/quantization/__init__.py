"""Weights in fewer bits. A scheme is one file: its name is the scheme's name in a config, its `SCHEME` describes it."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import Parameter, Part

BLOCK = 128
"""Rows and inputs that share the scale of a block."""
ZERO_UNIT = 1 / 16
"""Of the zeros of 4-bit codes, in steps."""
METHOD = "jaxspec"
"""The `quant_method` in the `quantization_config` of our own checkpoints; its `weights` names the scheme."""
SUFFIXES = ("", "_scale", "_steps", "_zero")
"""What follows a matrix's Hugging Face name in a quantised checkpoint, for each field of `Quantized`."""


class Quantized(NamedTuple):
    """A weight `[*features, in]` in fewer bits: a plain pytree, which jit, scan, sharding and tree.map take as it is.

    Its fields are arrays, or what stands for arrays in a tree of shapes or of `Parameter`s. Their types and shapes
    alone tell what they mean; `dequantize` is the definition.
    """

    values: Any
    """`[*features, in]` of int8 or float8_e4m3fn; or `[*features, in / 2]` of uint8: two 4-bit codes a byte, that of
    the even input in the low half."""
    scale: Any
    """float32, `[*features]`: one a row. Or as many dimensions as `values`, `[.., blocks of rows, blocks of inputs]`,
    each for 128 × 128 numbers of one matrix `[features[-1], in]`, the last blocks cut off where it ends."""
    steps: Any = None
    """With 4-bit codes, uint8 `[*features, groups]`: the step between two codes of as many neighbouring inputs, in
    multiples of the row's scale."""
    zero: Any = None
    """With 4-bit codes, uint8 like `steps`: the code that stands for 0, in sixteenths; None is code 8 everywhere."""


class Scheme(NamedTuple):
    """How weights become `Quantized`.

    `layout(shape)`: shape and type of each field, for a weight `[*features, in]`.
    `quantize(weight)`: fields of a float32 numpy weight `[.., rows, in]`; rows may be cut at multiples of `BLOCK`.
    `group`: the inputs of a weight must be a multiple of this.
    """

    layout: Callable[[tuple[int, ...]], Quantized]
    quantize: Callable[[np.ndarray], Quantized]
    group: int = 1


def scheme_names() -> list[str]:
    """The schemes there are, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get_scheme(name: str) -> Scheme:
    """The scheme of that name. ConfigError lists the names."""
    if name not in scheme_names():
        raise ConfigError(f"no quantised weights named {name!r} (there are: {', '.join(scheme_names())})")
    return importlib.import_module(f"{__name__}.{name}").SCHEME


def scheme_of(config: Mapping[str, Any]) -> str | None:
    """The scheme that a checkpoint's matrices are stored in, by its config.json; None where jaxspec did not quantise
    them. LoadError where there is no such scheme."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") != METHOD:
        return None
    name = settings.get("weights")
    if name not in scheme_names():
        raise LoadError(f"config: quantization_config has weights {name!r} (there are: {', '.join(scheme_names())})")
    return name


def dequantize(weight: Quantized, dtype: Any) -> Float[Array, "*features in"]:
    """The numbers that a weight stands for: `values · scale`, or `(code − zero) · steps · scale`."""
    values, scale = weight.values, weight.scale
    if values.dtype == jnp.uint8:
        numbers = jnp.stack(halves(weight, jnp.float32), axis=-1).reshape(*values.shape[:-1], -1)
    else:
        numbers = values.astype(jnp.float32)
    if scale.ndim < values.ndim:
        scale = scale[..., None]
    else:
        scale = row_scales(weight).reshape(*values.shape[:-1], -1).repeat(BLOCK, axis=-1)[..., : values.shape[-1]]
    return (numbers * scale).astype(dtype)


def halves(weight: Quantized, dtype: Any) -> tuple[Float[Array, "*features half"], Float[Array, "*features half"]]:
    """The numbers of the even and those of the odd inputs of a weight of 4-bit codes, before the scale of their row."""

    def spread(shared: Array) -> Array:
        return jnp.repeat(shared.astype(dtype), weight.values.shape[-1] // shared.shape[-1], axis=-1)

    steps, zero = spread(weight.steps), 8 if weight.zero is None else spread(weight.zero) * ZERO_UNIT
    even, odd = ((codes.astype(dtype) - zero) * steps for codes in (weight.values & 15, weight.values >> 4))
    return even, odd


def row_scales(weight: Quantized) -> Float[Array, "out blocks"]:
    """The scales of a weight that has them for blocks, for each of its rows."""
    scale = jnp.repeat(weight.scale, BLOCK, axis=-2)[..., : weight.values.shape[-2], :]
    return scale.reshape(-1, scale.shape[-1])


def is_matrix(path: tuple[Any, ...], parameter: Parameter) -> bool:
    """Whether the parameter at that path of a tree is quantised: all matrices are but the embedding, which is looked up
    (and is the output projection too where the two are tied)."""
    return path[0].key != "embed" and all(len(part.shape) == 2 for part in parameter.parts)


def stored_tree(tree: dict[str, Any], scheme: Scheme) -> dict[str, Any]:
    """The tree of a checkpoint whose matrices are quantised: each is `Quantized`, its fields `Parameter`s.

    A field has the parts of its matrix, row for row, under their Hugging Face names and a suffix.
    """
    return jax.tree.map_with_path(lambda path, p: _stored(p, scheme) if is_matrix(path, p) else p, tree)


def _stored(parameter: Parameter, scheme: Scheme) -> Quantized:
    features = len(parameter.shape) - 1

    def field(leaf: Any, suffix: str) -> Parameter | None:
        if leaf is None:
            return None
        inputs, whole = leaf.shape[features:], np.broadcast_to(np.int8(0), leaf.shape)
        parts = []
        for part in parameter.parts:
            rows = whole[part.index].size // math.prod(inputs)
            parts.append(Part(part.name + suffix, (rows, *inputs), part.index, np.dtype(leaf.dtype)))
        return Parameter(leaf.shape, tuple(parts))

    layout = scheme.layout(parameter.shape)
    return Quantized(*(field(leaf, suffix) for leaf, suffix in zip(layout, SUFFIXES, strict=True)))
