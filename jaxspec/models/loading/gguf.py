"""GGUF files: one file with settings, tokenizer and quantised tensors.

The header is parsed here, after the GGUF specification of the ggml project, because the gguf package's reader makes
several numpy views for every string of the vocabulary: seconds for what must take a tenth of one at start-up. That
package does know the quantised types and the tensor names, and serves for these.
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import gguf.quants
import jax
import numpy as np

from jaxspec.errors import LoadError
from jaxspec.models.families import Family, Parameter
from jaxspec.models.spec import ModelSpec

MAGIC = 0x46554747
"""The letters GGUF, little endian."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
ROPE_FACTORS = "rope_freqs.weight"


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    """Row-major, as in Hugging Face checkpoints (GGUF itself lists the innermost dimension first)."""
    kind: gguf.GGMLQuantizationType
    offset: int
    """In bytes from the start of the file."""

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile(NamedTuple):
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> GGUFFile:
    """Metadata and tensor table of a file.

    LoadError where it is no complete little-endian GGUF of version 2 or 3, or holds a type that cannot be dequantised.
    """
    try:
        with path.open("rb") as opened:
            size = path.stat().st_size
            if size < 24:
                raise LoadError(f"{path} is not a GGUF file: it has {size} bytes")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                file = GGUFFile(path, *_Header(data, path).read())
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from error
    except (struct.error, ValueError) as error:  # reads past the end, text that is not UTF-8
        raise LoadError(f"{path} is damaged or cut short: its header cannot be read ({error})") from error
    _check_kinds(file)
    return file


class _Header:
    """A cursor over the bytes of a file. Raises struct.error past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        magic, version = self._unpack("I"), self._unpack("I")
        if magic != MAGIC:
            raise LoadError(f"{self._path} is not a GGUF file: it does not begin with the letters GGUF")
        if version not in (2, 3):
            what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise LoadError(f"{self._path}: {what} is not supported (only little-endian GGUF 2 and 3)")
        tensor_count, entry_count = self._unpack("Q"), self._unpack("Q")
        metadata = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._unpack("I"))
        table = [(self._string(), *self._tensor()) for _ in range(tensor_count)]
        if len({name for name, *_ in table}) != tensor_count:
            raise ValueError("two tensors of one name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment}")
        start = -(-self._at // alignment) * alignment
        return metadata, {name: self._checked(name, shape, kind, start + at) for name, shape, kind, at in table}

    def _unpack(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._data):
            raise struct.error(f"{length} letters at byte {start}")
        return self._data[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._unpack("I"), self._unpack("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._unpack(_SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"an array of unknown type {kind}")
        code = _SCALARS[kind]
        if length * struct.calcsize(code) > len(self._data) - self._at:
            raise struct.error(f"{length} values at byte {self._at}")
        values = struct.unpack_from(f"<{length}{code}", self._data, self._at)
        self._at += length * struct.calcsize(code)
        return list(values)

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        dimensions = self._unpack("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(dimensions))[::-1]
        return shape, self._unpack("I"), self._unpack("Q")

    def _checked(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
        try:
            tensor = Tensor(shape, gguf.GGMLQuantizationType(kind), offset)
        except ValueError as error:
            raise LoadError(f"{self._path}: tensor {name} is of unknown type {kind}") from error
        if shape[-1] % gguf.GGML_QUANT_SIZES[tensor.kind][0]:
            raise ValueError(f"rows of tensor {name} are no whole number of {tensor.kind.name} blocks")
        if tensor.end > len(self._data):
            raise LoadError(
                f"{self._path} is cut short: tensor {name} ends at byte {tensor.end} of {len(self._data)}: "
                "delete the file and fetch it again"
            )
        return tensor


def architecture(file: GGUFFile) -> str:
    """Its `general.architecture`. LoadError where it has none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise LoadError(f"{file.path}: general.architecture is missing: not a language model")
    return name


