"""Jobs of several processes that Gloo joins over loopback: what they say together is what one says alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import jaxspec.engine
from jaxspec import LLM, SamplingParams, multihost, parallel
from jaxspec.errors import ConfigError
from tests.tiny import write_model

DEVICES = 4
OPTIONS = {"drafter": "ngram", "draft_tokens": 2, "kv_memory": 3e-5, "page_size": 16, "max_batch": 2}
"""So little memory that requests have to give way."""
SEA = "the sea is wide and the sky is blue " * 4
ROWS: list[dict[str, Any]] = [
    {"prompt": SEA},
    {"prompt": SEA, "temperature": 0.8, "n": 2},
    {"prompt": SEA + "she sells", "temperature": 1.1, "top_p": 0.9, "top_k": 50},
    {"prompt": "she sells sea shells by the shore she", "repetition_penalty": 1.3, "stop": ["zq"]},
    {"prompt": "a", "max_tokens": -1},
]
SAMPLING = {"max_tokens": 24, "seed": 3, "ignore_eos": True}
ENDLESS = {"prompt": "user assistant", "max_tokens": 70, "n": 200, "priority": 1}
BATCH = """
import sys
import jaxspec.engine
from jaxspec.cli import main
jaxspec.engine.BATCH_BUCKETS = ()  # one program is enough
sys.exit(main(["batch", *sys.argv[1:]]))
"""
COUNT = """
import sys
from functools import partial
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxspec import leading, multihost, parallel

class Worker:  # one that has little to compile
    def __init__(self, mesh):
        one = partial(parallel.on_each, lambda: parallel.total(jnp.int32(1)), PartitionSpec(), mesh=mesh)
        self._program = jax.jit(one)

    def run(self):
        self.finish = int(self._program())

multihost.join(sys.argv[1])
worker = Worker(parallel.mesh_of(jax.device_count()))
if jax.process_index() > 0:
    leading.follow(worker)
    sys.exit(0)
leader = leading.led(worker)
leader.run()
print(leader.finish, flush=True)
while True:
    leader.run()
