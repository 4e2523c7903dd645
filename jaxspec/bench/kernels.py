"""Kernels compiled for a TPU that is not there: how many bundles they are for a context, spills, memory, copies.

They are compiled in a child process, for the compiler reads where to write its programs to when it is loaded, and takes
its process with it where an assertion fails.
"""

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxspec.bench.kernel_calls import CONTEXT, DTYPES, KERNELS, PAGE, SEQUENCES, SHAPES, Call, Case, make_call
from jaxspec.errors import ConfigError
from jaxspec.plan.chips import chip_of_topology
from jaxspec.plan.llo import Kernel, dump_arguments, read_kernels, size
from jaxspec.plan.topology import ENVIRONMENT, compile_for, devices_of

Row = dict[str, Any]

_KERNEL = re.compile(r'%(\S+) = .*custom_call_target="tpu_custom_call".*')
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}')
_FATAL = re.compile(r"^F\d{4} .*?\] (.*)$", re.MULTILINE)


def make_cases(
    topology: str, kernels: Sequence[str], shapes: Sequence[str], dtypes: Sequence[str], queries: Sequence[str]
) -> list[Case]:
    """All combinations. ConfigError where there is none, for unknown names, topologies, or without a compiler."""
    options = {"--kernels": (kernels, KERNELS), "--shape": (shapes, SHAPES), "--dtype": (dtypes, DTYPES)}
    for option, (names, known) in options.items():
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ConfigError(f"{option} takes {', '.join(known)}, not {', '.join(unknown) or 'nothing'}")
    for number in queries:
        if number != "prefill" and not (number.isdecimal() and 1 <= int(number) <= 64):
            raise ConfigError(f"--queries takes numbers from 1 to 64 and prefill, not {number!r}")
    if not queries:
        raise ConfigError("--queries needs a number, such as 1,4,8")
    devices_of(topology)
    cases = [
        Case(kernel, shape, dtype, number, topology)
        for shape in shapes
        for dtype in dtypes
        for number in queries
        for kernel in kernels
        if kernel != "commit" or number not in ("1", "prefill")
    ]
    if not cases:
        raise ConfigError("commit moves drafts: --queries needs a number above 1")
    return cases


def measure(cases: Sequence[Case]) -> Iterator[Row]:
    """A row for each case, as it is done; `refused` says why there are no figures."""
    compiler = None
    try:
        for case in cases:
            if compiler is None:
                compiler = _Compiler()
            figures = compiler.figures(case)
            if figures is None:
                figures = {"refused": compiler.last_words()}
                compiler.close()
                compiler = None
            yield _row(case, figures)
    finally:
        if compiler is not None:
            compiler.close()


def _row(case: Case, figures: Row) -> Row:
    chip = chip_of_topology(case.topology)
    own = case.kernel in ("attention", "append", "commit")
    tokens = SEQUENCES * case.width if case.kernel in ("append", "commit") else CONTEXT
    return {
        "name": case.kernel if own else "attention",
        "kernel": "jaxspec" if own else case.kernel,
        "topology": case.topology,
        "shape": case.shape,
        "dtype": case.dtype,
        "queries": case.width,
        "mask": "causal" if case.queries == "prefill" or case.width == 1 else "tree" if own else "chain",
        "context": CONTEXT,
        "page": PAGE,
        "hbm_cycles": round(tokens * case.token_bytes / chip.hbm_bytes_per_cycle),
        "refused": None,
        **dict.fromkeys(("bundles", "per_1024", "spills", "spills_around", "vmem", "dmas", "temp_bytes", "seconds")),
        **figures,
    }


class _Compiler:
    """A process that compiles, and writes programs and its last words to a folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxspec-")
        folder = Path(self._folder.name)
        (folder / "stderr").touch()
        self._pipe, other = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_serve, args=(other, folder), daemon=True)
        before = dict(os.environ)
        arguments = f"{before.get('LIBTPU_INIT_ARGS', '')} {dump_arguments(folder)}"
        os.environ.update(ENVIRONMENT | {"LIBTPU_INIT_ARGS": arguments})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        other.close()

    def figures(self, case: Case) -> Row | None:
        """What `_figures` gives, or None where the process died of it."""
        try:
            self._pipe.send(case)
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def last_words(self) -> str:
        said = _FATAL.findall((Path(self._folder.name) / "stderr").read_text(errors="replace"))
        return f"the compiler died: {said[0] if said else 'it does not say why'}"

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()


def _serve(pipe: Connection, folder: Path) -> None:
    """What the child process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with (folder / "stderr").open("wb") as file:
        os.dup2(file.fileno(), 2)
    while True:
        pipe.send(_figures(pipe.recv(), folder))


def _figures(case: Case, folder: Path) -> Row:
    for file in folder.glob("*.txt"):
        file.unlink()
    try:
        call = make_call(case)
        compiled = compile_for(case.topology, call.fn, *call.arguments, donate=call.donate)
    except Exception as error:  # whatever jax, Mosaic or the compiler refuse it with
        return {"refused": _reason(error)}
    called = _KERNEL.search(compiled.hlo)
    kernel = next((one for one in read_kernels(folder) if called is not None and one.name == called[1]), None)
    if called is None or kernel is None:
        return {"refused": "the compiler wrote no kernel down"}
    return {
        "vmem": sum(map(int, _VMEM.findall(called[0]))),
        "temp_bytes": compiled.memory.temp_size_in_bytes,
        "seconds": round(compiled.seconds, 2),
        **(_streamed(kernel, call) if call.block else _whole(kernel)),
    }


def _streamed(kernel: Kernel, call: Call) -> Row:
    """Of a kernel that goes over keys and values: for a row of queries after CONTEXT tokens."""
    loop = kernel.streaming_loop()
    if loop is None:
        return {"refused": "its program has no loop over keys and values"}
    trips, pages = -(-CONTEXT // call.block), call.block // PAGE
    steady, last, around = kernel.steady(loop), kernel.last(loop, pages), kernel.around(loop)
    return {
        "bundles": call.passes * (trips * size(steady) + size(last) + size(around)),
        "per_1024": call.passes * size(steady) * 1024 / call.block,
        "spills": kernel.spills(steady),
        "spills_around": kernel.spills([kernel.span]) - kernel.spills(steady),
        "dmas": call.passes * trips * kernel.count_copies(steady),
    }


def _whole(kernel: Kernel) -> Row:
    """Of a kernel whose loops depend on what is written: its program as it stands."""
    program = [kernel.span]
    return {
        "bundles": size(program),
        "spills": kernel.spills(program),
        "spills_around": 0,
        "dmas": kernel.count_copies(program),
    }


def _reason(error: Exception) -> str:
    """The first sentence of what it says, and no paths."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z])\. | at /", text)[0][:300]
