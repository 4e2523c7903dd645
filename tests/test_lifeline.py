"""Processes that end when one of them does, without jax: what they run is a few lines each."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.lifeline import Lifeline

LEAD = """
import sys, time
from jaxspec.lifeline import Lifeline
line = Lifeline()
print(line.listen(2), flush=True)
"""
FOLLOW = """
import sys, time
from jaxspec.lifeline import Lifeline
line, index = Lifeline(), int(sys.argv[2])
line.connect("127.0.0.1", int(sys.argv[1]), index)
print("held", flush=True)
"""
WAIT = "time.sleep(60)\n"
FAIL = "print('error: my own', file=sys.stderr)\nline.fail()\nsys.exit(2)\n"
GOES = "line.cut()\nprint('goes', flush=True)\nsys.stdin.read()\n"
GONE = "error: process 1 of the job is gone: this one ends, too\n"
LEADER_GONE = "error: process 0 of the job, which leads, is gone: this one ends, too\n"


@pytest.fixture
def job():
    """Starts a leader and two others that go on as told, all connected; they are gone in the end."""
    began: list[subprocess.Popen] = []

    def start(script: str, *arguments: str) -> subprocess.Popen:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        began.append(subprocess.Popen([sys.executable, "-c", script, *arguments], text=True, **pipes))
        return began[-1]

    def call(leader: str, first: str, second: str) -> list[subprocess.Popen]:
        leads = start(LEAD + leader)
        port = leads.stdout.readline().strip()
        others = [start(FOLLOW + then, port, str(i)) for i, then in enumerate((first, second), 1)]
        for other in others:
            assert other.stdout.readline() == "held\n"
        return [leads, *others]

    yield call
    for process in began:
        process.kill()
        process.communicate()


def ends(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Exit code and stderr of each."""
    return [(process.wait(timeout=20), process.stderr.read()) for process in processes]


@pytest.mark.parametrize("victim", [0, 1])
def test_all_end_at_once_when_one_is_killed(job: Callable, victim: int):
    processes = job(WAIT, WAIT, WAIT)
    time.sleep(0.1)  # for the connections to be taken
    killed = time.monotonic()
    processes[victim].kill()
    found = ends(processes)
    assert time.monotonic() - killed < 5
    assert found.pop(victim)[0] == -signal.SIGKILL
    assert (3, LEADER_GONE if victim == 0 else GONE) in found
    assert all(code == 3 and "is gone: this one ends, too" in said for code, said in found)


def test_once_it_is_cut_others_may_go(job: Callable):
    processes = job(GOES, GOES, GOES)
    for process in processes:
        process.stdout.readline()
    for process in (processes[1], processes[0], processes[2]):
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_those_that_fail_alike_each_have_an_end_of_their_own(job: Callable):
    late = "time.sleep(0.5)\n" + FAIL
    assert ends(job(FAIL, late, FAIL)) == [(2, "error: my own\n")] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_alone_does_not_wait_for_the_others(job: Callable, failing: int):
    then = [WAIT] * 3
    then[failing] = FAIL
    found = ends(job(*then))
    assert found.pop(failing) == (3, "error: my own\n")
    assert all(code == 3 and "is gone: this one ends, too" in said for code, said in found)


def test_without_a_connection_it_says_so_and_does_nothing(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    line = Lifeline()
    line.connect("127.0.0.1", port, 1)
    assert f"no connection to 127.0.0.1:{port}" in caplog.text
    line.fail()  # and this one goes on
