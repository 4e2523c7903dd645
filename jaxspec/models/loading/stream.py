"""Fills a parameter tree from a checkpoint, a few rows at a time, so that loading needs little more than the result."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import LoadError
from jaxspec.models.families import Family, Parameter, Part
from jaxspec.models.quantization import BLOCK, Quantized, Scheme, dequantize, is_matrix

CHUNK = 2**19
"""Elements read at once by each thread."""
QUIET_SECONDS = 1.0
"""Work shorter than this shows no progress bar."""


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

    def dtype(self, name: str) -> np.dtype:
        """The type that `rows` of a tensor are of."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` (first dimension) of a tensor."""
        ...


def read_parameters(
    source: Source,
    family: Family,
    tree: dict[str, Any],
    dtype: np.dtype,
    progress: bool,
    scheme: Scheme | None = None,
    packed: bool = True,
) -> dict[str, Any]:
    """The tree with each `Parameter` replaced by its array on the default device, in its own type or else in `dtype`.

    With a `scheme`, matrices are quantised as they are read, a few rows at a time. What is `Quantized` then, or in the
    tree already, is dequantised to `dtype` again, one matrix at a time, unless it is to stay `packed`.
    Arrays are made largest first: their temporary memory is then smallest when the most is held. LoadError names a
    missing, misshapen or unexpected tensor before anything is read, and later one whose numbers cannot be used.
    """
    found, structure = jax.tree.flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Quantized))
    leaves = [jax.tree.leaves(node) for _, node in found]
    check_tensors(source, family, [part for parameters in leaves for p in parameters for part in p.parts])
    sizes = [sum(math.prod(parameter.shape) for parameter in parameters) for parameters in leaves]
    arrays: list[Any] = [None] * len(found)
    bar = ProgressBar("Loading weights", sum(sizes), progress)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool, bar:
        for i in sorted(range(len(found)), key=lambda i: -sizes[i]):
            path, node = found[i]
            if scheme is not None and is_matrix(path, node):
                weight = read_quantised(source, node, scheme, pool)
            else:
                weight = jax.tree.map(lambda parameter: read_array(source, parameter, dtype, pool), node)
            arrays[i] = jax.tree.map(_on_device, weight)
            if isinstance(weight, Quantized) and not packed:
                arrays[i] = _dequantise(arrays[i], dtype).block_until_ready()
            bar.advance(sizes[i])
    return jax.tree.unflatten(structure, arrays)


def _on_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array, may_alias=True).block_until_ready()


_dequantise = jax.jit(dequantize, static_argnames="dtype")


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


def read_array(source: Source, parameter: Parameter, dtype: np.dtype, pool: ThreadPoolExecutor) -> np.ndarray:
    """One array of the tree, put together by the threads of a pool; in `dtype` unless it has a type of its own."""
    own = parameter.parts[0].dtype
    array = _aligned_empty(parameter.shape, dtype if own is None else own)

    def fill(piece: tuple[str, int, np.ndarray]) -> None:
        name, start, target = piece
        target[...] = source.rows(name, start, start + len(target))
        if own is not None:
            _check_finite(source, name, target)

    for _ in pool.map(fill, _pieces(array, parameter)):
        pass
    return array


def _check_finite(source: Source, name: str, numbers: np.ndarray) -> None:
    if not np.isfinite(numbers).all():
        raise LoadError(f"{source.where}: tensor {name} holds NaN or infinity")


def read_quantised(source: Source, parameter: Parameter, scheme: Scheme, pool: ThreadPoolExecutor) -> Quantized:
    """One matrix of the tree, quantised by the threads of a pool as they read it; its fields are numpy arrays."""
    inputs, name = parameter.shape[-1], parameter.parts[0].name
    if inputs % scheme.group:
        raise LoadError(
            f"{source.where}: tensor {name} has {inputs} inputs, not a multiple of the {scheme.group} that share "
            "a scale: choose weights with one for a whole row, such as int8"
        )
    weight = jax.tree.map(lambda field: _aligned_empty(field.shape, field.dtype), scheme.layout(parameter.shape))

    def fill(piece: tuple[str, int, int, Quantized]) -> None:
        name, start, stop, target = piece
        rows = source.rows(name, start, stop).astype(np.float32, copy=False)
        with np.errstate(all="ignore"):  # what is not finite shows in its scale
            found = scheme.quantize(rows)
        for shared in jax.tree.leaves(found._replace(values=None)):
            _check_finite(source, name, shared)
        jax.tree.map(np.copyto, target, found)

    for _ in pool.map(fill, _matrix_pieces(weight, parameter)):
        pass
    return weight


def _matrix_pieces(weight: Quantized, parameter: Parameter) -> Iterator[tuple[str, int, int, Quantized]]:
    """Tensor, first row, end, and views of the weight's fields for these rows. No piece ends within a block of rows."""
    height, inputs = parameter.shape[-2:]
    step = max(BLOCK, CHUNK // inputs // BLOCK * BLOCK)

    def lines(part: Part, matrix: tuple[int, ...], start: int, stop: int, field: np.ndarray) -> np.ndarray:
        view = field[part.index][matrix]  # with a line for each row, or for each block of rows
        return view[start * len(view) // height : stop * len(view) // height]

    for part in parameter.parts:
        lead = weight.values[part.index].shape[:-2]
        for number, matrix in enumerate(np.ndindex(lead)):
            for start in range(0, height, step):
                stop = min(start + step, height)
                target = jax.tree.map(partial(lines, part, matrix, start, stop), weight)
                yield part.name, number * height + start, number * height + stop, target


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
