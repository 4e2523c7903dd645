"""`jaxspec bench kv` on a tiny model: table, JSON, plot, interruption, errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.bench import kv
from jaxspec.bench.kv import Bench, Case, Sizes
from jaxspec.cli import main
from jaxspec.commands import bench_kv
from jaxspec.config import EngineConfig

FIELDS = {
    "weights",
    "kv_dtype",
    "bytes_per_token",
    "compression",
    "tokens_per_second",
    "perplexity",
    "perplexity_change",
    "agreement",
    "kl",
    "passkey",
}


@pytest.fixture
def run(tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run `jaxspec bench kv` on two short windows; returns exit code, stdout, stderr."""

    def small(config: EngineConfig, cases: list[Case], text: str, sizes: Sizes) -> Bench:
        return Bench(config, cases, text, replace(sizes, batch=2, context=40, answer=12, depths=(0.0, 1.0)))

    monkeypatch.setattr(bench_kv, "Bench", small)

    def call(*arguments: str) -> tuple[int, str, str]:
        common = [
            "--model",
            str(tiny_model),
            "--tokens",
            "250",
            "--window",
            "128",
            "--passkey",
            "240",
            "--repeats",
            "1",
        ]
        code = main(["bench", "kv", *common, *arguments])
        return code, *capsys.readouterr()

    return call


def test_table_rows_and_plot(run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = "float32", "bfloat16"
    files = tmp_path / "rows.json", tmp_path / "p.png"
    code, out, _ = run("--formats", ",".join(names), "--json", str(files[0]), "--plot", str(files[1]))
    assert code == 0
    rows = json.loads(files[0].read_text())
    assert [(row["weights"], row["kv_dtype"]) for row in rows] == [("float32", name) for name in names]
    for row in rows:
        assert set(row) > FIELDS
        assert (row["window"], row["repeats"], row["tokens"]) == (128, 1, 254)
        assert row["kv_dtype"] in out
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "…" not in out


def test_policies_have_a_table_of_their_own_and_a_plot(run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    options = ["--formats", "float32", "--policies", "full,sinks", "--kv-window", "60", "--reach", "640"]
    code, out, _ = run(*options, "--plot", str(file))
    assert code == 0
    assert "the model was trained for 256" in " ".join(out.split())
    assert out.count("float32 sinks") == 2
    assert all(len(line) <= 80 for line in out.splitlines())
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_weights_are_compared_with_the_first_format(run, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--formats", "float32", "--weights", "float32,int8", "--passkey", "", "--json", str(file)]
    assert run(*options)[0] == 0
    rows = json.loads(file.read_text())
    assert [(row["weights"], row["kv_dtype"]) for row in rows] == [("float32", "float32"), ("int8", "float32")]
    assert rows[1]["kl"] > 0
    assert (rows[0]["passkey"], rows[0]["passkey_places"]) == (None, [])


def test_ctrl_c_prints_what_is_done(run, monkeypatch, tmp_path: Path) -> None:
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kv, "retrieve", interrupted)
    file = tmp_path / "rows.json"
    code, out, err = run("--formats", "float32,bfloat16", "--json", str(file))
    assert code == 130
    assert err.splitlines()[-1] == "interrupted: the table holds what was measured"
    rows = json.loads(file.read_text())
    assert all(row["tokens_per_second"] > 0 and row["perplexity"] is None for row in rows)
    assert "bfloat16" in out
    monkeypatch.setattr(Bench, "measure", interrupted)
    code, out, err = run("--formats", "float32")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted: nothing is measured yet"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--formats", "float32,int3"], "no kv_dtype named 'int3' (there are: auto, bfloat16"),
        (["--formats", ","], "need a name each"),
        (["--weights", "float32,int3"], "no quantised weights named 'int3'"),
        (["--window", "100"], "--window must be a multiple of 64"),
        (["--reach", "100"], "--reach must be a multiple of 64"),
        (["--policies", "h3o"], "no kv_policy named 'h3o'"),
        (["--window", "512"], "was trained for 256"),
        (["--tokens", "0"], "--tokens"),
        (["--passkey", "long"], "--passkey takes numbers of tokens"),
        (["--passkey", "20"], "more than 20"),
        (["--passkey", "1000"], "1008 tokens of context"),
        (["--text", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--json", "nowhere/rows.json"], "there is no folder nowhere"),
        (["--kv-memory", "0"], "kv_memory must be above 0"),
    ],
)
def test_errors_are_one_line(run, arguments: list[str], said: str) -> None:
    code, out, err = run("--formats", "float32", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--formats", "--weights", "--window", "--passkey", "jaxspec bench kv --json", "Perplexity", "KL"):
        assert word in text
