"""`jaxspec bench kernels`: table, JSON, interruption, errors."""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench import kernels
from jaxspec.bench.kernels import Row
from jaxspec.cli import main
from jaxspec.commands import bench_kernels
from jaxspec.plan import topology

FIELDS = {"name", "kernel", "dtype", "queries", "bundles", "hbm_cycles", "spills", "vmem", "dmas", "seconds", "refused"}

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def run(*arguments: str) -> int:
    return main(["bench", "kernels", *arguments])


@needs_compiler
def test_table_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    names = "attention,append,commit,paged_attention,ragged_paged_attention"
    options = ["--shape", "llama-70b-tp8", "--dtype", "bfloat16", "--queries", "4", "--kernels", names]
    assert run("--topology", "v5e:2x4", "--json", str(file), *options) == 0
    out, err = capsys.readouterr()
    rows = {row["kernel"] if row["kernel"] != "jaxspec" else row["name"]: row for row in json.loads(file.read_text())}
    assert list(rows) == names.split(",")
    assert all(set(row) > FIELDS for row in rows.values())
    own = rows["attention"]
    assert own["hbm_cycles"] == 7682  # 960 for each 1,024 tokens
    assert 0 < own["per_1024"] < 960
    assert 8 * own["per_1024"] < own["bundles"] < own["hbm_cycles"]
    assert own["spills"] == 0
    assert own["dmas"] >= 8192 // own["page"]
    assert own["temp_bytes"] < 2**20
    assert rows["ragged_paged_attention"]["bundles"] > 0
    assert rows["append"]["bundles"] > 0
    assert rows["commit"]["spills"] == 0
    assert rows["paged_attention"]["refused"] == "one query token a sequence"
    assert "jax paged refuses llama-70b-tp8 bfloat16, T 4:\n  one query token a sequence" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "…" not in out
    assert err.count("\n") == len(rows)


def test_ctrl_c_prints_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    def measure(cases: Sequence[Any]) -> Iterator[Row]:
        yield kernels._row(cases[0], {"refused": "no reason"})
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "devices_of", lambda topology: [])
    monkeypatch.setattr(bench_kernels, "measure", measure)
    file = tmp_path / "rows.json"
    assert run("--json", str(file)) == 130
    out, err = capsys.readouterr()
    assert [row["refused"] for row in json.loads(file.read_text())] == ["no reason"]
    assert "no reason" in out
    assert "interrupted: the tables hold what was compiled" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "v9:2x2"], "no chip named 'v9' (there are: v4, v5e"),
        (["--topology", "v6e"], "such as v6e:2x4, not 'v6e'"),
        (["--shape", "gpt"], "--shape takes llama-70b-tp8, llama-8b, smollm2, gemma, not gpt"),
        (["--json", "nowhere/rows.json"], "there is no folder nowhere"),
        pytest.param(["--topology", "v5e:3x5"], "no TPU topology 'v5e:3x5'", marks=needs_compiler),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err.replace("\n", "")


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    topology.devices_of.cache_clear()
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    assert run() == 2
    assert capsys.readouterr().err == "error: compiling for TPUs needs libtpu: pip install 'jaxspec[tpu]'\n"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for word in ("--topology", "--queries", "jaxspec bench kernels", "spilled", "--json", "v5p:2x2x2"):
        assert word in text
