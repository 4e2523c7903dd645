"""`jaxspec plan` and its commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.cli import main


def errors_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints."""
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


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
    assert said in errors_of(["kv", *options], capsys)


def test_help_comes_without_jax() -> None:
    code = (
        "import sys; from jaxspec.cli import main; main(['plan', 'kv', '--help']); "
        "main(['plan', 'kv', '--memory', '0']); sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "llama-3.3-70b" in done.stdout


STEP = "--model llama-3.3-70b --topology v6e:2x4 --batch 32 --context 8192 --weights int8 --kv-dtype int8"


def test_a_plan_for_a_slice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *STEP.split(), "--drafter", "draft_model:llama-3.1-8b"]) == 0
    printed = capsys.readouterr()
    assert "It fits into 31.25 GiB" in printed.out
    assert "Fastest: --draft-tokens" in printed.out
    assert printed.err == ""


def test_a_plan_for_a_slice_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    more = "--drafter ngram --tau 2.5 --draft-tokens 5 --prompt 8000 --efficiency 0.8 --data-parallel 2 --json"
    assert main(["plan", *STEP.split(), *more.split()]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["tau"], fields["draft_tokens"], fields["efficiency"]) == (2.5, 5, 0.8)
    assert (fields["prompt"], fields["data_parallel"], fields["devices"]) == (8000, 2, 8)
    assert fields["fits"] is True


def test_the_largest_batch_and_the_smallest_slice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *STEP.split(), "--fit", "batch", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    spare = fields["limit_bytes"] - fields["bytes_per_chip"]["total"]
    assert 0 <= spare < fields["bytes_per_chip"]["kv"] / (fields["batch"] - 1)
    assert main(["plan", *STEP.split(), "--fit", "slice", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] == "v6e:2x2"


def test_the_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model llama-3.1-8b --topology v5e:2x2 --requests 5 --draft-model llama-3.2-1b --efficiency 0.9"
    assert main(["plan", "ladder", *options.split()]) == 0
    assert "5 requests to llama-3.1-8b on v5e:2x2" in capsys.readouterr().out
    assert main(["plan", "ladder", *options.split(), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rungs"]) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--topology v6e:3x3", "no topology 'v6e:3x3'"),
        ("--topology v9:2x2", "no chip named 'v9'"),
        ("--topology v5e:2x4", "smollm2-135m: 9 query heads"),
        ("--drafter eagle", "'eagle' is no drafter"),
        ("--topology v6e:1x1 --draft-parallel replicated", "--draft-parallel is of a draft model"),
        ("--topology v6e:1x1 --draft-parallel some", "--draft-parallel must be sharded or replicated, not 'some'"),
        ("--topology v6e:1x1 --fit all", "--fit must be batch or slice, not 'all'"),
        ("--topology v6e:1x1 --acceptance 0.5", "choose a drafter"),
        ("--topology v6e:1x1 --efficiency 2", "efficiency must be above 0 and at most 1"),
        ("--topology h100:1 --compile", "compile is for TPUs: h100:1 has a roofline only"),
        ("--batch 3 kv", "options of plan kv come after its name"),
        ("ladder --requests 0", "requests must be 1 or more"),
    ],
)
def test_plans_that_cannot_be(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in errors_of(options.split(), capsys)


@pytest.mark.parametrize("option", ["--compile", "--fit batch"])
def test_weights_that_do_not_fit_are_refused_with_the_reason(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--model llama-3.3-70b --topology v5e:2x4 --batch 32 --context 8192 {option}"
    said = errors_of(options.split(), capsys)
    assert "in bfloat16 take 141 GB, 16.4 GiB on each of 8 devices of v5e:2x4, which have 15.75 GiB" in said


def test_help_of_plans_comes_without_jax() -> None:
    code = (
        "import sys; from jaxspec.cli import main; main(['plan', '--help']); main(['plan', 'ladder', '--help']); "
        "main(['plan', '--fit', 'all']); sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--draft-parallel" in done.stdout
    assert "jaxspec plan ladder" in done.stdout
