"""What was measured of formats and policies, drawn: bars, passkeys by place, perplexity along one text."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.bench.kv_report import COLUMNS, Row, label, told_of


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel of bars for each figure that was measured; below, where there are any, a heat map of passkeys for each
    case, and a curve of each along the text that was read on and on."""
    from matplotlib.figure import Figure

    panels = [name for name, column in told_of(rows).items() if column.panel and rows[0][name] is not None]
    parts = [(_bars, 1.4 + 0.4 * len(rows)), (_curves, 3.6), (_heat_maps, 2.6)]
    wanted = [True, bool(rows[0]["onward"]), bool(rows[0]["passkey_places"])]
    parts = [part for part, there in zip(parts, wanted, strict=True) if there]
    heights = [height for _, height in parts]
    wide = max(2.0 + 2.4 * len(panels), 1.0 + 2.2 * len(rows) * wanted[2])
    figure = Figure(figsize=(wide, sum(heights)), layout="constrained")
    places = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for (draw, _), place in zip(parts, places, strict=True):
        draw(place, rows, panels)
    figure.suptitle(textwrap.fill(title, int(14 * wide)), fontsize=8)
    figure.savefig(path, dpi=150)


def _bars(figure, rows: Sequence[Row], panels: Sequence[str]) -> None:
    labels = [f"{label(row)}, weights {row['weights']}" for row in rows]
    for axes, name in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        bars = axes.barh(labels, [row[name] for row in rows])
        axes.bar_label(bars, [COLUMNS[name].told(row[name]) for row in rows], fontsize=7, padding=2)
        axes.margins(x=0.3)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(COLUMNS[name].panel, fontsize=9)
    figure.axes[0].invert_yaxis()


def _curves(figure, rows: Sequence[Row], _: Sequence[str]) -> None:
    axes = figure.subplots()
    for row in rows:
        ends, values = ([part[name] for part in row["onward"]] for name in ("tokens", "perplexity"))
        axes.plot(ends, values, marker=".", label=f"{label(row)}, weights {row['weights']}")
    axes.axvline(rows[0]["trained"], color="grey", linestyle=":", label="trained context")
    axes.set_yscale("log")
    axes.set_xlabel("tokens read of one text")
    axes.set_ylabel("perplexity of the last part")
    axes.legend(fontsize=7)


def _heat_maps(figure, rows: Sequence[Row], _: Sequence[str]) -> None:
    """Passkeys found, by depth and length of the prompt: white is none, dark is all."""
    for axes, row in zip(figure.subplots(1, len(rows), sharey=True, squeeze=False)[0], rows, strict=True):
        cells = {(cell["depth"], cell["length"]): cell["found"] / cell["tries"] for cell in row["passkey_places"]}
        depths, lengths = (sorted({place[axis] for place in cells}) for axis in (0, 1))
        shares = np.array([[cells[depth, length] for length in lengths] for depth in depths])
        axes.imshow(shares, vmin=0, vmax=1, cmap="Greens", aspect="auto")
        for (line, column), share in np.ndenumerate(shares):
            axes.text(column, line, f"{share:.0%}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axes.set_title(f"passkeys, {label(row)}", fontsize=8)
    figure.axes[0].set_ylabel("depth", fontsize=8)
