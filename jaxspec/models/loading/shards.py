"""Fills arrays from a checkpoint's tensors, a few rows at a time: whole ones, or what some devices have of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.errors import LoadError
from jaxspec.models.families import Parameter
from jaxspec.models.loading.home import Home, home_of
from jaxspec.models.loading.layout import quantised_layout
from jaxspec.models.loading.pieces import Piece, RowMap, features_of, pieces, row_map
from jaxspec.models.quantization import BLOCK, Quantized, Scheme
from jaxspec.models.sharding import shared_dimension

CHUNK = 2**19
"""Elements read at once by each thread."""
SKIPPED = 8
"""Times as many elements may lie between those that are read of some columns: a source may have to go through them."""


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

    def rows(self, name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows `start` to `stop` (first dimension) of a tensor, and of a matrix some columns."""
        ...


Takers = list[tuple[int, Any]]
"""Arrays, or `Quantized` of arrays, that take the same rows: each the n-th part of what columns are read, or all."""


class _Job(NamedTuple):
    """A piece to be read, and whom it goes to: views `[matrices, lines, ..]`."""

    piece: Piece
    columns: slice
    height: int
    """Rows of each of the matrices."""
    takers: Takers


def read_array(source: Source, parameter: Parameter, dtype: np.dtype, pool: ThreadPoolExecutor) -> np.ndarray:
    """One array of the tree, put together by the threads of a pool; in `dtype` unless it has a type of its own."""
    own = parameter.parts[0].dtype
    goal = jax.ShapeDtypeStruct(parameter.shape, dtype if own is None else own)
    return read_shards(source, [parameter], goal, PartitionSpec(), home_of(None), pool)[0]


def read_quantised(source: Source, parameter: Parameter, scheme: Scheme, pool: ThreadPoolExecutor) -> Quantized:
    """One matrix of the tree, quantised by the threads of a pool as they read it; its fields are numpy arrays."""
    goal = quantised_layout(parameter, scheme)
    specs = jax.tree.map(lambda _: PartitionSpec(), goal)
    return read_shards(source, [parameter], goal, specs, home_of(None), pool, scheme)[0]


def read_shards(
    source: Source,
    parameters: Sequence[Parameter],
    goal: Any,
    specs: Any,
    home: Home,
    pool: ThreadPoolExecutor,
    scheme: Scheme | None = None,
) -> list[Any]:
    """What each own device of a home has of an array; one for all of them where they have it alike.

    Args:
        source: where the tensors are.
        parameters: what they are; the layers' of an array `[layers, ..]`.
        goal: shape and type of the whole array; with a scheme, of the fields of a matrix that is quantised as it is
            read. It may have more or fewer features than the parameters, as `row_map` says.
        specs: how it is shared; a tree like `goal`.
        home: whose parts are wanted.
        pool: its threads put them together.
        scheme: makes `Quantized` of rows.
    """
    values, spec = (goal, specs) if scheme is None else (goal.values, specs.values)
    shared, stacked = shared_dimension(spec), len(values.shape) > len(parameters[0].shape)
    own = home.own[:1] if shared is None else home.own
    shards = [jax.tree.map(partial(_zeros, home.devices), goal, specs) for _ in own]
    for layer, parameter in enumerate(parameters):
        layers = [jax.tree.map(lambda array, at=layer: array[at], shard) for shard in shards] if stacked else shards
        shape = values.shape[-len(parameter.shape) :]
        rows = row_map(parameter, shape[: len(features_of(parameter))])
        jobs = (_jobs(parameter, *group, scheme) for group in _groups(parameter, rows, shared, home, layers))
        # One parameter after the other: a source may hold what it reads of.
        for _ in pool.map(partial(_fill, source, parameter, scheme), chain.from_iterable(jobs)):
            pass
    return shards


def _zeros(devices: int, goal: jax.ShapeDtypeStruct, spec: PartitionSpec) -> np.ndarray:
    """A device's part of an array, at a multiple of 64 bytes: XLA's CPU client takes it over as it is, and copies any
    other."""
    shape, shared = list(goal.shape), shared_dimension(spec)
    if shared is not None:
        shape[shared] //= devices
    size = math.prod(shape) * goal.dtype.itemsize
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(goal.dtype).reshape(shape)


def _groups(
    parameter: Parameter, rows: RowMap, shared: int | None, home: Home, shards: list[Any]
) -> list[tuple[RowMap, Takers]]:
    """Rows, and the shards that take all of them: of the columns each has a part, where inputs are what is shared."""
    if shared is None:
        return [(rows, [(0, shards[0])])]
    if shared == -1 and rows.ndim < len(parameter.shape):
        return [(rows, list(zip(home.own, shards, strict=True)))]
    parts = np.split(rows, home.devices, axis=shared + len(parameter.shape))
    return [(parts[at], [(0, shard)]) for at, shard in zip(home.own, shards, strict=True)]


def _jobs(parameter: Parameter, rows: RowMap, takers: Takers, scheme: Scheme | None) -> Iterator[_Job]:
    """All that is to be read of some rows: columns that some shard takes, or all of them where a scale is for a row."""
    inputs = parameter.parts[0].shape[1:]
    first, columns, step, height = 0, slice(None), CHUNK, rows.size
    if scheme is not None:
        array = takers[0][1]
        block = BLOCK if array.scale.ndim == array.values.ndim else 1
        step, height = max(block, CHUNK // inputs[0] // block * block), rows.shape[-1]
    elif inputs:
        first, width = takers[0][0], takers[0][1].shape[-1]
        columns = slice(first * width, (takers[-1][0] + 1) * width)
        step = max(1, CHUNK // max(columns.stop - columns.start, inputs[0] // SKIPPED))

    def lines(array: np.ndarray) -> np.ndarray:
        return array.reshape(rows.size // height, -1, *array.shape[rows.ndim :])

    views = [(nth - first, jax.tree.map(lines, shard)) for nth, shard in takers]
    for piece in pieces(rows, parameter.parts, step, height):
        yield _Job(piece, columns, height, views)


def _fill(source: Source, parameter: Parameter, scheme: Scheme | None, job: _Job) -> None:
    name, start, stop, at = job.piece
    found = source.rows(name, start, stop, job.columns)
    if scheme is not None:
        with np.errstate(all="ignore"):  # what is not finite shows in its scale
            found = scheme.quantize(found.astype(np.float32, copy=False))
        for shared in jax.tree.leaves(found._replace(values=None)):
            _check_finite(source, name, shared)
    elif parameter.parts[0].dtype is not None:
        _check_finite(source, name, found)
    matrix, row = divmod(at, job.height)

    def deal(nth: int, view: np.ndarray, lines: np.ndarray) -> None:
        line = row if view.shape[1] == job.height else row // BLOCK
        target = view[matrix, line : line + len(lines)]
        width = target.shape[-1]
        target[...] = lines[:, nth * width : (nth + 1) * width] if lines.ndim > 1 else lines

    for nth, views in job.takers:
        jax.tree.map(partial(deal, nth), views, found)


def _check_finite(source: Source, name: str, numbers: np.ndarray) -> None:
    if not np.isfinite(numbers).all():
        raise LoadError(f"{source.where}: tensor {name} holds NaN or infinity")
