"""`jaxspec batch`: answer a file of requests; what a killed run had finished is not done again."""

import hashlib
import os
import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from jaxspec.commands.journal import Journal
from jaxspec.commands.meter import Meter
from jaxspec.commands.options import ConfigOption, checked, read_settings, with_engine_and_sampling
from jaxspec.commands.prompts import parse_object, parse_source, read_lines
from jaxspec.commands.running import Messages, interruptible, load, sample_fields, submit
from jaxspec.config import DecodeConfig, EngineConfig, SamplingParams
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.host.metrics import Metrics
from jaxspec.host.request import CompletionOutput
from jaxspec.host.scheduler import Counters

if TYPE_CHECKING:
    import jaxspec.llm

# What decides when a text comes, and not which text comes.
PACE = {
    "max_batch",
    "kv_memory",
    "page_size",
    "implementation",
    "tensor_parallel",
    "data_parallel",
    "draft_parallel",
    "distributed",
    "prefill_chunk",
    "prefix_cache",
    "offload_memory",
    "offload_disk",
    "offload_folder",
    "ngram_max",
    "ngram_min",
    "priority",
    "cache_salt",
    "cache_ttl",
}
DRAFTING = {
    "drafter",
    "draft_model",
    "draft_layers",
    "draft_tokens",
    "draft_adaptive",
    "draft_temperature",
    "verify",
    "medusa_heads",
}
"""Pace, too, but where drafts are not verified by the coupled rule: there another draft is another text."""
PICKING = ("none", "ngram", "medusa", "ngram_medusa")
"""Drafters that are verified by the coupled rule unless told otherwise."""


class Job(NamedTuple):
    """One row of the input."""

    index: int
    line: int
    """Its line in the input, from 1."""
    request: str
    """Digest of all that decides the answer."""
    label: dict[str, Any]
    """The row's own `id`, if it has one."""
    source: str | Messages
    params: SamplingParams
    error: str | None


