"""Orbax checkpoints: the parameter tree as orbax keeps one, in a folder beside config.json and the tokenizer files."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.type_handlers import NumpyHandler, ParamInfo, RestoreArgs, create_type_handler_registry

from jaxspec.errors import LoadError
from jaxspec.models.families import Part


@dataclass(frozen=True)
class _Stored:
    """An array of a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class _Later(NumpyHandler):
    """Restores arrays as `_Stored`: orbax itself would read all of them, and at once."""

    _array_metadata_store = None
    """What orbax would keep about jax arrays that it writes; it warns of a handler that does not say."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def typestr(self) -> str:
        return self._kind

    async def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> Any:
        def stored(info: ParamInfo, shape: Sequence[int], dtype: Any) -> _Stored:
            return _Stored(tuple(shape), np.dtype(dtype), lambda: asyncio.run(NumpyHandler().deserialize([info]))[0])

        found = await self.metadata(infos)
        return [stored(info, of.shape, of.dtype) for info, of in zip(infos, found, strict=True)]


class OrbaxSource:
    """The tensors of a checkpoint (a `stream.Source`): parts of its arrays, of which one is held at a time.

    LoadError where an array is missing, misshapen, unexpected or damaged.
    """

    def __init__(self, folder: Path, tree: dict[str, Any]) -> None:
        """`tree` is the family's, with a `Parameter` for each array that the checkpoint must hold."""
        self.where = str(folder)
        parameters, stored = _by_path(tree), _by_path(self._open(folder))
        for path, parameter in parameters.items():
            if path not in stored:
                raise LoadError(f"{folder}: array {path} is missing")
            if stored[path].shape != parameter.shape:
                shape, wanted = list(stored[path].shape), list(parameter.shape)
                raise LoadError(f"{folder}: array {path} has shape {shape}, not {wanted}")
        for path in sorted(stored.keys() - parameters.keys()):
            raise LoadError(f"{folder}: array {path} is unexpected: the config does not say what it is for")
        places = [(part, path) for path, parameter in parameters.items() for part in parameter.parts]
        self.shapes = {part.name: part.shape for part, _ in places}
        self._arrays = {part.name: stored[path] for part, path in places}
        self._siblings: dict[str, tuple[Part, ...]] = {
            part.name: parameter.parts for parameter in parameters.values() for part in parameter.parts
        }
        self._held: dict[str, np.ndarray] = {}
        self._lock = Lock()

    def _open(self, folder: Path) -> Any:
        kinds = (np.ndarray, _Later("np.ndarray")), (jax.Array, _Later("jax.Array"))
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=create_type_handler_registry(*kinds))
        try:
            return ocp.Checkpointer(handler).restore(folder.absolute())
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> LoadError:
        return LoadError(f"{self.where} is no orbax checkpoint, or damaged: {' '.join(str(error).split())}")

    def dtype(self, name: str) -> np.dtype:
        """Type of a tensor."""
        return self._arrays[name].dtype

    def rows(self, name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows of a tensor."""
        with self._lock:
            if name not in self._held:
                self._held = {}
                self._held = self._parts(name)
            return self._held[name][start:stop][..., columns]

    def _parts(self, name: str) -> dict[str, np.ndarray]:
        try:
            array = self._arrays[name].read()
        except Exception as error:  # as above
            raise self._damaged(error) from error
        return {part.name: array[part.index].reshape(part.shape) for part in self._siblings[name]}


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves}
