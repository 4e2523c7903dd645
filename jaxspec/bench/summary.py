"""From what scenarios measured to rows and tables."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.bench.engine import Measured

Row = dict[str, Any]

COMPARED = {"peak_concurrency", "mean_concurrency", "tokens_per_second", "longest_gap", "ttft_of_second_visits"}
"""Figures that are also told as a multiple of the base case's."""


def make_rows(measured: Sequence[Measured]) -> list[Row]:
    """A row a case: medians over its repeats, and of the ratios to the base case of the same repeat."""
    cases: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        cases.setdefault((one.scenario, one.case), []).append(one)
    return [_row(own, cases[scenario, own[0].base]) for (scenario, _), own in cases.items()]


def _row(own: list[Measured], base: list[Measured]) -> Row:
    row: Row = {"scenario": own[0].scenario, "case": own[0].case, "repeats": len(own)}
    for name in own[0].figures:
        row[name] = statistics.median(one.figures[name] for one in own)
        if name in COMPARED:
            pairs = [(one.figures[name], other.figures[name]) for one, other in zip(own, base, strict=False)]
            row[f"{name}_ratio"] = statistics.median(a / b for a, b in pairs) if all(b for _, b in pairs) else None
    return row


def make_tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each scenario, as people read it."""
    return [
        _table(scenario, [row for row in rows if row["scenario"] == scenario])
        for scenario in dict.fromkeys(row["scenario"] for row in rows)
    ]


def _table(scenario: str, rows: Sequence[Row]) -> Table:
    """Cases side by side: there are fewer of them than figures."""
    repeats = max(row["repeats"] for row in rows)
    caption = f"medians of {repeats}, times in seconds" if repeats > 1 else "times in seconds"
    table = Table(title=scenario, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["case"], justify="right")
    for name in rows[0]:
        if name not in ("scenario", "case", "repeats"):
            label = "  ×" if name.endswith("_ratio") else name.replace("_", " ")
            table.add_row(label, *(_cell(name, row[name]) for row in rows))
    return table


def _cell(name: str, value: int | float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
