"""From what was found of each case to rows and tables."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from jaxspec.bench.kv import Bench, Case
from jaxspec.bench.passkey import by_place
from jaxspec.bench.quality import figures
from jaxspec.kv.formats import get_format

Row = dict[str, Any]

PARTS = 8
"""Of the text that is read on and on, each of which gets a perplexity."""
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
    "held": Column("held", ".1%", "held of a long text"),
    "tokens_per_second": Column("tok/s", ".1f", "tok/s, decoding"),
    "perplexity": Column("ppl", ".3f"),
    "perplexity_change": Column("change", "+.2%", "change of perplexity"),
    "agreement": Column("agree", ".1%", "greedy agreement"),
    "kl": Column("KL", ".1e", "KL, nats a token"),
    "passkey": Column("passkey", ".0%", "passkeys found"),
}

ALIKE = "compression", "held"
"""What is not told where it is the same of all cases."""


def make_rows(bench: Bench) -> list[Row]:
    """A row for each case, None for what was not measured. Ratios are of the first case, `compression` of bfloat16."""
    return [_row(bench, case) for case in bench.engines]


def _row(bench: Bench, case: Case) -> Row:
    found, first = bench.findings, next(iter(bench.engines))
    pool = bench.engines[case].program.pool
    plain = replace(pool, format=get_format("bfloat16"))
    speeds, tries, marks = found.speeds[case], found.tries[case], found.marks[case]
    longest = bench.sizes.longest
    turns = list(zip(speeds, found.speeds[first], strict=False))
    return {
        "weights": case.weights,
        "kv_dtype": case.kv_dtype,
        "kv_policy": case.kv_policy,
        "trained": bench.engines[case].spec.max_context,
        "bytes_per_token": pool.token_bytes,
        "tail_bytes": pool.tail_bytes,
        "compression": plain.page_bytes / pool.page_bytes,
        "held": min(pool.limit or longest, pool.policy.most_seen(longest)) / longest,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "speedup": statistics.median(own / base for own, base in turns) if turns else None,
        **(figures(marks, found.marks[first]) if marks else dict.fromkeys(QUALITY)),
        "tokens": sum(len(one.surprise) for one in marks),
        "passkey": sum(one.found for one in tries) / len(tries) if tries else None,
        "passkey_places": by_place(tries),
        "onward": _onward(np.concatenate([one.surprise for one in found.onward[case]])) if found.onward[case] else [],
    }


def _onward(surprise: np.ndarray) -> list[dict[str, int | float]]:
    """Perplexity of each part of a text, and how many tokens were read at its end."""
    ends = np.cumsum([len(part) for part in np.array_split(surprise, PARTS)])
    parts = np.split(surprise, ends[:-1])
    return [
        {"tokens": int(end) + 1, "perplexity": float(np.exp(np.mean(part, dtype=np.float64)))}
        for end, part in zip(ends, parts, strict=True)
    ]


def told_of(rows: Sequence[Row]) -> dict[str, Column]:
    """The columns, less those that tell nothing apart."""
    return {name: column for name, column in COLUMNS.items() if name not in ALIKE or _differ(rows, name)}


def _differ(rows: Sequence[Row], name: str) -> bool:
    return len({row[name] for row in rows}) > 1


def label(row: Row) -> str:
    """How keys and values are stored, and what stays of them where that is not all."""
    return row["kv_dtype"] + ("" if row["kv_policy"] == "full" else f" {row['kv_policy']}")


def make_table(rows: Sequence[Row], title: str) -> Table:
    """The rows as people read them."""
    table = Table(title=title, caption=_caption(rows), box=box.SIMPLE_HEAD, padding=0, caption_justify="left")
    names = [lambda row: row["weights"], label] if _differ(rows, "weights") else [label]
    for header in ("weights", "KV")[-len(names) :]:
        table.add_column(header, no_wrap=True)
    columns = told_of(rows)
    for column in columns.values():
        table.add_column(column.header, justify="right", no_wrap=True)
    for row in rows:
        told = (column.told(row[name]) for name, column in columns.items())
        table.add_row(*(name(row) for name in names), *told)
    return table


def make_onward(rows: Sequence[Row]) -> Table:
    """Perplexity along the text that was read on and on."""
    title = (
        f"Perplexity of one text, part by part, up to so many tokens; the model was trained for {rows[0]['trained']:,}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, caption_justify="left")
    table.add_column("KV", no_wrap=True)
    for part in rows[0]["onward"]:
        table.add_column(f"{part['tokens']:,}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(label(row), *(f"{part['perplexity']:.4g}" for part in row["onward"]))
    return table


def _caption(rows: Sequence[Row]) -> str:
    lines = [
        "ratio: bytes of bfloat16 over these; tok/s: decoding; ppl: perplexity",
        "change, agree and KL (nats a token): against the first row",
    ]
    lines += [] if _differ(rows, "weights") else [f"weights: {rows[0]['weights']}"]
    lines += ["held: share of the longest text here that stays in the cache"] if _differ(rows, "held") else []
    tails = [f"{label(row)} {row['tail_bytes']:,}" for row in rows if row["tail_bytes"]]
    lines += [f"bytes of a sequence beside its pages: {', '.join(tails)}"] if tails else []
    return "\n".join(lines)
