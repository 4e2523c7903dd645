"""`jaxspec bench decode` on a tiny model: table, JSON, plot, interruption, errors."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from jaxspec.bench import decode
from jaxspec.bench.costs import Costs
from jaxspec.bench.engine import Bench, Measured, Sizes
from jaxspec.cli import main

FIELDS = {
    "drafter",
    "category",
    "tokens_per_second",
    "tau",
    "acceptance_rate",
    "acceptance_by_position",
    "speedup",
    "draft_cost",
    "verify_cost",
    "predicted_speedup",
    "leviathan_speedup",
}


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run `jaxspec bench decode` on three questions; returns exit code, stdout, stderr."""
    questions = [("copy", "the sea the sea the sea the sea"), ("qa", "she sells"), ("copy", "blue sky blue sky blue")]
    path = tmp_path / "q.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question_id": i, "category": category, "turns": [text, "and then?"], "reference": []})
            for i, (category, text) in enumerate(questions)
        )
    )

    def call(*arguments: str) -> tuple[int, str, str]:
        common = ["--model", str(tiny_model), "--prompts", str(path), "--max-tokens", "16", "--repeats", "2"]
        code = main(["bench", "decode", *common, *arguments])
        return code, *capsys.readouterr()

    return call


def test_table_and_rows(run, tmp_path: Path) -> None:
    one_letter = ["--logit-bias", "70:99"]  # what a model with random weights writes has no repetitions
    code, out, err = run("--ignore-eos", "--json", str(tmp_path / "rows.json"), "--no-draft-adaptive", *one_letter)
    assert code == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["category"], row["drafter"]) for row in rows] == [
        (category, drafter) for category in ("copy", "qa", "all") for drafter in ("none", "ngram")
    ]
    for row in rows:
        assert set(row) > FIELDS
        assert (row["tokens"], row["same_text"]) == (16 * row["questions"], 1.0)
        assert row["predicted_speedup"] == pytest.approx(row["tau"] / (row["draft_cost"] + row["verify_cost"]))
        assert (row["batch"], row["max_tokens"], row["repeats"], row["temperature"]) == (1, 16, 2, 0.0)
    assert [row["speedup"] for row in rows[::2]] == [1.0, 1.0, 1.0]
    assert [row["tau"] for row in rows[::2]] == [1.0, 1.0, 1.0]
    assert rows[5]["acceptance_by_position"] == [1.0] * 7
    assert rows[5]["tau"] > 2
    assert "τ" in out
    assert out.count("ngram") == 5
    assert "3 questions, 2 drafters, 2 repeats" in err
    assert all(len(line) <= 80 for line in out.splitlines())


def test_plot(run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("--drafter", "none", "--categories", "qa", "--plot", str(tmp_path / "p.png"))[0] == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run("--plot", str(tmp_path / "p.bmpx"))
    assert (code, err.count("\n")) == (2, 1)
    assert ".png" in err


def test_ctrl_c_prints_what_is_done(run, monkeypatch, tmp_path: Path) -> None:
    whole, asked = decode.answer, []

    def answer(engine, group, params):
        asked.append(group)
        if len(asked) == 5:  # one warm-up each, then the first group of both, then half of the second
            raise KeyboardInterrupt
        return whole(engine, group, params)

    monkeypatch.setattr(decode, "answer", answer)
    monkeypatch.setattr(
        "jaxspec.commands.bench_decode.measure_costs",
        lambda engines, *_: dict.fromkeys(engines, Costs(0.0, 0.0, {8: 1.0}, 7)),
    )
    code, out, err = run("--json", str(tmp_path / "rows.json"))
    assert code == 130
    assert err.splitlines()[-1] == "interrupted: the table holds what was measured"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["category"], row["questions"], row["drafter"]) for row in rows] == [
        (category, 1, drafter) for category in ("copy", "all") for drafter in ("none", "ngram")
    ]
    assert "copy" in out
    asked[:] = [None] * 3
    code, out, err = run()
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted: nothing is measured yet"


