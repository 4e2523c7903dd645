"""What one of several devices has of a model: its arrays, laid out as accelerators have them."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.models.quantization import Quantized, get_scheme, is_matrix
from jaxspec.models.sharding import partition
from jaxspec.models.spec import ModelSpec, padded_vocab
from jaxspec.parallel import MODEL
from jaxspec.plan.shape import Shape
from jaxspec.plan.tiles import held_bytes
from jaxspec.plan.weights import BESIDE, PLAIN


@dataclass(frozen=True)
class Part:
    """One of `share` equal parts of a model."""

    local: ModelSpec
    """Heads and features of one device; the vocabulary is that of all."""
    share: int
    arrays: dict[str, Any]
    """`jax.ShapeDtypeStruct`s, layers stacked."""

    @cached_property
    def layer_bytes(self) -> int:
        """What every forward reads: all layers, as numbers lie in memory."""
        return held_bytes((self.arrays["layers"], self.arrays["norm"]), tiled=False)

    @cached_property
    def head_bytes(self) -> int:
        """What logits read: the output projection."""
        head = self.arrays["embed" if self.local.tied_embeddings else "lm_head"]
        return held_bytes(head, tiled=False)

    @property
    def head_count(self) -> int:
        """Numbers of the output projection."""
        return self.local.vocab_size * self.local.embed_dim // self.share

    @property
    def layer_count(self) -> int:
        """Numbers in the matrices of all layers."""
        return self.local.weight_count - self.local.vocab_size * self.local.embed_dim


def part_of(shape: Shape, weights: str, share: int, replicated: bool = False) -> Part:
    """One device's part of a model whose matrices are stored in a format; `replicated`, it has all layers and a share
    of the vocabulary. ConfigError where it cannot be divided."""
    spec = shape.spec
    if shape.family is None or not isinstance(spec, ModelSpec):
        raise ConfigError(f"{shape.name} cannot be run yet: only its cache is counted")
    return _part(shape.name, spec, shape.family, weights, share, replicated)


@lru_cache(maxsize=64)
def _part(name: str, spec: ModelSpec, family: Any, weights: str, share: int, replicated: bool) -> Part:
    try:
        spread = spec.spread(1 if replicated else share)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    spread = replace(spread, vocab_size=padded_vocab(spec.vocab_size, share))
    one_layer = family.parameters(replace(spread, num_layers=1))  # as all of them are: they are stacked
    tree = jax.tree.map_with_path(lambda path, p: _stored(path, p, weights), one_layer)
    local = jax.tree.map(lambda array, how: _divided(name, array, how, share), tree, partition(tree, replicated))
    layers = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((spread.num_layers, *array.shape), array.dtype), local["layers"][0]
    )
    return Part(spread.local(1 if replicated else share), share, local | {"layers": layers})


def _stored(path: tuple[Any, ...], parameter: Any, weights: str) -> Any:
    """The arrays of a parameter in a format of weights."""
    if weights in PLAIN or not is_matrix(path, parameter):
        return jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(weights if weights in PLAIN else BESIDE))
    scheme = get_scheme(weights)
    if parameter.shape[-1] % scheme.group:
        raise ConfigError(
            f"weights {weights} need inputs of a multiple of {scheme.group}, "
            f"and a matrix here has {parameter.shape[-1]}"
        )
    return Quantized(*scheme.layout(parameter.shape))


def _divided(name: str, array: Any, how: PartitionSpec, share: int) -> jax.ShapeDtypeStruct:
    """What one device has of an array."""
    shape = list(array.shape)
    for at, axis in enumerate(how):
        if axis == MODEL:
            if shape[at] % share:
                raise ConfigError(f"{name}: {shape[at]} scales of weights cannot be shared by {share} devices")
            shape[at] //= share
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)
