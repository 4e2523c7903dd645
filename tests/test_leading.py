"""What the leading process does the others do: its calls as they travel, and what an interrupt or a failure leaves."""

import queue
import signal
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxspec import leading
from jaxspec.lifeline import Lifeline
from jaxspec.worker import Worker


class Recorder(Worker):
    """A worker that remembers its calls."""

    finish = "as it is"  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def set(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "done"

    def interrupted(self) -> None:
        signal.raise_signal(signal.SIGINT)
        self.calls.append(())

    def broken(self) -> None:
        raise RuntimeError("no memory")


@pytest.fixture
def wire(monkeypatch) -> queue.Queue:
    """What the leading process sends comes out of a queue elsewhere."""
    sent: queue.Queue = queue.Queue()
    here = threading.current_thread()

    def one_to_all(part: np.ndarray) -> np.ndarray:
        if threading.current_thread() is not here:
            found = sent.get(timeout=10)
            assert found.shape == part.shape
            return found
        sent.put(part)
        return part

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", one_to_all)
    monkeypatch.setattr(leading, "LIFELINE", Lifeline())
    monkeypatch.setattr(leading.atexit, "register", lambda call: call)
    return sent


def test_calls_arrive_as_they_are_made(wire):
    lead, other = Recorder(), Recorder()
    leader = leading._Leader(lead)
    given = [
        (3, "name/0", None, True, 2.5),
        (np.arange(6, dtype=np.int32).reshape(2, 3), np.array([], bool), np.float32(0.1), np.int32(7)),
        (np.arange(100_000, dtype=np.uint32), [np.zeros((2, 0), np.int8), np.array(2**63, np.uint64)]),
        (np.ones(4096 - 70, np.uint8),),
        (jax.numpy.arange(3, dtype=jax.numpy.bfloat16),),
    ]
    for arguments in given:
        assert leader.set(*arguments) == "done"
    assert leader.finish == "as it is"
    leader._end()
    follower = threading.Thread(target=leading.follow, args=(other,))
    follower.start()
    follower.join(timeout=10)
    assert not follower.is_alive()
    assert wire.empty()
    assert len(other.calls) == len(given)
    for theirs, ours in zip(other.calls, given, strict=True):
        for found, wanted in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
            if hasattr(wanted, "dtype"):
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert found.tobytes() == np.asarray(wanted).tobytes()
            else:
                assert (found, type(found)) == (wanted, type(wanted))


def test_an_interrupt_waits_for_the_call(wire):
    leader = leading._Leader(Recorder())
    with pytest.raises(KeyboardInterrupt):
        leader.interrupted()
    assert leader.calls == [()]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sent = wire.qsize()
    leader._end()
    assert wire.qsize() == sent + 1


def test_nothing_is_told_after_a_call_that_failed(wire):
    leader = leading._Leader(Recorder())
    with pytest.raises(RuntimeError, match="no memory"):
        leader.broken()
    sent = wire.qsize()
    leader._end()
    assert wire.qsize() == sent


def test_one_process_leads_nobody():
    worker = Recorder()
    assert leading.led(worker) is worker
