"""What arrays loading makes of a tree of parameters."""

from typing import Any

import jax
import numpy as np

from jaxspec.errors import LoadError
from jaxspec.models.families import Parameter
from jaxspec.models.quantization import BLOCK, Quantized, Scheme, is_matrix
from jaxspec.models.sharding import partition, shared_dimension


def layout_of(
    tree: dict[str, Any], dtype: np.dtype, scheme: Scheme | None = None, stacked: bool = False, devices: int = 1
) -> dict[str, Any]:
    """Shape and type of each array that takes the place of a `Parameter`, as several devices have it together.

    Matrices are as the scheme has them, all else is of `dtype`. `stacked` makes the layers one tree of arrays
    `[layers, ..]`. LoadError where scales would be for numbers that one device does not have.
    """

    def one(path: tuple[Any, ...], parameter: Parameter, spec: Any) -> Any:
        if scheme is None or not is_matrix(path, parameter):
            return jax.ShapeDtypeStruct(parameter.shape, dtype)
        return quantised_layout(parameter, scheme, shared_dimension(spec), devices)

    layout = jax.tree.map_with_path(one, tree, partition(tree))
    if not stacked:
        return layout
    count = len(layout["layers"])
    stack = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), layout["layers"][0])
    return {**layout, "layers": stack}


def quantised_layout(parameter: Parameter, scheme: Scheme, shared: int | None = None, devices: int = 1) -> Quantized:
    """A matrix as the scheme has it, of which `devices` share a dimension. The same LoadError."""
    layout = scheme.layout(parameter.shape)
    block = BLOCK if len(layout.scale.shape) == len(layout.values.shape) else 1
    for dimension, what, group in ((-1, "inputs", scheme.group), (-2, "rows", 1)):
        size, together, where, less = parameter.shape[dimension], group, "", ""
        if dimension == shared and devices > 1:
            size, together = size // devices, max(group, block)
            where, less = f" on each of {devices} devices", ", or fewer devices"
        if size % together:
            raise LoadError(
                f"tensor {parameter.parts[0].name} has {size} {what}{where}, not a multiple of the {together} that "
                f"share a scale: choose weights with one for a whole row, such as int8{less}"
            )
    return layout
