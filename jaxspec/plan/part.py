"""What one of several devices has of a model: its arrays, laid out as accelerators have them."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.loading.layout import layout_of
from jaxspec.models.quantization import get_scheme
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
    dtype, scheme = (weights, None) if weights in PLAIN else (BESIDE, get_scheme(weights))
    try:
        layout = layout_of(one_layer, jnp.dtype(dtype), scheme, devices=1 if replicated else share)
    except LoadError as error:
        raise ConfigError(f"{name}: {error}") from error
    local = jax.tree.map(lambda array, how: _divided(array, how, share), layout, partition(layout, replicated))
    layers = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((spread.num_layers, *array.shape), array.dtype), local["layers"][0]
    )
    return Part(spread.local(1 if replicated else share), share, local | {"layers": layers})


def _divided(array: Any, how: PartitionSpec, share: int) -> jax.ShapeDtypeStruct:
    """What one device has of an array."""
    sizes = zip(array.shape, [*how, *[None] * (len(array.shape) - len(how))], strict=True)
    return jax.ShapeDtypeStruct(tuple(size // (share if axis == MODEL else 1) for size, axis in sizes), array.dtype)
