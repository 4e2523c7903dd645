"""What `jaxspec bench decode` does once its options are read."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import typer
from rich.console import Console

from jaxspec.bench import report
from jaxspec.bench.costs import measure_costs
from jaxspec.bench.decode import build_engines, context_of, grouped, measure, warm_up
from jaxspec.bench.questions import Question
from jaxspec.commands.meter import Meter
from jaxspec.commands.running import interruptible
from jaxspec.config import DecodeConfig


def compare(
    settings: DecodeConfig,
    drafters: list[str],
    questions: Sequence[Question],
    repeats: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """Measure, print the table and write the files: of what is measured, where Ctrl-C ends it with 130."""
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


def _measure(
    settings: DecodeConfig,
    drafters: list[str],
    groups: list[Any],
    repeats: int,
    turns: list[list[Any]],
    costs: dict[str, Any],
) -> None:
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
