"""`jaxspec bench`: measure."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxspec.bench.questions import Question, choose, read_questions
from jaxspec.commands.meter import Meter
from jaxspec.commands.options import ENGINE, ConfigOption, read_settings, with_engine_and_sampling
from jaxspec.commands.running import interruptible
from jaxspec.config import PREFILL_ROW, DecodeConfig, EngineConfig
from jaxspec.errors import ConfigError

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True, rich_markup_mode="markdown")


DEFAULTS = EngineConfig()
Prompts = Annotated[
    str, typer.Option(metavar="NAME|FILE.jsonl", help="Questions: configs/prompts/NAME.jsonl or a Spec-Bench file.")
]
Model = Annotated[str, typer.Option(metavar="TEXT", help=ENGINE["model"].help)]
KvMemory = Annotated[float, typer.Option(metavar="X", help=ENGINE["kv_memory"].help)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the rows of the table, and more, to a file.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the table; needs pip install 'jaxspec[plots]'.")
]
SCENARIO_NAMES = ("memory", "prefix", "chunks", "throughput", "formats")


@app.callback()
def _root() -> None: ...


@app.command()
@with_engine_and_sampling
def decode(
    prompts: Prompts = "default",
    drafter: Annotated[
        str, typer.Option(metavar="NAMES", help="Drafters to compare; the others are measured against the first.")
    ] = "none,ngram",
    categories: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these categories. Example: --categories rag,qa")
    ] = None,
    limit_per_category: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N questions of each category.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Measured answers to each question.")] = 5,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of an answer at most. Default: 128.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="Questions of a category answered at once. Default: 1.")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    config: ConfigOption = None,
    **options: Any,
) -> int:
    """Compare the decoding speed of drafters on the same questions.

    Every question is asked `--repeats` times of every drafter, in turns; only decode time counts, from the first round
    to the last token. τ is tokens a round. Predicted is τ over the measured costs of drafting and verifying; in
    Leviathan's formula verification costs a plain step. Ctrl-C prints what is measured so far.

    Examples:

    - `jaxspec bench decode --limit-per-category 1 --repeats 3`

    - `jaxspec bench decode --drafter none,ngram --categories summarization,rag --json rows.json --plot speedup.png`
    """
    own = {"drafter": "none", "max_tokens": max_tokens, "max_batch": max_batch}
    settings = read_settings(config, options | own, max_tokens=128, max_batch=1, seed=0)
    if settings.sampling.samples != 1:
        raise ConfigError("bench takes one sample of each question: leave out --n and --best-of")
    drafters = _names(drafter)
    if not drafters:
        raise ConfigError("--drafter needs a name, such as none,ngram")
    questions = choose(read_questions(prompts), _names(categories or ""), limit_per_category)
    _check_files(json_file, plot_file)
    from jaxspec.bench import report
    from jaxspec.bench.decode import grouped

    groups, code = grouped(questions, settings.engine.max_batch), 0
    turns: list[list[Any]] = []
    costs: dict[str, Any] = {}
    try:
        with interruptible(lambda: "the table holds what was measured" if any(turns) else "nothing is measured yet"):
            _measure(settings, drafters, groups, repeats, turns, costs)
    except typer.Exit as stopped:
        code = stopped.exit_code
    if rows := report.make_rows(turns, groups, costs):
        conditions = _conditions(settings, max(1, sum(len(repeat) == len(groups) for repeat in turns)))
        title = ", ".join(f"{name} {value}" for name, value in conditions.items())
        Console().print(report.make_table(rows, costs, title))
        if json_file is not None:
            json_file.write_text(json.dumps([row | conditions for row in rows], indent=1) + "\n", encoding="utf-8")
        if plot_file is not None:
            report.plot(rows, title, plot_file)
    return code


@app.command()
def engine(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO|all", help="memory, prefix, chunks, throughput, formats, or all of them.")
    ],
    model: Model = DEFAULTS.model,
    prompts: Prompts = "default",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each timed case.")] = 3,
    kv_memory: KvMemory = DEFAULTS.kv_memory,
    json_file: JsonFile = None,
) -> int:
    """Measure what the parts of the engine are worth: pages, prefix cache, chunked prefill, and the whole of it.

    - `memory`: requests that the same memory holds at once, in pages and in a contiguous cache that gives each request
      1,024 slots. Prompts of the lengths of `--prompts`, 128 new tokens. Counted on the books: no model runs.

    - `prefix`: 32 questions over one document of 2,000 tokens, answers of 8, with the prefix cache and without; and two
      conversations, of an agent and a chat, in which each prompt holds all before it: the share of prompt tokens that
      were computed, and that were computed again.

    - `chunks`: 8 requests decode when a prompt of 6,000 tokens comes: the longest wait of any of them for its next
      tokens, and the throughput of all from then on, with the prompt in chunks of 256 and whole.

    - `throughput`: 64 of the questions at once, 128 new tokens, greedy, at batch 1, 8 and 32, plain and with n-gram
      drafts; whole runs, prefill included.

    - `formats`: 48 questions share 64 MiB of cache: how many run at once, and the throughput of all, by `--kv-dtype`.

    Compared cases take turns, and × is over the first of them in the same turn. Ctrl-C prints what is measured so far.

    Examples:

    - `jaxspec bench engine memory --prompts spec_bench.jsonl`

    - `jaxspec bench engine all --repeats 1 --json rows.json`
    """
    if scenario not in ("all", *SCENARIO_NAMES):
        raise ConfigError(f"no scenario named {scenario!r} (there are: all, {', '.join(SCENARIO_NAMES)})")
    config = EngineConfig(model=model, kv_memory=kv_memory, max_batch=8)
    questions = read_questions(prompts)
    _check_files(json_file, None)
    from jaxspec.bench.summary import make_rows, make_tables

    measured: list[Any] = []
    code = 0
    try:
        with interruptible(lambda: "the tables hold what was measured" if measured else "nothing is measured yet"):
            _play(SCENARIO_NAMES if scenario == "all" else [scenario], config, questions, repeats, measured)
    except typer.Exit as stopped:
        code = stopped.exit_code
    rows = make_rows(measured)
    for table in make_tables(rows):
        Console().print(table)
    if json_file is not None and rows:
        about = _about(config)
        json_file.write_text(json.dumps([row | about for row in rows], indent=1) + "\n", encoding="utf-8")
    return code


@app.command()
def kv(
    formats: Annotated[
        str, typer.Option(metavar="NAMES", help="Formats of keys and values; the first is the reference.")
    ] = "float32,bfloat16,int8,fp8,int4",
    weights: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Formats of weights; all but the first are run with the first KV format."),
    ] = "float32",
    model: Model = DEFAULTS.model,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to score. Default: Python's own documentation.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of it that are scored.")] = 20_000,
    window: Annotated[
        int, typer.Option(min=PREFILL_ROW, metavar="N", help="Tokens read before the cache is emptied.")
    ] = 1024,
    passkey: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Tokens of the passkey prompts; '' leaves them out.")
    ] = "256,1024",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of the timed cases.")] = 3,
    kv_memory: KvMemory = DEFAULTS.kv_memory,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> int:
    """Compare formats of keys and values, and of weights, by what they save and what they change.

    - Bytes a token has in the cache, scales included, and tokens a second of 8 requests decoding at once.

    - Perplexity of a text, read in windows as prompts are: tokens attend to what the format has stored. Beside it how
      often the likeliest token is the reference's, and the divergence KL(reference || format).

    - Passkeys: the share of five-digit numbers, hidden at five depths of prompts of each length, that the model finds.

    Formats take turns. Ctrl-C prints what is measured so far.

    Examples:

    - `jaxspec bench kv --json rows.json --plot formats.png`

    - `jaxspec bench kv --formats float32,int8 --weights float32,int8,int4 --tokens 5000 --passkey ''`
    """
    _check_files(json_file, plot_file)
    from jaxspec.bench.kv import Sizes
    from jaxspec.commands.bench_kv import compare

    sizes = Sizes(tokens=tokens, window=window, repeats=repeats, lengths=_lengths(passkey))
    config = EngineConfig(model=model, kv_memory=kv_memory)
    return compare(config, _names(weights), _names(formats), text, sizes, json_file, plot_file)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _names(text))
    except ValueError as error:
        raise ConfigError(f"--passkey takes numbers of tokens, such as 256,1024, not {text!r}") from error


def _play(
    names: Sequence[str], config: EngineConfig, questions: list[Question], repeats: int, measured: list[Any]
) -> None:
    """Add to `measured`, and tell of each case on stderr as it is done."""
    from jaxspec.bench.engine import Bench, run
    from jaxspec.llm import load

    with Console(stderr=True).status(f"loading {config.model}") as status:
        bench = Bench(load(config), config, questions, repeats)
        for name in names:
            status.update(name)
            for one in run(name, bench):
                measured.append(one)
                figures = ", ".join(f"{key} {value:.4g}" for key, value in one.figures.items())
                print(f"{one.scenario}, {one.case}: {figures}", file=sys.stderr)


def _about(config: EngineConfig) -> dict[str, Any]:
    """What a reader of the rows must know to compare them with others."""
    import jax

    return {
        "model": config.model,
        "backend": jax.default_backend(),
        "cpus": os.cpu_count(),
        "kv_memory": config.kv_memory,
        "prefill_chunk": config.prefill_chunk,
    }


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """ConfigError where they could not be written: better said before a long run than after it."""
    for file in (json_file, plot_file):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")
    if plot_file is not None:
        from jaxspec.bench.report import check_plot

        check_plot(plot_file)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _measure(
    settings: DecodeConfig,
    drafters: list[str],
    groups: list[Any],
    repeats: int,
    turns: list[list[Any]],
    costs: dict[str, Any],
) -> None:
    from jaxspec.bench.costs import measure_costs
    from jaxspec.bench.decode import build_engines, context_of, measure, warm_up

    batch, params = settings.engine.max_batch, settings.sampling
    with Console(stderr=True).status(f"loading {settings.engine.model}") as status:
        engines = build_engines(settings.engine, drafters)
        status.update("compiling")
        warm_up(engines, groups, params)
        status.update("measuring what a round costs")
        context = context_of(next(iter(engines.values())), groups, params.max_tokens)
        costs |= measure_costs(engines, batch, context, params)
    questions = sum(len(group.questions) for group in groups)
    print(f"{questions} questions, {len(engines)} drafters, {repeats} repeats", file=sys.stderr)
    with Meter(repeats * len(groups) * len(engines), 0) as meter:
        measure(engines, groups, params, repeats, turns, lambda tokens: meter.add(rows=1, tokens=tokens))


def _conditions(settings: DecodeConfig, repeats: int) -> dict[str, Any]:
    """What a reader must know to compare the figures with others."""
    import jax

    engine, sampling = settings.engine, settings.sampling
    return {
        "model": engine.model,
        "backend": jax.default_backend(),
        "weights": engine.weights,
        "batch": engine.max_batch,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "draft_tokens": engine.draft_tokens,
        "adaptive": engine.draft_adaptive,
        "repeats": repeats,
    }
