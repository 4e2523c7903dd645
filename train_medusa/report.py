"""What a run tells: rows of metrics in a file, a figure of them, and a line for the progress bar."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxspec.errors import ConfigError
from train_medusa.config import LearnConfig
from train_medusa.evaluate import accuracies
from train_medusa.joint import OwnTally
from train_medusa.loss import TOP, Tally

Row = dict[str, Any]


def row_of(step: int, split: str, tally: Tally, own: OwnTally | None, config: LearnConfig, **more: Any) -> Row:
    """A row of metrics: the loss over all tokens that were counted, and of each head what `evaluate.accuracies` says.

    `own` is of the model itself, where it is trained.
    """
    heads = accuracies(tally)
    loss = sum(head["loss"] * config.decay**k for k, head in enumerate(heads))
    row: Row = {"step": step, "split": split, "loss": loss, "heads": heads} | more
    if own is not None:
        labels = max(float(own.labels), 1.0)
        row["model"] = {"loss": float(own.loss) / labels, "divergence": float(own.divergence) / labels}
        row["loss"] = row["model"]["loss"] + config.heads_weight * loss + config.distill * row["model"]["divergence"]
    return row


def line_of(row: Row) -> str:
    """A row of metrics in one line."""
    losses = " ".join(f"{head['loss']:.2f}" for head in row["heads"])
    hits = " ".join(f"{head['top1']:.0%}" for head in row["heads"])
    model = f", model {row['model']['loss']:.3f} + {row['model']['divergence']:.4f}" if "model" in row else ""
    return f"step {row['step']}: {row['split']} loss {row['loss']:.3f} (heads {losses}{model}), first guesses {hits}"


class Journal:
    """The rows of a file, metrics.jsonl, to which more are added: a line of JSON each."""

    def __init__(self, path: Path, step: int) -> None:
        """Opens it for a run that goes on from `step`: later rows go. ConfigError where it is some other file."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # a killed run may leave half a line
        try:
            found: list[Row] = [msgspec.json.decode(line) for line in whole]
            self.rows = [row for row in found if row["step"] <= step]
        except (msgspec.DecodeError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} was not written by this program ({error}): move it away") from error
        scratch = path.with_name(f"{path.name}.tmp")
        scratch.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in self.rows))
        scratch.replace(path)
        self._path = path

    def add(self, row: Row) -> None:
        """Adds a row, in the file too."""
        self.rows.append(row)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Loss and accuracy of each head over the steps: lines in training, dots on held-out texts."""
    from matplotlib.figure import Figure

    names = ["loss", *(f"top{top}" for top in TOP)]
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = dict(zip(names, figure.subplots(2, 2).flat, strict=True))
    for split, style in (("train", "-"), ("held_out", "o")):
        chosen = [row for row in rows if row["split"] == split]
        steps = [row["step"] for row in chosen]
        for k in range(len(rows[0]["heads"]) if chosen else 0):
            for name, axes in panels.items():
                label = f"head {k}" if split == "train" else None
                values = np.array([row["heads"][k][name] for row in chosen])
                axes.plot(steps, values, style, color=f"C{k}", label=label, markersize=4)
    for name, axes in panels.items():
        axes.set_title("loss, nats" if name == "loss" else f"labels among the first {name.removeprefix('top')}")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels["loss"].legend()
    figure.suptitle(f"{title} (lines: training, dots: held-out texts)", fontsize=9)
    figure.savefig(path, dpi=120)
