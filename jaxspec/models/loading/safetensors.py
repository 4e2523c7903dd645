"""Hugging Face folders: config.json and one or several safetensors files."""

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 and float8 by name once this is imported)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.errors import LoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "U8": "uint8",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. LoadError where the file is missing or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LoadError(f"{path.parent} has no {path.name}: not a Hugging Face model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} holds no JSON object")
    return content


class _Tensor(NamedTuple):
    path: Path
    dtype: np.dtype
    offset: int
    """In bytes from the start of the file."""


class SafetensorsSource:
    """The tensors of a folder (a `stream.Source`). LoadError where a file is missing, damaged or of another type."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, _Tensor] = {}
        for path, names in _files(folder):
            self._open(path, names)

    def _open(self, path: Path, names: set[str] | None) -> None:
        header, data = _read_header(path)
        for name in names if names is not None else header:
            if name not in header:
                raise LoadError(f"{path}: tensor {name} is missing, though the index says it is there")
            kind = header[name]["dtype"]
            if kind not in DTYPES:
                raise LoadError(f"{path}: tensor {name} is of type {kind}, not one of {', '.join(DTYPES)}")
            self.shapes[name] = tuple(header[name]["shape"])
            self._tensors[name] = _Tensor(path, np.dtype(DTYPES[kind]), data + header[name]["data_offsets"][0])

    def dtype(self, name: str) -> np.dtype:
        """Type of a tensor."""
        return self._tensors[name].dtype

    def rows(self, name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows of a tensor; of a matrix, only the columns that are wanted are read."""
        path, dtype, offset = self._tensors[name]
        inputs = math.prod(self.shapes[name][1:])
        first, end, _ = columns.indices(inputs)
        size, row = (end - first) * dtype.itemsize, inputs * dtype.itemsize
        try:
            if size == row:
                # safetensors' own slices are memory mapped, which keeps what was read resident, and know no float8.
                data = np.fromfile(path, np.uint8, (stop - start) * row, offset=offset + start * row)
            else:
                data = _read_columns(path, offset + start * row, (stop - start, row), first * dtype.itemsize, size)
        except OSError as error:
            raise LoadError(f"{path}: tensor {name}: {error}") from error
        if data.size != (stop - start) * size:
            raise LoadError(f"{path} is cut short: tensor {name} cannot be read")
        found = data.view(dtype)
        return found if len(self.shapes[name]) == 1 else found.reshape(stop - start, -1)


def _read_columns(path: Path, offset: int, shape: tuple[int, int], first: int, size: int) -> np.ndarray:
    """Of rows of bytes, `size` each from byte `first` on, through a memory map that is gone again on return.

    The kernel is told of all of them first: it would else wait for each, and read ahead what lies between.
    """
    begin = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < offset + math.prod(shape):
            return np.empty(0, np.uint8)
        mapped = mmap.mmap(file.fileno(), begin + math.prod(shape), access=mmap.ACCESS_READ, offset=offset - begin)
    if hasattr(mapped, "madvise"):
        for at in range(begin + first, len(mapped), shape[1]):
            page = at // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page, at + size - page)
    rows = np.frombuffer(mapped, np.uint8, offset=begin).reshape(shape)
    return rows[:, first : first + size].copy()


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of each of its tensors, and where their bytes begin."""
    try:
        with safe_open(path, framework="numpy"):  # checks the header, and that the file holds all that it speaks of
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise LoadError(f"{path.parent} has no {path.name}") from error
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is damaged or cut short: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """The files to open and the tensors expected in each (None: whatever there is)."""
    if (folder / SINGLE).is_file():
        return [(folder / SINGLE, None)]
    if not (folder / INDEX).is_file():
        raise LoadError(f"{folder} has neither {SINGLE} nor {INDEX} (other weight formats are not supported)")
    weight_map: Mapping[str, Any] = read_json(folder / INDEX).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise LoadError(f"{folder / INDEX}: weight_map is not a table of file names")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(file, set()).add(name)
    return [(folder / file, names) for file, names in sorted(shards.items())]
