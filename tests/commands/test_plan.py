"""`jaxspec plan kv` as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.cli import main


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kv", "--model", "llama-3.3-70b", "--context", "8192", "--batch", "32"]) == 0
    printed = capsys.readouterr()
    assert "85.90" in printed.out
    assert "327,680" in printed.out
    assert printed.err == ""


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--context 128000 --batch 1 --kv-dtype bfloat16 --weights int8 --page-size 64 --memory 80.5 --json"
    assert main(["plan", "kv", "--model", "llama-3.3-70b", *options.split()]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["kv_bytes"] == 41_943_040_000
    assert (fields["weights"], fields["page_size"]) == ("int8", 64)
    assert fields["memory_bytes"] == 80.5 * 2**30
    assert fields["fits"] is False


def test_a_model_of_ones_own(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kv", "--model", str(tiny_model / "config.json"), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["attention"], fields["context"], fields["batch"]) == ("GQA", 256, 1)
    assert fields["bytes_per_token"] == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "llama-9"], "llama-3.3-70b"),
        (["--kv-dtype", "int3"], "no kv_dtype named 'int3'"),
        (["--weights", "int3"], "no weights named 'int3'"),
        (["--context", "9000"], "8192 tokens"),
        (["--batch", "0"], "batch must be 1"),
        (["--memory", "0"], "memory must be above 0 GiB"),
        (["--memory", "nan"], "memory must be above 0 GiB"),
        (["--memory", "1e308"], "memory must be"),
        (["--batch", "many"], "--batch"),
        (["--model", "deepseek-v3", "--kv-dtype", "int4"], "kv_dtype int4"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kv", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_help_comes_without_jax() -> None:
    code = (
        "import sys; from jaxspec.cli import main; main(['plan', 'kv', '--help']); "
        "main(['plan', 'kv', '--memory', '0']); sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "llama-3.3-70b" in done.stdout
