"""`jaxspec batch`: answer a file of requests; what a killed run had finished is not done again."""

import hashlib
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
from jaxspec.host.request import CompletionOutput

if TYPE_CHECKING:
    import jaxspec.engine

# What decides how fast a text comes, and not which text comes: verification gives plain decoding's text.
PACE = {
    "max_batch",
    "kv_memory",
    "page_size",
    "drafter",
    "draft_tokens",
    "draft_adaptive",
    "draft_model",
    "draft_layers",
    "ngram_max",
    "ngram_min",
}


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
    config: ConfigOption = None,
    **options: Any,
) -> int:
    """Answer every request of a file, many at once.

    A row is `{"prompt": TEXT}`, completed as it is, or `{"messages": [{"role": "user", "content": TEXT}]}`, a chat;
    beside it an `id` of yours and any sampling option, such as `"temperature": 0.7`. Flags and `--config` are defaults
    for rows that do not say. A row that cannot be served gets an `error`, and the others go on.

    Rows are written as they finish and put in input order at the end. After Ctrl-C, or a crash, the same command goes
    on where it stopped. Exit code: 0 if every row has an answer, 1 if some have errors.

    Example: `jaxspec batch requests.jsonl results.jsonl --max-batch 32 --max-tokens 128`
    """
    if Path(requests).resolve() == Path(results).resolve():
        raise ConfigError("IN.jsonl and OUT.jsonl are the same file")
    settings = read_settings(config, options)
    jobs = [_read_job(index, line, text, settings) for index, (line, text) in enumerate(read_lines(requests))]
    with closing(Journal(Path(results), overwrite)) as journal:
        failed = _answer(jobs, journal, settings.engine)
        journal.finish(len(jobs))
    print(f"{len(jobs)} rows in {results}", file=sys.stderr)
    if failed:
        print(f"{failed} of {len(jobs)} rows have an error; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


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
    decisive = {name: value for name, value in msgspec.structs.asdict(engine).items() if name not in PACE}
    content = msgspec.json.encode([label, source, params, decisive], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


def _answer(jobs: list[Job], journal: Journal, config: EngineConfig) -> int:
    """Answer the jobs that have no row yet, and return how many ended in an error."""
    kept = {job.index for job in jobs if journal.finished.get(job.index) == job.request}
    if kept:
        print(f"{len(kept)} of {len(jobs)} rows are there already", file=sys.stderr)
    if stale := len(journal.finished) - len(kept):
        print(f"{stale} rows of {journal.path} answer other requests or options: they go", file=sys.stderr)
    failed = 0
    todo: deque[Job] = deque()
    for job in jobs:
        if job.error is not None:
            journal.write(job.index, job.request, job.label | {"error": job.error})
            failed += 1
        elif job.index not in kept:
            todo.append(job)
    if todo:
        with (
            interruptible(lambda: f"{len(journal.finished)} of {len(jobs)} rows are kept; the same command goes on"),
            Meter(len(jobs), len(jobs) - len(todo)) as meter,
        ):
            failed += Run(load(config).engine, journal, meter).answer(todo, 2 * config.max_batch)
    return failed


class Run:
    """Feeds an engine, and writes each row once all its samples are finished."""

    def __init__(self, engine: "jaxspec.engine.Engine", journal: Journal, meter: Meter) -> None:
        self.engine, self.journal, self.meter = engine, journal, meter
        self.running: dict[str, tuple[Job, list[CompletionOutput]]] = {}
        self.samples = 0
        """Samples in the engine, waiting ones included."""
        self.failed = 0

    def answer(self, todo: deque[Job], window: int) -> int:
        """Answer all of `todo` with about `window` samples in the engine; return how many rows ended in an error."""
        while todo or self.running:
            while todo and self.samples < window:
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
            self.samples += job.params.n

    def _take(self, request_id: str, output: CompletionOutput) -> None:
        job, outputs = self.running[request_id]
        outputs.append(output)
        self.samples -= 1
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
