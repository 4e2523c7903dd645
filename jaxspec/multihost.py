"""One job of several processes, each with some of the devices: how they find each other, and what they have in common.

All run the same command. The first one leads (`jaxspec.leading`): what is read and written is its own.
"""

import atexit
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from jaxspec import parallel
from jaxspec.errors import ConfigError
from jaxspec.lifeline import Lifeline

AUTO = "auto"
HEARTBEAT_SECONDS = 20
"""After which a process that is not heard of is thought dead, and the job ends."""
MEET_SECONDS = 300.0
"""In which process 0 must have begun."""
BLOCK = 4096
"""Bytes that are sent at once; of a longer message the rest follows."""
LIFELINE = Lifeline()
"""A process is of one job at most."""


def join(how: str | None) -> None:
    """Become one of the processes of a job, before anything else is done with jax.

    `how` is "auto" where Slurm, Kubernetes or a TPU pod tells each process who it is, "HOST:PORT,PROCESSES,INDEX" else:
    HOST:PORT is where process 0 listens. None is no job. ConfigError where it is something else, or fails.
    """
    if how is None:
        return
    address, processes, index = (None, None, None) if how == AUTO else _parse(how)
    host = None if address is None else _meet(address, index == 0)
    try:
        jax.distributed.initialize(
            address,
            processes,
            index,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"distributed {how}: {first_line(error)}") from error
    _connect(host)


def _parse(how: str) -> tuple[str, int, int]:
    found = re.fullmatch(r"(.+:(\d{1,5})),(\d{1,6}),(\d{1,6})", how)
    if found is None or int(found[4]) >= int(found[3]) or not 0 < int(found[2]) < 2**16:
        raise ConfigError(f"distributed is auto or HOST:PORT,PROCESSES,INDEX, such as 10.0.0.1:8476,4,0, not {how!r}")
    return found[1], int(found[3]), int(found[4])


def _meet(address: str, leads: bool) -> str:
    """The host of an address at which process 0 can or does listen: jax itself ends a process without an error that
    could be told where it cannot or does not. ConfigError instead."""
    host, _, port = address.rpartition(":")
    host, until = host.strip("[]"), time.monotonic() + MEET_SECONDS
    while True:
        try:
            made = socket.create_server(("", int(port))) if leads else socket.create_connection((host, int(port)), 5)
        except OSError as error:
            if leads:
                raise ConfigError(f"distributed: cannot listen on port {port}: {error.strerror}") from error
            if time.monotonic() > until:
                raise ConfigError(f"distributed: no process 0 at {address}: {error.strerror or error}") from error
            time.sleep(0.2)
        else:
            made.close()
            return host


def _connect(host: str | None) -> None:
    """Make all connections between the processes; None is for what the leading one is called by its system."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(f"each process must have as many devices: they have {', '.join(map(str, counts.values()))}")
    mesh = parallel.mesh_of(jax.device_count())
    with _silent():
        leads, there = jax.process_index() == 0, b""
        if leads:
            there = msgspec.msgpack.encode([socket.gethostname(), LIFELINE.listen(jax.process_count() - 1)])
        name, port = msgspec.msgpack.decode(broadcast(there))
        if not leads:
            LIFELINE.connect(host or name, port, jax.process_index())
        atexit.register(LIFELINE.fail)
        one = partial(parallel.on_each, lambda: parallel.total(jnp.int32(1)), PartitionSpec(), mesh=mesh)
        jax.block_until_ready(jax.jit(one)())


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing on stdout, which is for answers: Gloo, which joins CPUs, tells there of each of its connections."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def first_line(error: Exception) -> str:
    """Of its message."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def broadcast(message: bytes) -> bytes:
    """The message of the leading process, in all of them."""
    sent = np.frombuffer(len(message).to_bytes(8, "little") + message, np.uint8)
    first = _exchange(sent[:BLOCK], BLOCK)
    size = 8 + int.from_bytes(first[:8].tobytes(), "little")
    if size <= BLOCK:
        return first[8:size].tobytes()
    # Sizes are powers of 2, so that few programs are compiled.
    rest = _exchange(sent[BLOCK:], 1 << (size - BLOCK - 1).bit_length())
    return np.concatenate([first[8:], rest])[: size - 8].tobytes()


def _exchange(part: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, np.uint8)
    padded[: len(part)] = part
    return np.asarray(multihost_utils.broadcast_one_to_all(padded))
