"""Processes of a job that notice at once when one of them is gone: without it, the others wait for its numbers.

Each holds a connection to the first one, over which nothing is said unless it fails; the system closes it with its
process. Where no connection can be made, jax's own heartbeat ends the job, later and with many words.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

LOG = logging.getLogger(__name__)
LOST = 3
"""Exit code of a process whose job has lost another, or which leaves others behind."""
CONNECT_SECONDS = 10.0
ALIKE_SECONDS = 2.0
"""Within which processes that meet the same error end together, as each would alone."""
FAILS = b"f"


class Lifeline:
    """Ends this process once another is gone, until it is `cut`."""

    def __init__(self) -> None:
        self._cut = self._leads = False
        self._others = 0
        self._held: list[socket.socket] = []
        self._failing = threading.Semaphore(0)
        """Counts the others that have said so."""

    def listen(self, others: int) -> int:
        """Wait, without blocking, for so many others to connect; returns the port."""
        server = socket.create_server(("", 0), backlog=others)
        self._leads, self._others = True, others

        def accept() -> None:
            for _ in range(others):
                connection, _ = server.accept()
                index = int.from_bytes(_read(connection, 4), "little")
                self._hold(connection, f"process {index} of the job is gone")

        _start(accept)
        return server.getsockname()[1]

    def connect(self, host: str, port: int, index: int) -> None:
        """Hold on to the process that listens there."""
        try:
            connection = socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError as error:
            LOG.warning(
                "no connection to %s:%d (%s): if another process dies, this one notices late", host, port, error
            )
            return
        connection.settimeout(None)
        connection.sendall(index.to_bytes(4, "little"))
        self._others = 1
        self._hold(connection, "process 0 of the job, which leads, is gone")

    def cut(self) -> None:
        """From now on others may end as they like."""
        self._cut = True

    def fail(self) -> None:
        """For the end of a process, after its last word: without the others, unless it is cut or all fail alike.

        Others may wait for its numbers, and at its regular end jax would wait for them.
        """
        if self._cut or not self._others:
            return
        if not self._leads:
            self._tell()
        until = time.monotonic() + ALIKE_SECONDS
        if not all(self._failing.acquire(timeout=max(until - time.monotonic(), 0)) for _ in range(self._others)):
            _leave()
        self.cut()
        if self._leads:
            self._tell()

    def _tell(self) -> None:
        for connection in self._held:
            with suppress(OSError):
                connection.sendall(FAILS)

    def _hold(self, connection: socket.socket, lost: str) -> None:
        self._held.append(connection)

        def watch() -> None:
            with suppress(OSError):
                while _read(connection, 1):
                    self._failing.release()
            if not self._cut:
                sys.stderr.write(f"error: {lost}: this one ends, too\n")
                _leave()  # the main thread may wait for the lost one for ever

        _start(watch)


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(LOST)


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, fewer where the other side is gone."""
    return connection.recv(size, socket.MSG_WAITALL)


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True).start()
