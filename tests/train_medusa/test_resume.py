"""A run that is killed and goes on ends in the parameters, bit for bit, of one that was left alone."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.errors import LoadError
from train_medusa.__main__ import main
from train_medusa.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("unoptimised")
ROOT = Path(__file__).parents[2]
STEPS, EVERY = 60, 7
START = """
import sys
sys.modules["matplotlib"] = None  # as below
from train_medusa.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
CONFIG = """
model = "{model}"
output = "{output}"
[data]
files = ["{data}"]
row = 48
held_out = 0.1
[heads]
count = 2
conditioned = 16
vocab = 100
[train]
steps = {steps}
batch = 3
accumulate = 2
lr = 0.01
checkpoint_every = {every}
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure at each checkpoint would take longer than all else, and so would the evaluation."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("train_medusa.__main__._evaluate", lambda *_: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"prompt": "the sea", "answer_ids": rng.integers(3, 300, rng.integers(8, 20)).tolist()} for _ in range(30)]
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def write(tiny_model: Path, data: Path, tmp_path: Path):
    def config(name: str, steps: int = STEPS) -> Path:
        path, fields = tmp_path / f"{name}.toml", {"model": tiny_model, "output": tmp_path / name, "data": data}
        path.write_text(CONFIG.format(**fields, steps=steps, every=EVERY))
        return path

    return config


def parameters(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint, optimiser included."""
    last = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    assert last == STEPS
    tree = ocp.StandardCheckpointer().restore(folder / "checkpoints" / str(last) / "state")
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def metrics(folder: Path) -> list[dict]:
    """Without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def kill_within(config: Path, folder: Path, after: int) -> None:
    """Starts a run and kills it once it has told of step `after` and has a checkpoint: anywhere between two."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", START, str(config)], env=env, stderr=subprocess.PIPE)
    path, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    try:
        while run.poll() is None:
            lines = path.read_bytes().splitlines() if path.exists() else []
            saved = checkpoints.exists() and any(entry.name.isdigit() for entry in checkpoints.iterdir())
            if saved and any(json.loads(line)["step"] >= after for line in lines[:-1]):
                break
            time.sleep(0.002)
    finally:
        run.kill()
        _, err = run.communicate()
    assert run.returncode == -9, err


def test_killed_at_any_step_and_resumed_it_ends_in_the_same_bits(write, tmp_path: Path, capsys) -> None:
    """The run that is left alone is in the same folder, begun anew."""
    folder, config = tmp_path / "run", write("run")
    after = random.SystemRandom().randint(EVERY, STEPS // 2)
    kill_within(config, folder, after)
    assert not (folder / "heads").exists()
    assert main([str(config)]) == 0
    assert "going on from the checkpoint of step" in capsys.readouterr().err, after
    resumed, heads, rows = parameters(folder), (folder / "heads" / "model.safetensors").read_bytes(), metrics(folder)
    assert main([str(config), "--restart"]) == 0
    assert "going on" not in capsys.readouterr().err
    whole = parameters(folder)
    assert resumed.keys() == whole.keys()
    for path, array in whole.items():
        np.testing.assert_array_equal(resumed[path], array, err_msg=f"{path}, killed after step {after}")
    assert (folder / "heads" / "model.safetensors").read_bytes() == heads
    assert metrics(folder) == rows
    keys = [(row["step"], row["split"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {step for step, split in keys if split == "held_out"} == {*range(EVERY, STEPS, EVERY), STEPS}
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {str(STEPS), str(STEPS // EVERY * EVERY)}, "only the last two"

    assert main([str(write("run", steps=STEPS + 2))]) == 2
    assert f"holds checkpoints of another run (steps was {STEPS}, now is {STEPS + 2})" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    state = {"a": jax.numpy.arange(8.0)}
    with Checkpoints(tmp_path / "checkpoints", {"seed": 1}) as checkpoints:
        checkpoints.save(3, state, {"next": 5})
    like = {"a": jax.ShapeDtypeStruct((8,), np.float32, sharding=state["a"].sharding)}
    with Checkpoints(tmp_path / "checkpoints", {"seed": 1}) as checkpoints:
        assert checkpoints.latest == 3
        found, data = checkpoints.restore(3, like)
        assert found["a"].tolist() == state["a"].tolist()
        assert data == {"next": 5}
    for path in (tmp_path / "checkpoints" / "3" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with (
        Checkpoints(tmp_path / "checkpoints", {"seed": 1}) as checkpoints,
        pytest.raises(LoadError, match=r"checkpoint .*3 cannot be read .*--restart"),
    ):
        checkpoints.restore(3, like)