def hugging_face_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata under the names of a config.json. LoadError names what is not supported."""
    prefix = architecture(file)

    def get(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{prefix}.{name}", default)

    if get("expert_count", 0):
        raise LoadError(f"mixture-of-experts models are not supported ({get('expert_count')} experts)")
    rotated = get("rope.dimension_count")
    head_dim = get("attention.key_length", rotated)
    config = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(get),
        "partial_rotary_factor": None if rotated in (None, head_dim) else f"{rotated} of {head_dim}",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    return {key: value for key, value in config.items() if value is not None}


def _rope_scaling(get: Callable[..., Any]) -> dict[str, Any] | None:
    """As llama.cpp reads it: linear where no type is given, by the factor under its present or its first name."""
    kind = get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 0.0))
    return None if kind == "none" or not factor else {"rope_type": kind, "factor": factor}


def rope_factors(file: GGUFFile) -> list[float] | None:
    """What each RoPE frequency is to be divided by, where the file says so."""
    tensor = file.tensors.get(ROPE_FACTORS)
    return None if tensor is None else _values(file, ROPE_FACTORS, tensor, 0, 1).ravel().tolist()


class GGUFSource:
    """The tensors of a file (a `stream.Source`), dequantised to float32, under their Hugging Face names."""

    def __init__(self, file: GGUFFile, family: Family, spec: ModelSpec) -> None:
        self.where = str(file.path)
        self._file, self._interleaved, self._head_dim = file, family.GGUF_INTERLEAVED, spec.head_dim
        names = _hugging_face_names(file, family, spec)
        self._names = {names.get(name, name): name for name in file.tensors if name != ROPE_FACTORS}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._names.items()}

    def dtype(self, name: str) -> np.dtype:
        """Of whatever type a tensor is, its rows come as float32."""
        return np.dtype(np.float32)

    def rows(self, name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows of a tensor, in Hugging Face order, of which all columns are read."""
        return self._rows(name, start, stop)[..., columns]

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        stored = self._names[name]
        tensor = self._file.tensors[stored]
        if not name.endswith(self._interleaved):
            return _rows(self._file, stored, tensor, start, stop)
        # Row half·(D/2) + i of a head in Hugging Face order is row 2·i + half of that head here.
        head, row = np.divmod(np.arange(start, stop), self._head_dim)
        half, i = np.divmod(row, self._head_dim // 2)
        order = head * self._head_dim + 2 * i + half
        first = int(order.min())
        return _rows(self._file, stored, tensor, first, int(order.max()) + 1)[order - first]


def _hugging_face_names(file: GGUFFile, family: Family, spec: ModelSpec) -> dict[str, str]:
    """Hugging Face name of each tensor that the family knows."""
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[family.GGUF_ARCHITECTURE]
    table = gguf.get_tensor_name_map(known, spec.num_layers)
    parameters: list[Parameter] = jax.tree.leaves(family.parameters(spec))
    wanted = [part.name for parameter in parameters for part in parameter.parts]
    return {table.get_name(name, try_suffixes=(".weight", ".bias")) or name: name for name in wanted}


def _check_kinds(file: GGUFFile) -> None:
    for kind, name in {tensor.kind: name for name, tensor in file.tensors.items()}.items():
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise LoadError(
                f"{file.path}: tensor {name} is of type {kind.name}, which cannot be dequantised"
            ) from error


def _rows(file: GGUFFile, name: str, tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor as stored; of a vector, its elements."""
    if len(tensor.shape) == 1:
        return _values(file, name, tensor, 0, 1)[0, start:stop]
    return _values(file, name, tensor, start, stop)


def _values(file: GGUFFile, name: str, tensor: Tensor, start: int, stop: int) -> np.ndarray:
    count = (stop - start) * tensor.row_bytes
    try:
        data = np.fromfile(file.path, np.uint8, count, offset=tensor.offset + start * tensor.row_bytes)
    except OSError as error:
        raise LoadError(f"{file.path}: tensor {name}: {error}") from error
    if len(data) != count:
        raise LoadError(f"{file.path} is cut short: tensor {name} cannot be read")
    # As one long row: gguf.quants makes a separate round of small numpy calls for every 16 rows.
    return gguf.quants.dequantize(data.reshape(1, -1), tensor.kind).reshape(stop - start, -1)
