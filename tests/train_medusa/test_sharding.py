"""Training on eight devices: the losses of one device, with parameters copied to each or split over them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxspec.models.heads import HeadsSpec
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import init_params
from train_medusa.config import LearnConfig
from train_medusa.loss import Batch
from train_medusa.step import Frozen, Job, first_state, mesh_of, programs

jax.config.update("jax_disable_most_optimizations", True)
E, V, ROWS, ROW, STEPS = 32, 48, 8, 12, 3
model = ModelSpec(
    vocab_size=V, valid_vocab=V - 2, num_layers=1, embed_dim=E, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=40,
    norm_eps=1e-5, inv_freq=tuple(0.1**i for i in range(8)), max_context=64, tied_embeddings=True,
)
rng = np.random.default_rng(0)
segment = np.repeat([[1] * 5 + [2] * 6 + [0]], ROWS, axis=0).astype(np.int32)
position = np.array([[*range(5), *range(6), 0]] * ROWS, np.int32)
target = rng.random((ROWS, ROW)) < 0.7
batch = Batch(rng.integers(0, V - 2, (ROWS, ROW)).astype(np.int32), segment, position, target)
base, found = init_params(model, jax.random.key(1)), {}
one, data, fsdp = ("one", 1, False), ("data", 8, False), ("fsdp", 8, True)
runs = {
    "medusa-1": (HeadsSpec(2, E, 20, conditioned=16), (one, data, fsdp)),
    "medusa-2": (HeadsSpec(1, E, V), (one, fsdp)),
}
for method, (heads, ways) in runs.items():
    config = LearnConfig(method=method, steps=STEPS, batch=ROWS, lr=0.05, base_lr=0.01, chunk=16)
    for name, devices, fsdp in ways:
        train = msgspec.structs.replace(config, fsdp=fsdp)
        job = Job(train, heads, model, STEPS, mesh_of(jax.devices()[:devices]))
        some = {"token_map": jnp.arange(20, dtype=jnp.int32)} if heads.vocab < V else {}
        frozen = job.place(Frozen(base, some))
        drawn, like = first_state(job, 0)
        state, (step, _) = drawn(frozen), programs(job, like(frozen))[:2]
        losses = []
        for _ in range(STEPS):
            state, sums = step(state, frozen, job.feed(batch))
            losses.append([*sums.heads.loss.tolist(), *([] if sums.own is None else [float(sums.own.loss)])])
        kept = {
            jax.tree_util.keystr(path): [list(a.shape), list(a.addressable_shards[0].data.shape), len(a.devices())]
            for path, a in jax.tree.leaves_with_path(state)
        }
        found[f"{method} {name}"] = {"losses": losses, "kept": kept}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    flags = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | flags, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("method", "how"), [("medusa-1", "data"), ("medusa-1", "fsdp"), ("medusa-2", "fsdp")])
def test_the_losses_are_those_of_one_device(found: dict, method: str, how: str) -> None:
    one, several = (found[f"{method} {name}"]["losses"] for name in ("one", how))
    assert len({tuple(losses) for losses in one}) > 1, "it learns"
    for a, b in zip(one, several, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


@pytest.mark.parametrize("method", ["medusa-1", "medusa-2"])
def test_fsdp_splits_every_matrix_and_its_moments(found: dict, method: str) -> None:
    kept = found[f"{method} fsdp"]["kept"]
    split = {path for path, (shape, shard, _) in kept.items() if shard != shape}
    assert all(devices == 8 for _, _, devices in kept.values())
    for path in split:
        shape, shard, _ = kept[path]
        assert sum(shape) - sum(shard) == max(size for size in shape if size % 8 == 0) * 7 // 8
    whole = {path for path, (shape, _, _) in kept.items() if len(shape) > 1} - split
    assert not whole
    moments = [path for path in split if "mu" in path or "nu" in path]
    assert len(moments) == 2 * len([path for path in split if ".params" in path])


def test_else_each_device_has_all(found: dict) -> None:
    for shape, shard, devices in found["medusa-1 data"]["kept"].values():
        assert shard == shape
        assert devices == 8
