"""What `jaxspec bench kv` does once its options are read."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import typer
from rich.console import Console

from jaxspec.bench.kv import Bench, Sizes, make_cases, read_text
from jaxspec.bench.kv_plot import plot
from jaxspec.bench.kv_report import make_onward, make_rows, make_table
from jaxspec.commands.meter import Meter
from jaxspec.commands.running import interruptible
from jaxspec.config import EngineConfig


def compare(
    config: EngineConfig,
    weights: Sequence[str],
    formats: Sequence[str],
    policies: Sequence[str],
    text: Path | None,
    sizes: Sizes,
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """Measure the cases, print the table and write the files: of what is measured, where Ctrl-C ends it with 130."""
    cases, scored = make_cases(weights, formats, policies), read_text(text)
    loading = Console(stderr=True).status(f"loading {config.model}")
    with interruptible(lambda: "nothing is measured yet"), loading as status:
        bench = Bench(config, cases, scored, sizes)
        status.update("compiling")
        bench.warm_up()
    code = 0
    try:
        with (
            interruptible(lambda: "the table holds what was measured" if bench.findings else "nothing is measured yet"),
            Meter(bench.steps, 0, lambda: bench.doing) as meter,
        ):
            bench.measure(lambda tokens: meter.add(rows=1, tokens=tokens))
    except typer.Exit as stopped:
        code = stopped.exit_code
    if bench.findings:
        rows, about = make_rows(bench), _about(config, text, bench.sizes)
        title = ", ".join(f"{name} {value}" for name, value in about.items())
        Console().print(make_table(rows, title))
        if all(row["onward"] for row in rows):
            Console().print(make_onward(rows))
        if json_file is not None:
            json_file.write_text(json.dumps([row | about for row in rows], indent=1) + "\n", encoding="utf-8")
        if plot_file is not None:
            plot(rows, title, plot_file)
    return code


def _about(config: EngineConfig, text: Path | None, sizes: Sizes) -> dict[str, Any]:
    """What a reader must know to compare the figures with others."""
    return {
        "model": config.model,
        "backend": jax.default_backend(),
        "cpus": os.cpu_count(),
        "text": str(text) if text else f"documentation of Python {platform.python_version()}",
        "window": sizes.window,
        "batch": sizes.batch,
        "context": sizes.context,
        "repeats": sizes.repeats,
        "reach": sizes.reach,
        "kv_window": config.kv_window,
        "kv_heavy": config.kv_heavy,
        "kv_sinks": config.kv_sinks,
    }
