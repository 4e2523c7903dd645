"""Checkpoints of a run: all that it takes to go on as if nothing had happened, written while training goes on."""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from jaxspec.errors import ConfigError, LoadError

KEPT = 2


class Checkpoints:
    """The last KEPT checkpoints in a folder. Each is there as a whole or not at all.

    `about` is what a run must share with the checkpoints that it goes on from: JSON.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder = folder
        self._about = json.loads(json.dumps(about))
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        names = ("state", "data", "about")
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=names)

    @property
    def latest(self) -> int | None:
        """The step of the last one."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: dict[str, Any]) -> None:
        """Begins to write a checkpoint: `state`, arrays that may be donated right after, and `data`, JSON."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data), about=ocp.args.JsonSave(self._about)
        )
        self._manager.save(step, args=items)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The `state` and `data` of a checkpoint; `like` has the shapes, types and shardings of the state's arrays.

        ConfigError where the checkpoint is of another run, LoadError where it cannot be read.
        """
        try:
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise self._damaged(step, error) from error
        if about != self._about:
            raise ConfigError(
                f"{self.folder} holds checkpoints of another run ({_difference(about, self._about)}): name another "
                "output, or throw them away with --restart"
            )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(like), data=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=items)
        except Exception as error:  # as above
            raise self._damaged(step, error) from error
        return found["state"], found["data"]

    def _damaged(self, step: int, error: Exception) -> LoadError:
        what = " ".join(str(error).split())[:300]
        return LoadError(f"checkpoint {self.folder / str(step)} cannot be read ({what}): remove it, or use --restart")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Waits for what is still being written."""
        self._manager.close()


def discard(folder: Path) -> None:
    """Throws away all checkpoints of a folder."""
    shutil.rmtree(folder, ignore_errors=True)


def _difference(old: Any, new: Any, name: str = "") -> str:
    """The first entry in which two JSON objects differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{name} was {json.dumps(old)}, now is {json.dumps(new)}"
    names = [key for key in old | new if old.get(key) != new.get(key)]
    return _difference(old.get(names[0]), new.get(names[0]), names[0])
