"""The speed table: its arithmetic, its errors, and one small run against transformers."""

import json
import sys
from pathlib import Path

import pytest

from jaxspec.bench import peers
from jaxspec.bench.peers import OURS, PEER, PEER_BF16, main, measure, summary
from jaxspec.errors import ConfigError


def test_summary_takes_medians_and_ratios_within_a_turn() -> None:
    row = summary(8, {OURS: [30.0, 10.0, 20.0], PEER: [10.0, 10.0, 10.0], PEER_BF16: [15.0, 1.0, 40.0]})
    assert row == {
        "batch": 8,
        "tok/s": {OURS: 20.0, PEER: 10.0, PEER_BF16: 15.0},
        "ratio": {PEER: 2.0, PEER_BF16: 2.0},
    }


def test_systems_take_turns_after_a_warm_up() -> None:
    calls = []

    def system(name: str) -> peers.Generate:
        def generate() -> int:
            calls.append(name)
            return 6

        return generate

    speeds = measure({OURS: system(OURS), PEER: system(PEER)}, 6, repeats=2)
    assert calls == [OURS, PEER] * 3
    assert {name: len(listed) for name, listed in speeds.items()} == {OURS: 2, PEER: 2}


def test_unequal_work_is_not_compared() -> None:
    with pytest.raises(ConfigError, match=f"{PEER} generated 5 tokens, not 6"):
        measure({OURS: lambda: 6, PEER: lambda: 5}, 6, repeats=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,0"], "--batches must be numbers from 1 up"),
        (["--batches", "many"], "--batches must be numbers from 1 up"),
        (["--repeats", "0"], "--repeats"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_without_transformers_one_line_says_what_to_install(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["--model", str(tiny_model)]) == 2
    shown = capsys.readouterr().err
    assert "jaxspec[parity]" in shown
    assert shown.count("\n") == 1


@pytest.mark.parity
def test_prints_a_row_a_batch_and_writes_json(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    file = tmp_path / "peers.json"
    options = ["--model", str(tiny_model), "--tokens", "6", "--batches", "1,3", "--repeats", "1", "--bfloat16"]
    assert main([*options, "--prompt", "the sea", "--json", str(file)]) == 0
    assert "transformers" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["new_tokens"] == 6
    assert [row["batch"] for row in figures["rows"]] == [1, 3]
    for row in figures["rows"]:
        assert set(row["ratio"]) == {PEER, PEER_BF16}
        assert row["ratio"][PEER] == pytest.approx(row["tok/s"][OURS] / row["tok/s"][PEER])


@pytest.mark.slow
@pytest.mark.parity
def test_questions_of_all_lengths_are_answered_by_both(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Padding changes no text of transformers, so both really answer the same."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    questions = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": c, "turns": ["the sea " * (3 * i + 1)]} for i, c in enumerate("aab")]
    questions.write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "peers.json"
    options = ["--model", str(tiny_model), "--tokens", "4", "--batches", "2", "--repeats", "1", "--json", str(file)]
    assert main([*options, "--prompts", str(questions), "--questions", "3"]) == 0
    assert "3 prompts of" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["prompt_tokens"]) == 3
    model = peers.load_transformers(tiny_model)
    prompts, answers = [[5, 6, 7], [8]], []
    generate = model.generate
    model.generate = lambda *args, **kwargs: answers.append(generate(*args, **kwargs)) or answers[-1]
    assert peers.theirs(model, prompts, 2, 4)() == 8
    assert peers.theirs(model, [prompts[1]], 1, 4)() == 4
    assert torch.equal(answers[0][1, -4:], answers[1][0, -4:])
