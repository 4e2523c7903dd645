"""From what was found of each case to rows, a table and a plot."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from jaxspec.bench.kv import Bench, Case
from jaxspec.bench.passkey import by_place
from jaxspec.bench.quality import figures
from jaxspec.kv.formats import get_format

Row = dict[str, Any]

QUALITY = "perplexity", "perplexity_change", "agreement", "kl"


class Column(NamedTuple):
    """How a figure is told."""

    header: str
    form: str
    panel: str = ""
    """Title of its panel in the plot, if it has one."""

    def told(self, value: float | None) -> str:
        return "" if value is None else format(value, self.form)


COLUMNS = {
    "bytes_per_token": Column("bytes", ",.0f", "bytes a token"),
    "compression": Column("ratio", ".2f"),
    "tokens_per_second": Column("tok/s", ".1f", "tok/s, decoding"),
    "perplexity": Column("ppl", ".3f"),
    "perplexity_change": Column("change", "+.2%", "change of perplexity"),
    "agreement": Column("agree", ".1%", "greedy agreement"),
    "kl": Column("KL", ".1e", "KL, nats a token"),
    "passkey": Column("passkey", ".0%", "passkeys found"),
}


def make_rows(bench: Bench) -> list[Row]:
    """A row for each case, None for what was not measured. Ratios are of the first case, `compression` of bfloat16."""
    return [_row(bench, case) for case in bench.engines]


def _row(bench: Bench, case: Case) -> Row:
    found, first = bench.findings, next(iter(bench.engines))
    pool = bench.engines[case].program.pool
    plain = replace(pool, format=get_format("bfloat16"))
    speeds, tries, marks = found.speeds[case], found.tries[case], found.marks[case]
    turns = list(zip(speeds, found.speeds[first], strict=False))
    return {
        "weights": case.weights,
        "kv_dtype": case.kv_dtype,
        "bytes_per_token": pool.token_bytes,
        "tail_bytes": pool.tail_bytes,
        "compression": plain.page_bytes / pool.page_bytes,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "speedup": statistics.median(own / base for own, base in turns) if turns else None,
        **(figures(marks, found.marks[first]) if marks else dict.fromkeys(QUALITY)),
        "tokens": sum(len(one.surprise) for one in marks),
        "passkey": sum(one.found for one in tries) / len(tries) if tries else None,
        "passkey_places": by_place(tries),
    }


def make_table(rows: Sequence[Row], title: str) -> Table:
    """The rows as people read them."""
    table = Table(title=title, caption=_caption(rows), box=box.SIMPLE_HEAD, padding=0, caption_justify="left")
    for header in ("weights", "KV"):
        table.add_column(header, no_wrap=True)
    for column in COLUMNS.values():
        table.add_column(column.header, justify="right", no_wrap=True)
    for row in rows:
        told = (column.told(row[name]) for name, column in COLUMNS.items())
        table.add_row(row["weights"], row["kv_dtype"], *told)
    return table


def _caption(rows: Sequence[Row]) -> str:
    lines = [
        "ratio: bytes of bfloat16 over these; tok/s: decoding; ppl: perplexity",
        "change, agree and KL (nats a token): against the first row",
    ]
    tails = [f"{row['kv_dtype']} {row['tail_bytes']:,}" for row in rows if row["tail_bytes"]]
    lines += [f"bytes of a sequence's unfinished group, beside its pages: {', '.join(tails)}"] if tails else []
    return "\n".join(lines)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel of bars for each figure that was measured, a bar for each case."""
    from matplotlib.figure import Figure

    panels = [name for name, column in COLUMNS.items() if column.panel and rows[0][name] is not None]
    labels = [f"{row['kv_dtype']}, weights {row['weights']}" for row in rows]
    figure = Figure(figsize=(2.0 + 2.4 * len(panels), 1.4 + 0.4 * len(rows)), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        bars = axes.barh(labels, [row[name] for row in rows])
        axes.bar_label(bars, [COLUMNS[name].told(row[name]) for row in rows], fontsize=7, padding=2)
        axes.margins(x=0.3)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(COLUMNS[name].panel, fontsize=9)
    figure.axes[0].invert_yaxis()
    figure.suptitle(textwrap.fill(title, 110), fontsize=8)
    figure.savefig(path, dpi=150)