@with_engine_and_sampling
def batch(
    requests: Annotated[str, typer.Argument(metavar="IN.jsonl", help="The requests, one JSON object a line.")],
    results: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="Where the answers go.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, whatever OUT.jsonl holds; otherwise its rows are kept.")
    ] = False,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the run's speed, waiting times and use of memory to a file."),
    ] = None,
    config: ConfigOption = None,
    **options: Any,
) -> int:
    """Answer every request of a file, many at once.

    A row is `{"prompt": TEXT}`, completed as it is, or `{"messages": [{"role": "user", "content": TEXT}]}`, a chat;
    beside it an `id` of yours and any sampling option, such as `"temperature": 0.7`. Flags and `--config` are defaults
    for rows that do not say. A row that cannot be served gets an `error`, and the others go on.

    Rows are written as they finish and put in input order at the end. After Ctrl-C, or a crash, the same command goes
    on where it stopped. Exit code: 0 if every row has an answer, 1 if some have errors.

    Meanwhile stderr tells of requests running and waiting, cache pages in use and kept for later (cached), the share
    of prompt tokens found in the cache (hits), and tokens a round (τ). `--summary` has that of this run and more, in
    seconds: `ttft` from a request's arrival to its first token, `inter_token` between arrivals of new tokens, where
    those that arrive at once count as one.

    Examples:

    - `jaxspec batch requests.jsonl results.jsonl --max-batch 32 --max-tokens 128`

    - `jaxspec batch requests.jsonl results.jsonl --drafter ngram --summary figures.json`
    """
    if Path(requests).resolve() == Path(results).resolve():
        raise ConfigError("IN.jsonl and OUT.jsonl are the same file")
    if summary is not None:
        _check_summary(summary, requests, results)
    settings = read_settings(config, options)
    jobs = [_read_job(index, line, text, settings) for index, (line, text) in enumerate(read_lines(requests))]
    with closing(Journal(Path(results), overwrite)) as journal:
        failed = _answer(jobs, journal, settings.engine, summary)
        journal.finish(len(jobs))
    print(f"{len(jobs)} rows in {results}", file=sys.stderr)
    if failed:
        print(f"{failed} of {len(jobs)} rows have an error; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def _check_summary(path: Path, *others: str) -> None:
    """ConfigError where it cannot be written: better said before a long run than after it."""
    if path.resolve() in [Path(other).resolve() for other in others]:
        raise ConfigError(f"--summary {path} is the file of the requests or the results: name another")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: it is a folder, or not yours to write")


def _read_job(index: int, line: int, text: bytes, settings: DecodeConfig) -> Job:
    label, source, params, error = {}, "", settings.sampling, None
    try:
        fields = parse_object(text)
        label = {"id": fields.pop("id")} if "id" in fields else {}
        source = parse_source(fields)
        own = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
        params = checked(msgspec.to_builtins(settings.sampling, str_keys=True) | own, SamplingParams)
    except JaxspecError as trouble:
        error = f"line {line}: {trouble}"
    return Job(index, line, _digest(label, source, params, settings.engine), label, source, params, error)


def _digest(label: dict[str, Any], source: str | Messages, params: SamplingParams, engine: EngineConfig) -> str:
    """Equal for two rows that ask the same of the same model with the same options."""
    picked = engine.verify == "coupled" or (engine.verify == "auto" and engine.drafter in PICKING)
    pace = PACE | DRAFTING if picked or params.temperature == 0 else PACE
    decisive = [
        {name: value for name, value in msgspec.structs.asdict(struct).items() if name not in pace}
        for struct in (params, engine)
    ]
    content = msgspec.json.encode([label, source, *decisive], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


def _answer(jobs: list[Job], journal: Journal, config: EngineConfig, summary: Path | None) -> int:
    """Answer the jobs that have no row yet, and return how many ended in an error."""
    kept = {job.index for job in jobs if journal.finished.get(job.index) == job.request}
    if kept:
        print(f"{len(kept)} of {len(jobs)} rows are there already", file=sys.stderr)
    if stale := len(journal.finished) - len(kept):
        print(f"{stale} rows of {journal.path} answer other requests or options: they go", file=sys.stderr)
    wrong = [job for job in jobs if job.error is not None]
    todo = deque(job for job in jobs if job.error is None and job.index not in kept)
    failed = len(wrong)
    figures = None if todo else Metrics(Counters()).as_dict
    try:
        with interruptible(lambda: f"{len(journal.finished)} of {len(jobs)} rows are kept; the same command goes on"):
            engine = load(config).engine if todo else None
            # Of several processes only the one that leads is here: the others may have the same file.
            for job in wrong:
                journal.write(job.index, job.request, job.label | {"error": job.error})
            if engine is not None:
                figures = engine.figures
                with Meter(len(jobs), len(jobs) - len(todo), lambda: _details(engine)) as meter:
                    failed += Run(engine, journal, meter).answer(todo, 2 * config.max_batch * config.data_parallel)
    finally:
        if summary is not None and figures is not None:
            summary.write_bytes(msgspec.json.format(msgspec.json.encode(figures())) + b"\n")
    return failed


def _details(engine: "jaxspec.llm.Serving") -> str:
    """What goes on in the engine, in a line."""
    status = engine.status()
    parts = [
        f"{status.running} running",
        f"{status.waiting} waiting",
        f"pages {status.used} used {status.cached} cached of {status.pages}",
        f"hits {status.hit_rate:.0%}",
    ]
    return ", ".join([*parts, f"τ {status.tau:.2f}"] if status.rounds else parts)


class Run:
    """Feeds an engine, and writes each row once all its samples are finished."""

    def __init__(self, engine: "jaxspec.llm.Serving", journal: Journal, meter: Meter) -> None:
        self.engine, self.journal, self.meter = engine, journal, meter
        self.running: dict[str, tuple[Job, list[CompletionOutput]]] = {}
        self.failed = 0

    def answer(self, todo: deque[Job], window: int) -> int:
        """Answer all of `todo` with about `window` samples in the engine; return how many rows ended in an error."""
        while todo or self.running:
            while todo and self.engine.samples < window:
                self._submit(todo.popleft())
            for delta in self.engine.step() if self.running else ():
                self.meter.add(tokens=delta.tokens)
                if delta.finished is not None:
                    self._take(delta.request_id, delta.finished)
        return self.failed

    def _submit(self, job: Job) -> None:
        try:
            submit(self.engine, str(job.index), job.source, job.params)
        except JaxspecError as error:
            self._write(job, {"error": f"line {job.line}: {error}"})
        else:
            self.running[str(job.index)] = (job, [])

    def _take(self, request_id: str, output: CompletionOutput) -> None:
        job, outputs = self.running[request_id]
        outputs.append(output)
        if len(outputs) == job.params.n:
            del self.running[request_id]
            self._write(job, _answer_fields(job, sorted(outputs, key=lambda output: output.index)))

    def _write(self, job: Job, fields: dict[str, Any]) -> None:
        self.journal.write(job.index, job.request, job.label | fields)
        self.failed += "error" in fields
        self.meter.add(rows=1)


def _answer_fields(job: Job, outputs: list[CompletionOutput]) -> dict[str, Any]:
    if trouble := next((output.stop_reason for output in outputs if output.finish_reason == "error"), None):
        return {"error": f"line {job.line}: {trouble}"}
    if len(outputs) > 1:
        return {"outputs": [sample_fields(output) for output in outputs]}
    return sample_fields(outputs[0])
