"""The command as a whole: help, version, exit codes, one-line errors."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from jaxspec.cli import main


def test_help_and_options_come_without_jax():
    code = (
        "import sys; from jaxspec.cli import main; main(['generate', '--help']); "
        "main(['generate', '--top-p', '2', 'x']); "
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("jaxspec")


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_help_shows_every_field_of_a_request_and_of_the_engine(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in (
        "--temperature",
        "--include-stop-str-in-output",
        "--no-skip-special-tokens",
        "--kv-memory",
        "--config",
    ):
        assert flag in shown
    assert "Default: smollm2-135m" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "frobnicate"),
        (["generate", "--temprature", "1", "x"], "--temperature"),
        (["generate", "--max-tokens", "many", "x"], "--max-tokens"),
        (["generate", "--temperature", "-1", "x"], "temperature must be 0"),
        (["generate", "--top-p", "0", "x"], "top_p must be in (0, 1]"),
        (["generate", "--max-tokens", "0", "x"], "max_tokens must be 1"),
        (["generate", "--max-batch", "0", "x"], "max_batch must be 1"),
        (["generate", "--logit-bias", "5", "x"], "ID:VALUE"),
        (["generate", "--config", "nope", "x"], "there are: creative"),
        (["generate", "--config", "nope.toml", "x"], "nope.toml"),
        (["generate", ""], "prompt 1 is empty"),
        (["generate", "--file", "nope.txt"], "cannot read nope.txt"),
        (["generate", "--raw", "--system", "s", "x"], "--system"),
        (["generate", "--model", "/nowhere/at/all.gguf", "x"], "/nowhere/at/all.gguf"),
        (["batch", "nope.jsonl", "out.jsonl"], "cannot read nope.jsonl"),
        (["batch", "same.jsonl", "./same.jsonl"], "same file"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert not list(tmp_path.iterdir())
