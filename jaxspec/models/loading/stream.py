"""Fills a parameter tree from a checkpoint, a few rows at a time, so that loading needs little more than the result."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxspec.errors import LoadError
from jaxspec.models.families import Family, Parameter, Part

CHUNK = 2**19
"""Elements read at once by each thread."""
QUIET_SECONDS = 1.0
"""Loads shorter than this show no progress bar."""


@runtime_checkable
class Source(Protocol):
    """A checkpoint whose tensors can be read by rows, from several threads at once."""

    @property
    def where(self) -> str:
        """Its file or folder, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by its Hugging Face name."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` (first dimension) of a tensor, in any floating-point type."""
        ...


def read_parameters(
    source: Source, family: Family, tree: dict[str, Any], dtype: np.dtype, progress: bool
) -> dict[str, Any]:
    """The tree with each `Parameter` replaced by its array in `dtype` on the default device.

    Arrays are made largest first: their temporary memory is then smallest when the most is held. LoadError names a
    missing, misshapen or unexpected tensor before anything is read.
    """
    parameters, structure = jax.tree.flatten(tree)
    _check_tensors(source, family, [part for parameter in parameters for part in parameter.parts])
    order = sorted(range(len(parameters)), key=lambda i: -math.prod(parameters[i].shape))
    arrays: list[Any] = [None] * len(parameters)
    bar = _ProgressBar(sum(math.prod(p.shape) for p in parameters), progress)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool, bar:
        for i in order:
            arrays[i] = _read(source, parameters[i], dtype, pool)
            bar.advance(math.prod(parameters[i].shape))
    return jax.tree.unflatten(structure, arrays)


def _check_tensors(source: Source, family: Family, parts: list[Part]) -> None:
    for part in parts:
        shape = source.shapes.get(part.name)
        if shape is None:
            raise LoadError(f"{source.where}: tensor {part.name} is missing")
        if tuple(shape) != part.shape:
            raise LoadError(f"{source.where}: tensor {part.name} has shape {list(shape)}, not {list(part.shape)}")
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


def _read(source: Source, parameter: Parameter, dtype: np.dtype, pool: ThreadPoolExecutor) -> jax.Array:
    array = _aligned_empty(parameter.shape, dtype)

    def fill(piece: tuple[str, int, np.ndarray]) -> None:
        name, start, target = piece
        target[...] = source.rows(name, start, start + len(target))

    for _ in pool.map(fill, _pieces(array, parameter)):
        pass
    return jax.device_put(array, may_alias=True).block_until_ready()


def _pieces(array: np.ndarray, parameter: Parameter) -> Iterator[tuple[str, int, np.ndarray]]:
    """Tensor, first row and a view of `array` that takes the rows from there on, for every few rows of every part."""
    for part in parameter.parts:
        inputs = part.shape[1:]
        step = max(1, CHUNK // math.prod(inputs))
        row = 0
        for block in _contiguous(array[part.index]):
            rows = block.reshape(-1, *inputs)
            for i in range(0, len(rows), step):
                yield part.name, row + i, rows[i : i + step]
            row += len(rows)


def _contiguous(view: np.ndarray) -> Iterator[np.ndarray]:
    """The contiguous blocks of a view, in row-major order: only these can be reshaped to rows without a copy."""
    if view.flags.c_contiguous:
        yield view
    else:
        for part in view:
            yield from _contiguous(part)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array at a multiple of 64 bytes, which XLA's CPU client takes over as it is; it copies any other."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


class _ProgressBar:
    """A bar on stderr for loads that take long, if stderr is a terminal."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total, self._done = total, 0
        self._enabled = enabled and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "_ProgressBar":
        return self

    def advance(self, elements: int) -> None:
        self._done += elements
        if self._enabled and self._bar is None and time.monotonic() - self._begun > QUIET_SECONDS:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("Loading weights", total=self._total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
