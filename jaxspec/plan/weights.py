"""What weights take in memory: bytes are those of the arrays that families and quantisers declare."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.quantization import get_scheme, is_matrix, scheme_names

PLAIN = ("float32", "bfloat16")
BESIDE = "bfloat16"
"""What is left of the parameters where matrices are quantised: embedding, norms and biases."""

Arrays = Counter[tuple[bool, tuple[int, ...]]]
"""How many arrays there are that are matrices or not and of a shape."""


def arrays_of(parameters: dict[str, Any]) -> Arrays:
    """The arrays of a parameter tree of `families.Parameter`s."""
    return Counter((is_matrix(path, p), p.shape) for path, p in jax.tree.leaves_with_path(parameters))


def count_of(arrays: Arrays) -> int:
    """Numbers in all of them."""
    return sum(many * math.prod(shape) for (_, shape), many in arrays.items())


def weights_of(arrays: Arrays) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes in each format, the most first; and of formats that cannot be, why."""
    found = {name: count_of(arrays) * jnp.dtype(name).itemsize for name in PLAIN}
    refused = {}
    for name in reversed(scheme_names()):  # int8 before fp8, which takes as much and is slow on many chips
        group = get_scheme(name).group
        odd = next((shape for matrix, shape in arrays if matrix and shape[-1] % group), None)
        if odd is None:
            found[name] = sum(many * _bytes(name, *one) for one, many in arrays.items())
        else:
            refused[name] = f"weights {name} need inputs of a multiple of {group}, and a matrix here has {odd[-1]}"
    return dict(sorted(found.items(), key=lambda item: -item[1])), refused


def _bytes(scheme: str, matrix: bool, shape: tuple[int, ...]) -> int:
    if not matrix:
        return math.prod(shape) * jnp.dtype(BESIDE).itemsize
    stored = jax.tree.leaves(get_scheme(scheme).layout(shape))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in stored)
