"""Rows of metrics: what they say, and that a file of them has each step once."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from train_medusa.config import LearnConfig
from train_medusa.joint import OwnTally
from train_medusa.loss import RANKS, Tally
from train_medusa.report import Journal, line_of, plot, row_of

TALLY = Tally(
    labels=np.array([10.0, 8.0]),
    loss=np.array([16.0, 9.0]),
    guessable=np.array([8.0, 6.0]),
    hits=np.array([[2.0, 3.0, 4.0], [0.0, 1.0, 2.0]]),
    ranks=np.zeros((2, RANKS)),
)
CONFIG = LearnConfig(decay=0.5, heads_weight=0.2, distill=3.0)


def test_a_row_has_means_over_the_labels() -> None:
    row = row_of(7, "train", TALLY, None, CONFIG, lr=0.1)
    assert row["loss"] == pytest.approx(2.0 + 0.5 * 1.5)
    assert row["heads"][0] == pytest.approx({"loss": 2.0, "top1": 0.2, "top3": 0.3, "top5": 0.4, "guessable": 0.8})
    assert row["heads"][1]["top5"] == pytest.approx(0.25)
    assert (row["step"], row["split"], row["lr"]) == (7, "train", 0.1)
    assert line_of(row) == "step 7: train loss 2.750 (heads 2.00 1.50), first guesses 20% 0%"


def test_the_loss_of_medusa_2_is_the_sum_of_its_parts() -> None:
    own = OwnTally(np.float32(4), np.float32(10), np.float32(2))
    row = row_of(7, "held_out", TALLY, own, CONFIG)
    assert row["model"] == {"loss": 2.5, "divergence": 0.5}
    assert row["loss"] == pytest.approx(2.5 + 0.2 * 2.75 + 3.0 * 0.5)
    assert "model 2.500 + 0.5000" in line_of(row)


def test_going_on_from_a_step_takes_later_rows_and_half_a_line_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Journal(path, 0)
    for step in (5, 10, 15):
        first.add({"step": step})
    with path.open("a") as file:
        file.write('{"step": 1')
    second = Journal(path, 10)
    second.add({"step": 12})
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [5, 10, 12] == [row["step"] for row in second.rows]


@pytest.mark.parametrize("content", ["no json\n", "[1]\n", '{"stop": 1}\n'])
def test_another_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="was not written by this program"):
        Journal(path, 10)
    assert path.read_text() == content


def test_the_figure_has_a_line_a_head_and_dots_of_held_out_texts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row_of(step, split, TALLY, None, CONFIG) for step in (1, 2) for split in ("train", "held_out")]
    plot(rows, "a run", tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
