"""Hugging Face folders: config.json and one or several safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows bfloat16, which safetensors asks for by name, once this is imported)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.errors import LoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")


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


class SafetensorsSource:
    """The tensors of a folder (a `stream.Source`). LoadError where a file is missing, damaged or of another type."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path, names in _files(folder):
            self._open(path, names)

    def _open(self, path: Path, names: set[str] | None) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                found = set(file.keys())
                for name in names if names is not None else found:
                    if name not in found:
                        raise LoadError(f"{path}: tensor {name} is missing, though the index says it is there")
                    tensor = file.get_slice(name)
                    if tensor.get_dtype() not in DTYPES:
                        raise LoadError(
                            f"{path}: tensor {name} is of type {tensor.get_dtype()}, not one of {', '.join(DTYPES)}"
                        )
                    self.shapes[name] = tuple(tensor.get_shape())
                    self._files[name] = path
        except FileNotFoundError as error:
            raise LoadError(f"{path.parent} has no {path.name}") from error
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} is damaged or cut short: {error}") from error

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor. The file is mapped anew each time, so that pages already read do not stay resident."""
        try:
            with safe_open(self._files[name], framework="numpy") as file:
                return file.get_slice(name)[start:stop]
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self._files[name]}: tensor {name}: {error}") from error


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
