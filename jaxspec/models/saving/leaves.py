"""The arrays of a model on their way to files: each is read when its turn to be written comes."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jaxspec.models.families import Parameter
from jaxspec.models.loading import Checkpoint
from jaxspec.models.loading.shards import Source, read_array, read_quantised
from jaxspec.models.loading.stream import check_tensors
from jaxspec.models.quantization import Quantized, Scheme, stored_tree


@dataclass(frozen=True)
class Leaf:
    """An array that is to be written."""

    parameter: Parameter
    """Its shape, and the tensors that hold it in Hugging Face's layout."""
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.parameter.shape) * self.dtype.itemsize

    @property
    def quantised(self) -> bool:
        """Whether it is a field of a quantised matrix."""
        return self.parameter.parts[0].dtype is not None

    def counted(self, advance: Callable[[int], None]) -> "Leaf":
        """The same leaf, which tells `advance` its size when it was read."""

        def read() -> np.ndarray:
            array = self.read()
            advance(self.nbytes)
            return array

        return replace(self, read=read)


def leaves_of(
    found: Checkpoint, dtype: np.dtype | None, scheme: Scheme | None, pool: ThreadPoolExecutor
) -> dict[str, Any]:
    """The parameter tree with a `Leaf` for each array, threads of the pool reading them.

    `dtype` is of what is not quantised, None keeping the type of each tensor; `scheme` quantises the matrices.
    LoadError names a tensor that is missing, misshapen, of another type or unexpected.
    """
    source = found.source
    parameters: list[Parameter] = jax.tree.leaves(found.tree)
    check_tensors(source, found.family, [part for parameter in parameters for part in parameter.parts])

    def plain(parameter: Parameter) -> Leaf:
        own = parameter.parts[0].dtype or dtype or _type(source, parameter)
        return Leaf(parameter, own, partial(read_array, source, parameter, own, pool))

    if scheme is None:
        return jax.tree.map(plain, found.tree)
    by_name = {parameter.parts[0].name: parameter for parameter in parameters}

    @lru_cache(maxsize=1)  # its fields are written one after the other
    def quantised(name: str) -> Quantized:
        return read_quantised(source, by_name[name], scheme, pool)

    def leaf(parameter: Parameter, goal: Any) -> Any:
        if not isinstance(goal, Quantized):
            return plain(parameter)
        fields = (
            None if f is None else Leaf(f, f.parts[0].dtype, partial(field, parameter.parts[0].name, i))
            for i, f in enumerate(goal)
        )
        return Quantized(*fields)

    def field(name: str, index: int) -> np.ndarray:
        return quantised(name)[index]

    return jax.tree.map(leaf, found.tree, stored_tree(found.tree, scheme))


def _type(source: Source, parameter: Parameter) -> np.dtype:
    """The type of the tensors of a parameter, or float32 where they differ or are float64."""
    found = {source.dtype(part.name) for part in parameter.parts}
    return found.pop() if len(found) == 1 and np.dtype(np.float64) not in found else np.dtype(np.float32)
