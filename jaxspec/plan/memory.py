"""What a model and its sequences need in memory, and what of them a given memory holds.

Nothing is allocated. Activations, page tables and what a compiled program wants for itself are not counted.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from jaxspec.errors import ConfigError
from jaxspec.plan.cache import Cache, caches_of
from jaxspec.plan.shape import Shape
from jaxspec.plan.weights import arrays_of, count_of, weights_of

AUTO = "bfloat16"
"""What "auto" is on accelerators, and so in a plan, save for weights that are quantised already."""
UNCOUNTED = "uncounted"
"""Stands for the weights of a model whose cache alone is counted."""

Change = dict[str, Any]
"""Options to give anew."""


class Room(NamedTuple):
    """What a memory holds beside the weights."""

    max_batch: int
    """Sequences of the plan's context."""
    max_context: int
    """Tokens of each sequence of the plan's batch, the model's own context at most."""
    max_tokens: int
    """Tokens of the plan's batch together, however long each sequence is."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a model and of `batch` sequences of `context` tokens."""

    shape: Shape
    context: int
    batch: int
    kv_dtype: str
    caches: dict[str, Cache]
    """By format, the largest first."""
    weights: str
    weight_bytes: dict[str, int]
    """By format, the most first."""
    parameters: int
    """Numbers in the weights; 0 where they are not counted."""
    refused: list[str]
    """Formats that this model cannot have, and why."""

    @property
    def cache(self) -> Cache:
        """What the plan's own format takes."""
        return self.caches[self.kv_dtype]

    def kv_bytes(self, kv_dtype: str) -> int:
        """Bytes of all sequences in a format."""
        return self.batch * self.caches[kv_dtype].sequence_bytes(self.context)

    @property
    def total_bytes(self) -> int:
        """Bytes of keys, values and weights."""
        return self.kv_bytes(self.kv_dtype) + self.weight_bytes[self.weights]

    def room(self, memory: int) -> Room:
        """What so many bytes hold."""
        free = max(memory - self.weight_bytes[self.weights], 0)
        pages = max(free - self.batch * self.cache.tail_bytes, 0) // self.cache.page_bytes
        return Room(
            max_batch=free // self.cache.sequence_bytes(self.context),
            max_context=min(pages // self.batch * self.cache.page_size, self.shape.spec.max_context),
            max_tokens=pages * self.cache.page_size,
        )

    def remedies(self, memory: int) -> list[Change]:
        """Changes each of which makes the plan fit: the largest batch, context and formats. Empty where it fits, and
        where nothing would do."""
        if self.total_bytes <= memory:
            return []
        return self._smaller(memory) + self._formats(memory) or self._least(memory)

    def _smaller(self, memory: int) -> list[Change]:
        room = self.room(memory)
        return [change for change in ({"batch": room.max_batch}, {"context": room.max_context}) if all(change.values())]

    def _formats(self, memory: int) -> list[Change]:
        """The largest other format of the cache, and of the weights, that fits; if neither does, of both."""
        sizes = {
            (kv_dtype, weights): self.kv_bytes(kv_dtype) + self.weight_bytes[weights]
            for kv_dtype, weights in product(self.caches, self.weight_bytes)
        }
        fitting = [pair for pair in sorted(sizes, key=sizes.__getitem__, reverse=True) if sizes[pair] <= memory]
        caches = [{"kv_dtype": kv_dtype} for kv_dtype, weights in fitting if weights == self.weights]
        weights = [{"weights": weights} for kv_dtype, weights in fitting if kv_dtype == self.kv_dtype]
        return caches[:1] + weights[:1] or [{"kv_dtype": k, "weights": w} for k, w in fitting[:1]]

    def _least(self, memory: int) -> list[Change]:
        """The smallest formats, and as much of batch or context as they leave room for."""
        least = min(self.weight_bytes, key=self.weight_bytes.__getitem__)
        formats = {"kv_dtype": min(self.caches, key=self.kv_bytes), "weights": least}
        changed = {option: name for option, name in formats.items() if name != getattr(self, option)}
        return [changed | change for change in replace(self, **formats)._smaller(memory)]


def plan_memory(
    shape: Shape,
    context: int | None = None,
    batch: int = 1,
    kv_dtype: str = "auto",
    weights: str = "auto",
    page_size: int | None = None,
) -> MemoryPlan:
    """The plan; `context` None is the model's own, `page_size` None that of accelerators. ConfigError where this model
    cannot have it."""
    context = shape.spec.max_context if context is None else context
    _check(shape, context, batch, page_size, weights)
    if kv_dtype == "auto":
        kv_dtype = AUTO
    if weights == "auto":
        weights = UNCOUNTED if shape.parameters is None else shape.stored or AUTO
    caches, no_caches = caches_of(shape.spec, page_size)
    parameters, weight_bytes, no_weights = 0, {UNCOUNTED: 0}, {}
    if shape.parameters is not None:
        arrays = arrays_of(shape.parameters)
        parameters = count_of(arrays)
        weight_bytes, no_weights = weights_of(arrays)
    return MemoryPlan(
        shape=shape,
        context=context,
        batch=batch,
        kv_dtype=_choose("kv_dtype", kv_dtype, caches, no_caches),
        caches=caches,
        weights=_choose("weights", weights, weight_bytes, no_weights),
        weight_bytes=weight_bytes,
        parameters=parameters,
        refused=[*no_caches.values(), *no_weights.values()],
    )


def _check(shape: Shape, context: int, batch: int, page_size: int | None, weights: str) -> None:
    trained = shape.spec.max_context
    for ok, what in (
        (context >= 1, f"context must be 1 or more, not {context}"),
        (context <= trained, f"context {context} is more than the {trained} tokens {shape.name} was trained for"),
        (batch >= 1, f"batch must be 1 or more, not {batch}"),
        (page_size is None or page_size >= 1, f"page_size must be 1 or more, not {page_size}"),
        (
            weights == "auto" or shape.parameters is not None,
            f"weights {weights}: only the cache of {shape.name} is counted, which cannot be run yet; leave weights out",
        ),
    ):
        if not ok:
            raise ConfigError(what)


def _choose(option: str, name: str, there: dict[str, Any], refused: dict[str, str]) -> str:
    if name in refused:
        raise ConfigError(refused[name])
    if name not in there:
        raise ConfigError(f"no {option} named {name!r} (there are: auto, {', '.join(there)})")
    return name
