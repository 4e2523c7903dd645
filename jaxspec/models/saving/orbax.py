"""The parameter tree as an orbax checkpoint."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.type_handlers import (
    NumpyHandler,
    ParamInfo,
    SaveArgs,
    create_type_handler_registry,
    get_type_handler,
)

from jaxspec.errors import JaxspecError
from jaxspec.models.quantization import Quantized
from jaxspec.models.saving.leaves import Leaf


class _InTurn(NumpyHandler):
    """Writes leaves as the numpy arrays that they give, one after the other: orbax itself wants all at hand."""

    def __init__(self, stop: Event) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._stop = stop

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[ocp.Future]:
        for leaf, info in zip(values, infos, strict=True):
            if self._stop.is_set():
                raise InterruptedError
            for written in await super().serialize([leaf.read()], [info]):
                written.result()
        return []


def write_orbax(tree: dict[str, Any], folder: Path) -> None:
    """Writes a tree of leaves to a new folder that `OrbaxSource` reads, and orbax itself. OSError where that fails."""
    stop = Event()
    plain = jax.tree.map(_without_names, tree, is_leaf=lambda node: isinstance(node, Quantized))
    # In a thread, where no signal interrupts it: orbax's own threads would go on writing after that.
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(_save, plain, folder, _InTurn(stop))
        try:
            saving.result()
        finally:
            stop.set()


def _save(tree: dict[str, Any], folder: Path, handler: NumpyHandler) -> None:
    # Without a handler of jax arrays orbax warns that there will be none.
    kinds = create_type_handler_registry((Leaf, handler), (jax.Array, get_type_handler(jax.Array)))
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=kinds))
    try:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
    except (JaxspecError, OSError):
        raise
    except Exception as error:  # tensorstore raises a ValueError where the disk is full
        raise OSError(" ".join(str(error).split())) from error


def _without_names(node: Any) -> Any:
    """A quantised matrix as a dict of the fields that it has: orbax would note a missing one."""
    if not isinstance(node, Quantized):
        return node
    return {name: leaf for name, leaf in node._asdict().items() if leaf is not None}
