"""Rows of compiled kernels as people read them: a table for each model, and what was refused."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxspec.bench.kernels import Row

LABELS = {"paged_attention": "jax paged", "ragged_paged_attention": "jax ragged"}
CAPTION = """\
bundles: for a row of T queries after {context:,} tokens, on one core
append, commit: of the program
HBM: cycles to read the row's keys and values once
per 1k: bundles of the loop over them for 1,024 tokens
spills: in that loop, and elsewhere in the kernel; VMEM in KiB"""


def make_tables(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """A table a shape, and a line for each reason that something was refused for."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        yield _table([row for row in rows if row["shape"] == shape])
    refused: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        if row["refused"]:
            what = refused.setdefault((label(row), row["refused"]), {})
            what.setdefault(f"{row['shape']} {row['dtype']}", []).append(str(row["queries"]))
    for (kernel, reason), what in refused.items():
        cases = "; ".join(f"{name}, T {', '.join(queries)}" for name, queries in what.items())
        yield Text(f"{kernel} refuses {cases}:\n  {reason}")


def label(row: Row) -> str:
    """What a row's kernel is called in a table."""
    return LABELS[row["kernel"]] if row["kernel"] in LABELS else row["name"]


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{first['shape']} on {first['topology']}"
    caption = CAPTION.format(context=first["context"])
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0, caption_justify="left")
    for header in ("KV", "kernel"):
        table.add_column(header, no_wrap=True)
    for header in ("T", "bundles", "HBM", "ratio", "per 1k", "spills", "VMEM", "DMAs"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["dtype"], label(row), str(row["queries"]), *_figures(row))
    return table


def _figures(row: Row) -> list[str]:
    if row["refused"]:
        return ["refused"]
    streamed = row["per_1024"] is not None
    return [
        f"{row['bundles']:,}",
        f"{row['hbm_cycles']:,}" if streamed else "",
        f"{row['bundles'] / row['hbm_cycles']:.2f}" if streamed else "",
        f"{row['per_1024']:,.0f}" if streamed else "",
        f"{row['spills']}+{row['spills_around']}" if streamed else f"{row['spills']}",
        f"{row['vmem'] / 1024:,.0f}",
        f"{row['dmas']:,}",
    ]
