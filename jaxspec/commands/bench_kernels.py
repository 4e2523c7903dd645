"""What `jaxspec bench kernels` does once its options are read."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from jaxspec.bench.kernels import Row, make_cases, measure
from jaxspec.bench.kernels_report import label, make_tables
from jaxspec.commands.running import interruptible


def compile_all(
    topology: str,
    kernels: Sequence[str],
    shapes: Sequence[str],
    dtypes: Sequence[str],
    queries: Sequence[str],
    json_file: Path | None,
) -> int:
    """Compile the cases, telling of each on stderr; print the tables and write the file of what is done, where Ctrl-C
    ends it with 130."""
    cases = make_cases(topology, kernels, shapes, dtypes, queries)
    rows: list[Row] = []
    code = 0
    try:
        with interruptible(lambda: "the tables hold what was compiled" if rows else "nothing is compiled yet"):
            for row in measure(cases):
                rows.append(row)
                print(f"{len(rows)}/{len(cases)} {_told(row)}", file=sys.stderr)
    except typer.Exit as stopped:
        code = stopped.exit_code
    for part in make_tables(rows):
        Console().print(part)
    if json_file is not None and rows:
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return code


def _told(row: Row) -> str:
    what = f"{row['shape']}, {row['dtype']}, {row['queries']} queries, {label(row)}"
    return f"{what}: {row['refused'] or format(row['bundles'], ',') + ' bundles'}"
