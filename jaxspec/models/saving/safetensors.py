"""Tensors as Hugging Face keeps them: one safetensors file, or several and an index.

The files are laid out before anything is read, after the safetensors specification, and each tensor is then written to
its place: the safetensors package itself would take all tensors of a file at once.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.models.loading.safetensors import DTYPES, INDEX, SINGLE
from jaxspec.models.saving.leaves import Leaf

_CODES = {np.dtype(name): code for code, name in DTYPES.items()}


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(leaves: list[Leaf], folder: Path, limit: float) -> None:
    """Writes the tensors of all leaves under their Hugging Face names, in files of at most `limit` bytes.

    A larger tensor has one to itself. OSError where that fails.
    """
    tensors = [_Tensor(part.name, part.shape, leaf.dtype) for leaf in leaves for part in leaf.parameter.parts]
    places = _lay_out(folder, list(_shards(tensors, limit)))
    for leaf in leaves:
        array = leaf.read()
        for part in leaf.parameter.parts:
            path, start = places[part.name]
            with path.open("r+b") as file:
                file.seek(start)
                file.write(np.ascontiguousarray(array[part.index]).reshape(-1).view(np.uint8).data)


def _shards(tensors: list[_Tensor], limit: float) -> Iterator[list[_Tensor]]:
    """The tensors in order, as many together as the limit allows."""
    shard, size = [], 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _lay_out(folder: Path, shards: list[list[_Tensor]]) -> dict[str, tuple[Path, int]]:
    """Makes the files, and the index of several. Gives the file of each tensor and its place in bytes."""
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    places: dict[str, tuple[Path, int]] = {}
    for name, shard in zip(names, shards, strict=True):
        places |= _make_file(folder / name, shard)
    if count > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        files = {name: path.name for name, (path, _) in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return places


def _make_file(path: Path, tensors: list[_Tensor]) -> dict[str, tuple[Path, int]]:
    """Makes a file of its full length with nothing but a header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants to read it
    starts, end = {}, 0
    # The widest first, so that each lies at a multiple of its own width: readers that map a file need it.
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        starts[tensor.name], end = end, end + tensor.nbytes
        offsets = [starts[tensor.name], end]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(data + end)
    return {name: (path, data + start) for name, start in starts.items()}
