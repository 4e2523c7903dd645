"""From measured answers to figures: rows, a table, a plot."""

import statistics
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.bench.costs import Costs
from jaxspec.bench.decode import Answers, Group, Turn
from jaxspec.errors import ConfigError
from jaxspec.host.request import Round

Row = dict[str, Any]


def make_rows(turns: list[list[Turn]], groups: Sequence[Group], costs: dict[str, Costs]) -> list[Row]:
    """A row for every category and drafter, and "all" at the end; speedups are over the first drafter.

    Of `turns`, [repeat][group], an interrupted repeat counts only where there is no whole one. No rows where nothing
    is finished.
    """
    whole = [repeat for repeat in turns if len(repeat) == len(groups)] or turns[:1]
    categories: dict[str, list[int]] = {}
    for place, group in enumerate(groups[: len(whole[0]) if whole else 0]):
        categories.setdefault(group.category, []).append(place)
    if categories:
        categories["all"] = list(range(len(whole[0])))
    return [
        _row(category, name, [[repeat[i] for i in places] for repeat in whole], costs[name])
        for category, places in categories.items()
        for name in whole[0][0]
    ]


def _row(category: str, name: str, repeats: list[list[Turn]], costs: Costs) -> Row:
    base = next(iter(repeats[0][0]))
    answers = [turn[name] for turn in repeats[-1]]
    outputs = [output for answer in answers for output in answer.outputs]
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(statistics.median(turn[name].seconds for turn in same) for same in zip(*repeats, strict=True))
    rounds = [r for output in outputs for r in output.rounds]
    drafted = sum(r.drafted for r in rounds)
    tau = tokens / len(rounds)
    draft, verify = step_costs(answers, costs)
    expected = [ids for turn in repeats[-1] for ids in turn[base].token_ids]
    return {
        "drafter": name,
        "category": category,
        "questions": len(outputs),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tau": tau,
        "acceptance_rate": sum(r.accepted for r in rounds) / drafted if drafted else 0.0,
        "acceptance_by_position": acceptance_by_position(rounds),
        "speedup": statistics.median(_speed(repeat, name) / _speed(repeat, base) for repeat in repeats),
        "draft_cost": draft,
        "verify_cost": verify,
        "predicted_speedup": tau / (draft + verify),
        "leviathan_speedup": leviathan(rounds, costs),
        "same_text": sum(a.token_ids == b for a, b in zip(outputs, expected, strict=True)) / len(outputs),
    }


def _speed(repeat: list[Turn], name: str) -> float:
    return sum(turn[name].tokens for turn in repeat) / sum(turn[name].seconds for turn in repeat)


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """For each i from 1: the share of rounds with at least i drafts that accepted the i-th.

    Drafts past the end of the text count as not drafted here.
    """
    shares = []
    for i in range(1, max(map(_judged, rounds), default=0) + 1):
        offered = [r for r in rounds if _judged(r) >= i]
        shares.append(sum(r.accepted >= i for r in offered) / len(offered))
    return shares


def _judged(r: Round) -> int:
    """Drafts that the text did not end before: all, unless it ended with an accepted one."""
    return r.accepted if r.accepted == r.emitted else r.drafted


def step_costs(answers: Sequence[Answers], costs: Costs) -> tuple[float, float]:
    """Mean costs of drafting and of verifying a step; a step is as long as the longest draft of its batch."""
    drafts = [
        max(r.drafted for r in step if r)
        for answer in answers
        for step in zip_longest(*(output.rounds for output in answer.outputs))
    ]
    return statistics.mean(map(costs.drafting, drafts)), statistics.mean(map(costs.verifying, drafts))


def leviathan(rounds: Sequence[Round], costs: Costs) -> float:
    """The speedup of Leviathan et al., 2023, theorem 3.8: (1 - a^(g+1)) / ((1 - a) (g c + 1)).

    a is the chance that a draft is accepted where those before it were, c the cost of one draft, g the drafts of a
    round: where g varies, tokens and costs are summed over the rounds. Verification costs a plain step here.
    """
    trials = sum(min(r.accepted + 1, _judged(r)) for r in rounds)
    if not trials:
        return 1.0
    a = sum(r.accepted for r in rounds) / trials
    c = costs.drafting(costs.nodes) / costs.nodes
    return sum(a**i for r in rounds for i in range(r.drafted + 1)) / sum(r.drafted * c + 1 for r in rounds)


def make_table(rows: Sequence[Row], costs: dict[str, Costs], title: str) -> Table:
    """The rows as people read them."""
    table = Table(
        title=title, caption=_caption(rows, costs), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left"
    )
    for name in ("category", "drafter"):
        table.add_column(name, no_wrap=True)
    for name in ("tok/s", "speedup", "τ", "accepted", "predicted", "Leviathan"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, after in zip_longest(rows, rows[1:]):
        drafts = bool(row["acceptance_by_position"])
        table.add_row(
            row["category"],
            row["drafter"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}×",
            f"{row['tau']:.2f}",
            f"{row['acceptance_rate']:.0%}" if drafts else "",
            f"{row['predicted_speedup']:.2f}×" if drafts else "",
            f"{row['leviathan_speedup']:.2f}×" if drafts else "",
            end_section=after is not None and after["category"] != row["category"] and len(costs) > 1,
        )
    return table


def _caption(rows: Sequence[Row], costs: dict[str, Costs]) -> str:
    lines = ["tok/s: decode time only; speedup: over the first drafter in the same repeat; medians"]
    for row in rows:
        name, cost = row["drafter"], costs[row["drafter"]]
        if row["category"] != "all" or not cost.nodes:
            continue
        widths = ", ".join(f"{width} tokens {factor:.2f}" for width, factor in cost.verify.items())
        shares = " ".join(f"{share:.0%}" for share in row["acceptance_by_position"]) or "none drafted"
        lines += [
            f"{name}, in plain steps: drafting {row['draft_cost']:.3f}, verifying {widths}",
            f"{name}, all: accepted by position {shares}; {row['same_text']:.0%} of the texts as {rows[0]['drafter']}",
        ]
    return "\n".join(lines)


def check_plot(path: Path) -> None:
    """ConfigError where matplotlib is missing or does not know the kind of file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxspec[plots]'") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise ConfigError(f"--plot {path}: the name must end in one of .{', .'.join(known)}")


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Speedups as bars, grouped by category."""
    from matplotlib.figure import Figure

    categories = list(dict.fromkeys(row["category"] for row in rows))
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    figure = Figure(figsize=(max(6.0, 1.1 * len(categories)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(drafters)
    for i, drafter in enumerate(drafters):
        heights = [row["speedup"] for row in rows if row["drafter"] == drafter]
        places = [place + (i - (len(drafters) - 1) / 2) * width for place in range(len(categories))]
        bars = axes.bar(places, heights, width, label=drafter)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel(f"speedup over {drafters[0]}")
    axes.set_title(textwrap.fill(title, 80), fontsize=8)
    axes.legend()
    figure.savefig(path, dpi=150)
