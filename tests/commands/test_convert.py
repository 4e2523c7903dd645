"""`jaxspec convert` on a tiny model with random weights."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.cli import main
from jaxspec.models import saving


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run `jaxspec convert` to OUT; returns exit code, stdout and stderr."""

    def call(*options: str, source: str = str(tiny_model), out: str = "out") -> tuple[int, str, str]:
        code = main(["convert", source, str(tmp_path / out), *options])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("layout", saving.LAYOUTS)
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_the_new_folder_answers_alike(run, tiny_model, tmp_path, layout, weights):
    code, out, err = run("--format", layout, "--weights", weights)
    assert (code, err) == (0, "")
    prompts, params = ["the sea", "she sells"], SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    texts = [
        [
            output.text
            for answer in LLM(model, weights=asked).generate(prompts, params, False)
            for output in answer.outputs
        ]
        for model, asked in ((str(tmp_path / "out"), "auto"), (str(tiny_model), weights))
    ]
    assert texts[0] == texts[1]
    assert out.count("\n") == 1


def test_what_was_written_is_told(run, tmp_path):
    assert run("--weights", "bfloat16")[1] == f"20 tensors, 0.000 GB, bfloat16: {tmp_path / 'out'}\n"


def test_shards(run, tmp_path):
    assert run("--max-shard-size", "0.0001")[0] == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        (["--format", "pickle"], {}, "the format must be safetensors or orbax, not 'pickle'"),
        (["--weights", "int3"], {}, "or int8, not 'int3'"),
        (["--max-shard-size", "0"], {}, "larger than 0 GB"),
        (["--max-shard-size", "big"], {}, "--max-shard-size"),
        ([], {"source": "/nowhere/model.gguf"}, "no such file: /nowhere/model.gguf"),
        ([], {"source": "nonsense"}, "no models config named 'nonsense'"),
        ([], {"out": "."}, "exists already: name a new folder, or remove it first"),
        ([], {"out": "none/out"}, "there is no folder"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(run, tmp_path, options, changes, said):
    code, out, err = run(*options, **changes)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", saving.LAYOUTS)
def test_an_interrupted_run_leaves_nothing(tiny_model, tmp_path, layout):
    """The signal comes while tensors are written: reading one takes half a second here."""
    code = (
        "import sys, time; from jaxspec.cli import main; from jaxspec.models.saving.leaves import Leaf\n"
        "def wait(self, advance):\n"
        "    def read(): print('reading', flush=True); time.sleep(0.5); return self.read()\n"
        "    return Leaf(self.parameter, self.dtype, read)\n"
        "Leaf.counted = wait; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "convert", str(tiny_model), str(tmp_path / "out"), "--format", layout]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "reading\n"
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip() == f"interrupted: {tmp_path / 'out'} was not made"
    assert list(tmp_path.iterdir()) == []