def test_a_configuration_stands_between_flags_and_defaults(run, tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text("[sampling]\ntemperature = 0.5\nmax_tokens = 5\n[engine]\nmax_batch = 2\n")
    out = tmp_path / "rows.json"
    arguments = ["--drafter", "none", "--config", str(config), "--json", str(out), "--categories", "copy"]
    assert run(*arguments, "--ignore-eos")[0] == 0
    row = json.loads(out.read_text())[-1]
    assert (row["temperature"], row["batch"], row["max_tokens"], row["tokens"]) == (0.5, 2, 16, 32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "none,gram"], "no drafter named 'gram'"),
        (["--drafter", ","], "--drafter needs a name"),
        (["--categories", "poetry"], "no questions of category 'poetry' (there are: copy, qa)"),
        (["--prompts", "nope"], "no prompts config named 'nope'"),
        (["--prompts", "nope.jsonl"], "cannot read nope.jsonl"),
        (["--n", "2"], "leave out --n"),
        (["--repeats", "0"], "--repeats"),
        (["--max-tokens", "0"], "max_tokens must be 1 or more"),
        (["--json", "nowhere/rows.json"], "there is no folder nowhere"),
        (["--max-context", "10"], "question 0: the prompt has"),
    ],
)
def test_errors_are_one_line(run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_without_matplotlib_nothing_is_run(run, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, err = run("--plot", str(tmp_path / "p.png"))
    assert (code, out) == (2, "")
    assert err == "error: --plot needs matplotlib: pip install 'jaxspec[plots]'\n"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--drafter", "--limit-per-category", "jaxspec bench decode", "Predicted", "--batch", "--ngram-max"):
        assert word in text
    assert text.count("│ --max-tokens") == 1
    assert "--max-batch" not in text


def bench_engine(*arguments: str) -> int:
    return main(["bench", "engine", *arguments])


def test_a_scenario_of_the_engine(tiny_model, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(
        "jaxspec.commands.bench_engine.Bench", partial(Bench, sizes=Sizes(limit=200, crowd=3, answer=20))
    )
    common = ["--model", str(tiny_model), "--kv-memory", "0.002", "--json", str(tmp_path / "rows.json")]
    assert bench_engine("memory", *common) == 0
    out, err = capsys.readouterr()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["case"] for row in rows] == ["200 slots each", "pages of 16", "pages of 64"]
    for row in rows:
        assert (row["scenario"], row["model"], row["kv_memory"]) == ("memory", str(tiny_model), 0.002)
        assert row["peak_concurrency_ratio"] == row["peak_concurrency"] / rows[0]["peak_concurrency"]
        assert f"memory, {row['case']}: " in err
        assert row["case"] in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_ctrl_c_prints_the_cases_that_are_done(tiny_model, monkeypatch, capsys) -> None:
    def run(name: str, bench: Bench):
        yield from [Measured(name, "off", "off", {"seconds": 1.25})] * (name == "prefix")
        if name == "chunks":
            raise KeyboardInterrupt

    monkeypatch.setattr("jaxspec.commands.bench_engine.run", run)
    assert bench_engine("all", "--model", str(tiny_model)) == 130
    out, err = capsys.readouterr()
    assert "1.25" in out
    assert err.splitlines()[-1] == "interrupted: the tables hold what was measured"
    assert bench_engine("chunks", "--model", str(tiny_model)) == 130
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "interrupted: nothing is measured yet")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "no scenario named 'speed' (there are: all, memory, prefix, chunks, throughput, formats, offload)"),
        (["memory", "--prompts", "nope"], "no prompts config named 'nope'"),
        (["memory", "--json", "nowhere/rows.json"], "there is no folder nowhere"),
        (["memory", "--kv-memory", "0"], "kv_memory must be above 0"),
        (["memory"], "takes a context of 1024 tokens"),
    ],
)
def test_errors_of_the_engine_bench_are_one_line(tiny_model, arguments: list[str], said: str, capsys) -> None:
    assert bench_engine(*arguments, "--model", str(tiny_model)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_help_of_the_engine_bench_teaches(capsys) -> None:
    assert bench_engine("--help") == 0
    text = capsys.readouterr().out
    for word in ("memory", "prefix", "chunks", "throughput", "jaxspec bench engine all", "--repeats", "contiguous"):
        assert word in text
