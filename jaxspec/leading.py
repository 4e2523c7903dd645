"""The process that leads a job, and those that follow: what it tells its own devices it tells them, too."""

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
import msgspec
import numpy as np

from jaxspec.errors import JaxspecError
from jaxspec.multihost import LIFELINE, broadcast, first_line
from jaxspec.worker import Worker

LIFELINE_SECONDS = 2.0
"""In which the lifeline tells who is gone, where numbers of another process do not come."""
END = "end"


def led(worker: Worker) -> Worker:
    """The worker as an engine is to use it: where this process leads others, they get every call, too."""
    if jax.process_count() == 1 or jax.process_index() > 0:
        return worker
    return cast(Worker, _Leader(worker))


def follow(worker: Worker) -> None:
    """Do what the leading process says, until it ends. JaxspecError where it ends without saying so."""
    if _in_main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a Ctrl-C for all the leading process makes a regular end
    while True:
        with _noticing():
            name, arguments = _decode(broadcast(b""))
            if name == END:
                LIFELINE.cut()
                return
            getattr(worker, name)(*arguments)


class _Leader:
    """A worker whose calls the other processes hear, before they are done here."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._whole = worker, True
        atexit.register(self._end)

    def __getattr__(self, name: str) -> Any:
        with _noticing():
            found = getattr(self._worker, name)
        return self._told(name, found) if callable(found) else found

    def _told(self, name: str, call: Callable) -> Callable:
        def tell(*arguments: Any) -> Any:
            with _uninterrupted(), _noticing():
                whole, self._whole = self._whole, False
                broadcast(_encode(name, arguments))
                result = call(*arguments)
                self._whole = whole
            return result

        return tell

    def _end(self) -> None:
        """Nothing can be told any more after an error in between."""
        if self._whole:
            with _uninterrupted(), _noticing():
                broadcast(_encode(END, ()))
                LIFELINE.cut()


@contextmanager
def _noticing() -> Iterator[None]:
    """JaxspecError for numbers of others that do not come, where the lifeline does not end the process before."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        time.sleep(LIFELINE_SECONDS)
        raise JaxspecError(f"process {jax.process_index()} of the job: {first_line(error)}") from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and the like wait: this process would lack a step that the others take."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    for which in before:
        signal.signal(which, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
    for number in came:
        signal.raise_signal(number)


def _in_main_thread() -> bool:
    """Where Python lets signals be handled."""
    return threading.current_thread() is threading.main_thread()


def _encode(name: str, arguments: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode([name, arguments], enc_hook=_plain)


def _plain(array: Any) -> Any:
    array = np.asarray(array)
    return {"dtype": array.dtype.name, "shape": array.shape, "data": array.tobytes()}


def _decode(message: bytes) -> tuple[str, list[Any]]:
    name, arguments = msgspec.msgpack.decode(message)
    return name, [_arrays(argument) for argument in arguments]


def _arrays(told: Any) -> Any:
    if isinstance(told, list):
        return [_arrays(one) for one in told]
    if isinstance(told, dict):
        return np.frombuffer(told["data"], told["dtype"]).reshape(told["shape"])
    return told
