"""Fills a parameter tree from a checkpoint, a few rows at a time, so that loading needs little more than the result."""

import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.errors import LoadError
from jaxspec.models.families import Family, Part
from jaxspec.models.loading.home import Home
from jaxspec.models.loading.shards import CHUNK, Source, read_shards
from jaxspec.models.quantization import Quantized, Scheme, dequantize
from jaxspec.models.sharding import shared_dimension
from jaxspec.parallel import on_each, specs_of

QUIET_SECONDS = 1.0
"""Work shorter than this shows no progress bar."""


def read_parameters(
    source: Source,
    family: Family,
    tree: dict[str, Any],
    layout: dict[str, Any],
    specs: dict[str, Any],
    home: Home,
    progress: bool,
    scheme: Scheme | None = None,
    unpacked: np.dtype | None = None,
) -> dict[str, Any]:
    """The arrays of a layout (see `layout_of`), read from the tensors that a tree of `Parameter`s names.

    The layout may be that of the same model `spread` over several devices; `specs` tell how these share its arrays.
    With a `scheme`, matrices are quantised as they are read, a few rows at a time. What is `Quantized` then, or in the
    tree already, is dequantised again to the type `unpacked` if there is one, one matrix at a time.
    Arrays are made largest first: their temporary memory is then smallest when the most is held. LoadError names a
    missing, misshapen or unexpected tensor before anything is read, and later one whose numbers cannot be used.
    """
    check_tensors(source, family, [part for parameter in jax.tree.leaves(tree) for part in parameter.parts])
    goals, structure = jax.tree.flatten(layout, is_leaf=_is_quantised)
    shared = jax.tree.leaves(specs, is_leaf=_is_quantised)
    nodes = _by_array(tree, stacked=not isinstance(layout["layers"], tuple))
    counts = (jax.tree.map(partial(_size, home), goal, spec) for goal, spec in zip(goals, shared, strict=True))
    sizes = [sum(jax.tree.leaves(count)) for count in counts]
    arrays: list[Any] = [None] * len(goals)
    bar = ProgressBar("Loading weights", sum(sizes), progress)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool, bar:
        for i in sorted(range(len(goals)), key=lambda i: -sizes[i]):
            arrays[i] = _load(source, nodes[i], goals[i], shared[i], home, pool, scheme)
            if isinstance(goals[i], Quantized) and unpacked is not None:
                arrays[i] = _dequantise(arrays[i], unpacked).block_until_ready()
            bar.advance(sizes[i])
    return jax.tree.unflatten(structure, arrays)


def _is_quantised(node: Any) -> bool:
    return isinstance(node, Quantized)


def _by_array(tree: dict[str, Any], stacked: bool) -> list[list[Any]]:
    """For each array in order, the parameters that it is made of: one, or one of every layer."""
    found: dict[Any, list[Any]] = {}
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=_is_quantised):
        within = path[:1] + path[2:] if stacked and path[0].key == "layers" else path
        found.setdefault(within, []).append(node)
    return list(found.values())


def _size(home: Home, array: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
    """Numbers that are read of an array."""
    size = math.prod(array.shape)
    return size if shared_dimension(spec) is None else size // home.devices * len(home.own)


def _load(
    source: Source,
    nodes: Sequence[Any],
    goal: Any,
    specs: Any,
    home: Home,
    pool: ThreadPoolExecutor,
    scheme: Scheme | None,
) -> Any:
    """One array or quantised matrix, of one parameter or a stack of them, where it is wanted."""
    if isinstance(nodes[0], Quantized):  # stored so: a field is read like any array
        return jax.tree.map(lambda g, s, *n: _load(source, n, g, s, home, pool, None), goal, specs, *nodes)
    shards = read_shards(source, nodes, goal, specs, home, pool, scheme if _is_quantised(goal) else None)
    return jax.tree.map(lambda spec, *parts: home.put(parts, spec), specs, *shards)


@partial(jax.jit, static_argnames="dtype")
def _dequantise(weight: Quantized, dtype: np.dtype) -> jax.Array:
    return on_each(partial(dequantize, dtype=dtype), specs_of(weight.values), weight)


def check_tensors(source: Source, family: Family, parts: list[Part]) -> None:
    """LoadError names a tensor that is missing, misshapen, of another type or unexpected."""
    for part in parts:
        shape = source.shapes.get(part.name)
        if shape is None:
            raise LoadError(f"{source.where}: tensor {part.name} is missing")
        if tuple(shape) != part.shape:
            raise LoadError(f"{source.where}: tensor {part.name} has shape {list(shape)}, not {list(part.shape)}")
        dtype = source.dtype(part.name)
        if dtype != part.dtype if part.dtype is not None else not jnp.issubdtype(dtype, jnp.floating):
            raise LoadError(
                f"{source.where}: tensor {part.name} is of type {dtype}, not {part.dtype or 'a floating-point type'}"
            )
    for name in sorted(source.shapes.keys() - {part.name for part in parts}):
        if name in family.TIED:
            _check_tied(source, name, family.TIED[name])
        elif not name.endswith(family.BUFFERS):
            raise LoadError(f"{source.where}: tensor {name} is unexpected: the config does not say what it is for")


def _check_tied(source: Source, name: str, other: str) -> None:
    """Tied checkpoints may hold the matrix twice; two different ones mean that the config is wrong."""
    rows, columns = source.shapes[other]
    step = max(1, CHUNK // columns)
    if tuple(source.shapes[name]) != (rows, columns) or not all(
        np.array_equal(source.rows(name, i, min(i + step, rows)), source.rows(other, i, min(i + step, rows)))
        for i in range(0, rows, step)
    ):
        raise LoadError(f"{source.where}: tensor {name} differs from {other}, yet the config ties them together")


class ProgressBar:
    """A bar on stderr for work that takes long, if stderr is a terminal."""

    def __init__(self, what: str, total: int, enabled: bool) -> None:
        self._what, self._total, self._done = what, total, 0
        self._enabled = enabled and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "ProgressBar":
        return self

    def advance(self, elements: int) -> None:
        self._done += elements
        if self._enabled and self._bar is None and time.monotonic() - self._begun > QUIET_SECONDS:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