"""
GONE = "error: process {} of the job is gone: this one ends, too\n"
LEADER_GONE = "error: process 0 of the job, which leads, is gone: this one ends, too\n"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Job(NamedTuple):
    processes: list[subprocess.Popen]

    def kill(self, victim: int) -> list[Ended]:
        """How all end then: soon."""
        killed = time.monotonic()
        self.processes[victim].kill()
        ended = self.ended()
        assert time.monotonic() - killed < 10
        assert ended[victim].code == -signal.SIGKILL
        return ended

    def ended(self) -> list[Ended]:
        return [Ended(p.returncode, *said) for p in self.processes for said in [p.communicate(timeout=150)]]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Start a script in several processes of a job; `arguments` are those of each, which `{}` tells of the job."""
    began: list[subprocess.Popen] = []

    def call(script: str, arguments: list[list[str]], devices: int = DEVICES, slurm: bool = False) -> Job:
        own = {"JAX_NUM_CPU_DEVICES": str(devices // len(arguments)), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        address = f"127.0.0.1:{free_port()}"
        for index, those in enumerate(arguments):
            place = f"{address},{len(arguments)},{index}"
            command = [sys.executable, "-c", script, *(argument.format(place) for argument in those)]
            told = of_slurm(len(arguments), index) if slurm else {}
            began.append(subprocess.Popen(command, env=os.environ | own | told, **pipes))
        return Job(list(began))

    yield call
    for process in began:
        process.kill()
        process.communicate()


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of `jaxspec batch` for rows; answers go to out.jsonl."""

    def call(rows: list[dict], **options: Any) -> list[str]:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"model": model, "tensor_parallel": DEVICES, "distributed": "{}"} | OPTIONS | SAMPLING | options
        named = [(f"--{name.replace('_', '-')}", value) for name, value in given.items()]
        said = [name if value is True else f"{name}={value}" for name, value in named]
        return [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *said]

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def of_slurm(processes: int, index: int) -> dict[str, str]:
    """What Slurm tells a process of a job on one node; the port follows from the number of the job."""
    told = {"JOB_ID": os.getpid(), "NTASKS": processes, "PROCID": index, "LOCALID": index, "STEP_NUM_NODES": 1}
    return {f"SLURM_{name}": f"{value}" for name, value in told.items()} | {"SLURM_STEP_NODELIST": "localhost"}


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    """What one process with as many devices says: the tokens of each sample of each row that can be served."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxspec.engine, "BATCH_BUCKETS", ())
        llm = LLM(str(model), tensor_parallel=DEVICES, **OPTIONS)
    rows = [dict(row) for row in ROWS[:4]]
    prompts = [row.pop("prompt") for row in rows]
    params = [SamplingParams(**SAMPLING | row) for row in rows]
    found = llm.generate(prompts, params, progress=False)
    jax.config.update("jax_disable_most_optimizations", False)
    return [[output.token_ids for output in request.outputs] for request in found]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "out.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def tokens_of(row: dict[str, Any]) -> list[list[int]]:
    return [sample["token_ids"] for sample in row.get("outputs", [row])]


def test_two_processes_say_what_one_says(start, flags, expected, tmp_path: Path):
    """Drafts, drawn tokens, prompts found in the cache and requests that give way; a row with an error."""
    leader, follower = start(BATCH, [flags(ROWS, summary=tmp_path / "sum.json")] * 2).ended()
    assert follower == (0, "", "")
    assert (leader.code, leader.out) == (1, "")
    rows = rows_of(tmp_path)
    assert [tokens_of(row) for row in rows[:4]] == expected
    assert "max_tokens" in rows[4]["error"]
    assert len(rows) == len(ROWS)
    figures = json.loads((tmp_path / "sum.json").read_text())
    assert figures["preemptions"] > 0
    assert figures["hit_tokens"] > 0


@pytest.mark.slow
def test_what_a_job_of_four_had_answered_when_one_was_killed_is_right(start, flags, expected, tmp_path: Path):
    job = start(BATCH, [flags([*ROWS[:4], ENDLESS])] * 4)
    end = time.monotonic() + 150
    while len(rows_of(tmp_path)) < 4:
        assert time.monotonic() < end
        time.sleep(0.1)
    ended = job.kill(2)
    assert ended[0].code == 3
    assert all(one.code != 0 for one in ended)
    assert ended[0].err.endswith(GONE.format(2))
    rows = {row["index"]: tokens_of(row) for row in rows_of(tmp_path)}
    assert [rows[index] for index in range(4)] == expected


def test_all_end_when_one_of_four_is_killed(start):
    job = start(COUNT, [["{}"]] * 4)
    assert job.processes[0].stdout.readline() == "4\n"
    leader, first, killed, third = job.kill(2)
    assert (leader.code, leader.err) == (3, GONE.format(2))
    assert killed.out == killed.err == ""
    for follower in (first, third):
        assert follower.code != 0
        assert LEADER_GONE in follower.err


def test_the_others_end_with_the_process_that_leads(start):
    job = start(COUNT, [["{}"]] * 2)
    assert job.processes[0].stdout.readline() == "4\n"
    follower = job.kill(0)[1]
    assert follower.code != 0  # not always 3: jax may notice first
    assert LEADER_GONE in follower.err


@pytest.mark.parametrize("how", ["{}", "auto"])
def test_an_interrupt_is_a_regular_end(start, how: str):
    """On a terminal all processes get it. With `auto` it is Slurm that tells them of the job."""
    job = start(COUNT, [[how]] * 2, slurm=how == "auto")
    assert job.processes[0].stdout.readline() == "4\n"
    for process in reversed(job.processes):
        process.send_signal(signal.SIGINT)
    leader, follower = job.ended()
    assert (leader.code, leader.err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert follower == (0, "", "")


def test_all_devices_must_be_used(start, flags):
    for ended in start(BATCH, [flags(ROWS, tensor_parallel=2)] * 2).ended():
        assert ended == (2, "", "error: tensor_parallel 2 must be 4: a job takes all devices of its processes\n")


def test_a_process_that_finds_no_model_ends_the_job(start, flags):
    leader, follower = start(BATCH, [flags(ROWS), flags(ROWS, model="./none")]).ended()
    assert follower == (3, "", "error: no such file: ./none\n")
    assert leader == (3, "", GONE.format(1))


@pytest.mark.parametrize(
    "how",
    [
        "",
        "Auto",
        "host",
        "host:80",
        "host:80,2",
        "host:80,2,2",
        "host:0,2,1",
        "host:65536,2,1",
        "host:80,0,0",
        "h:1,2,-1",
    ],
)
def test_what_is_no_job(how: str):
    with pytest.raises(ConfigError, match=f"distributed is auto or HOST:PORT,PROCESSES,INDEX, .* not '{how}'"):
        multihost.join(how)


def test_a_job_that_cannot_begin(monkeypatch):
    multihost.join(None)
    with pytest.raises(ConfigError, match=r"distributed auto: .* before any JAX"):
        multihost.join("auto")  # in a process that has used its devices
    with socket.create_server(("", 0)) as server, pytest.raises(ConfigError, match="cannot listen on port"):
        multihost.join(f"127.0.0.1:{server.getsockname()[1]},2,0")
    monkeypatch.setattr(multihost, "MEET_SECONDS", 0.3)
    with pytest.raises(ConfigError, match=r"no process 0 at 127.0.0.1:\d+: Connection refused"):
        multihost.join(f"127.0.0.1:{free_port()},2,1")


def test_a_job_has_one_replica(model: Path):
    with pytest.raises(ConfigError, match="data_parallel needs one process"):
        LLM(str(model), data_parallel=2, distributed="127.0.0.1:80,2,0")


def test_a_mesh_has_all_devices_of_a_job(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel 16 must be 8"):
        parallel.mesh_of(16)
