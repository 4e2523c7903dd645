"""Which dimension of each parameter several devices share: heads and features by columns into a layer's two halves, by
rows out of them (Megatron-LM, Shoeybi et al., 2019), and the vocabulary."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxspec.models.quantization import Quantized
from jaxspec.parallel import MODEL

SHARED = {
    ("embed", "weight"): -2,
    ("lm_head", "weight"): -2,
    ("qkv", "weight"): -4,
    ("qkv", "bias"): -3,
    ("o", "weight"): -1,
    ("gate_up", "weight"): -2,
    ("gate_up", "bias"): -1,
    ("down", "weight"): -1,
}
"""The dimension of a matrix `[*features, in]`, or of a bias, by its last two names; what is not here all devices have.
Counted from the end: those of a layer and of a stack of them are then the same."""


def partition(tree: Any, replicated: bool = False) -> Any:
    """A `PartitionSpec` for each array of a parameter tree, or of a tree of what has a `shape` and stands for one.

    `replicated`: every device has all of the layers. The vocabulary is shared even then.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        names = tuple(key.key for key in path[-2:] if hasattr(key, "key"))
        return _of_parameter(None if replicated and path[0].key == "layers" else SHARED.get(names), leaf)

    return jax.tree.map_with_path(one, tree, is_leaf=lambda node: isinstance(node, Quantized))


def shared_dimension(spec: PartitionSpec) -> int | None:
    """The dimension that devices share, counted from the end; None of what they have alike."""
    return spec.index(MODEL) - len(spec) if MODEL in spec else None


def _of_parameter(shared: int | None, leaf: Any) -> Any:
    if not isinstance(leaf, Quantized):
        return _spec(shared, len(leaf.shape))
    dimensions = len(leaf.values.shape)
    return Quantized(*(None if field is None else _of_field(field, shared, dimensions) for field in leaf))


def _of_field(field: Any, shared: int | None, dimensions: int) -> PartitionSpec:
    """All fields have the features of their matrix first, or blocks of them; scales of rows have no inputs."""
    if shared is not None:
        shared += dimensions - len(field.shape)
    return _spec(shared, len(field.shape))


def _spec(shared: int | None, dimensions: int) -> PartitionSpec:
    if shared is None or shared == 0:
        return PartitionSpec()
    return PartitionSpec(*(MODEL if at == shared + dimensions else None for at in range(dimensions)))
