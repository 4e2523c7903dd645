"""What `jaxspec bench engine` does once its options are read."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import typer
from rich.console import Console

from jaxspec.bench.engine import Bench, run
from jaxspec.bench.questions import Question
from jaxspec.bench.summary import make_rows, make_tables
from jaxspec.commands.running import interruptible
from jaxspec.config import EngineConfig
from jaxspec.llm import load


def play(
    names: Sequence[str], config: EngineConfig, questions: list[Question], repeats: int, json_file: Path | None
) -> int:
    """Measure the scenarios, print their tables and write the file: of what is measured, where Ctrl-C ends it with
    130."""
    measured: list[Any] = []
    code = 0
    try:
        with interruptible(lambda: "the tables hold what was measured" if measured else "nothing is measured yet"):
            _measure(names, config, questions, repeats, measured)
    except typer.Exit as stopped:
        code = stopped.exit_code
    rows = make_rows(measured)
    for table in make_tables(rows):
        Console().print(table)
    if json_file is not None and rows:
        about = _about(config)
        json_file.write_text(json.dumps([row | about for row in rows], indent=1) + "\n", encoding="utf-8")
    return code


def _measure(
    names: Sequence[str], config: EngineConfig, questions: list[Question], repeats: int, measured: list[Any]
) -> None:
    """Add to `measured`, and tell of each case on stderr as it is done."""
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
    return {
        "model": config.model,
        "backend": jax.default_backend(),
        "cpus": os.cpu_count(),
        "kv_memory": config.kv_memory,
        "prefill_chunk": config.prefill_chunk,
    }
