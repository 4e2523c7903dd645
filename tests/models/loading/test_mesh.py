"""Loading onto a mesh of eight devices: the arrays of one device, shared by two, four or eight of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from jaxspec.models.saving import convert

ROOT = Path(__file__).parents[3]
SIZES = {"head_dim": 128, "intermediate_size": 1024, "attention_bias": True, "mlp_bias": True}
"""Whole blocks of 128, and groups of 32, for each of eight devices; the vocabulary of 480 is no multiple of 128."""
SCRIPT = """
import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.loading import load_model
from jaxspec.models.quantization import BLOCK, Quantized
from jaxspec.models.sharding import partition
from jaxspec.parallel import mesh_of
from tests.driver import stack_layers


def shared(path, array, spec, true):
    # What an array of one device must be for a spec with more key/value heads or words.
    names = [key.key for key in path if hasattr(key, "key")]
    array = np.asarray(array)
    if "qkv" in names:
        heads, group = spec.num_kv_heads, spec.group
        found = np.empty((heads, group + 2, *array.shape[2:]), array.dtype)
        for k, g in np.ndindex(heads, group):
            head = k * group + g
            found[k, g] = array[head // true.group, head % true.group]
        for k in range(heads):
            found[k, group:] = array[k * true.num_kv_heads // heads, -2:]
        return found
    if names[0] in ("embed", "lm_head"):
        rows = spec.vocab_size if len(array) == true.vocab_size else spec.vocab_size // BLOCK
        return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))
    return array


def differences(found, expected, spec, true, mesh, replicated=False):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    wrong = []

    def compare(path, ours, theirs, how):
        name = jax.tree_util.keystr(path)
        if ours.sharding != NamedSharding(mesh, how):
            wrong.append(f"{name} is shared as {ours.sharding}")
        theirs = shared(path, theirs, spec, true)
        if ours.dtype != theirs.dtype or not np.array_equal(np.asarray(ours), theirs):
            wrong.append(f"{name} differs")
        for shard in ours.addressable_shards:
            if not np.array_equal(np.asarray(shard.data), theirs[shard.index]):
                wrong.append(f"{name} differs on {shard.device}")

    jax.tree.map_with_path(compare, found, expected, partition(found, replicated))
    return wrong


cases, wrong = json.loads(sys.argv[1]), []
for path, weights, packed, shares in cases:
    one = load_model(path, weights, packed=packed)
    for share in shares:
        mesh = mesh_of(share, 8 // share)
        many = load_model(path, weights, packed=packed, mesh=mesh)
        assert many.mesh is mesh and many.spec.num_kv_heads == max(2, share) and many.spec.vocab_size % share == 0
        case = f"{path} {weights} {packed} over {share}: "
        wrong += [case + text for text in differences(many.params, one.params, many.spec, one.spec, mesh)]
mesh = mesh_of(4)
for weights, size in (("float32", 1024), ("fp8_block", None)):
    one, copied = load_model(cases[0][0], weights, packed=True), {"mesh": mesh, "vocab_size": size, "replicated": True}
    copies = load_model(cases[0][0], weights, packed=True, **copied)
    if any(array.sharding.spec != PartitionSpec() for array in jax.tree.leaves(copies.params["layers"])):
        wrong.append("replicated layers are shared")
    wrong += differences(copies.params, one.params, copies.spec, one.spec, mesh, True)
for weights, packed in (("float32", True), ("int4", True), ("int4", False)):
    layered, stack = (load_model(cases[0][0], weights, False, packed, mesh, how).params for how in (False, True))
    for (where, ours), theirs in zip(
        jax.tree.leaves_with_path(stack), jax.tree.leaves(stack_layers(jax.device_get(layered))), strict=True
    ):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
            wrong.append(f"{weights} stack differs in {jax.tree_util.keystr(where)}")
    how = jax.tree.map(lambda array: array.sharding.spec, stack)
    if how != partition(stack) or how["layers"]["o"]["bias"] != PartitionSpec():
        wrong.append(f"{weights} stack is shared as {how}")
print(json.dumps(wrong))
"""


def test_eight_devices(folder: Any, gguf_file: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config | SIZES)
    one = folder(tensors, **SIZES)
    tied = tmp_path / "tied"
    changes = {"tie_word_embeddings": True}
    shutil.copytree(folder(random_tensors(tiny_config | changes), **changes), tied)
    folder(tensors, **SIZES)
    several = shutil.copytree(one, tmp_path / "several")
    (several / "model.safetensors").unlink()
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, several / file)
    (several / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    convert(str(one), tmp_path / "orbax", "orbax", progress=False)
    for scheme in ("int8", "int4", "fp8_block"):
        convert(str(one), tmp_path / scheme, weights=scheme, progress=False)
    convert(str(one), tmp_path / "orbax-int8", "orbax", "int8", progress=False)
    cases = [
        [one, "float32", True, [2, 4, 8]],
        [one, "bfloat16", True, [8]],
        [one, "int8", True, [2, 8]],
        [one, "int8", False, [4]],
        [one, "int4", True, [4, 8]],
        [one, "fp8_block", True, [2, 8]],
        [one, "fp8_block", False, [4]],
        [tied, "float32", True, [8]],
        [several, "float32", True, [4]],
        [gguf_file(tensors, **SIZES), "float32", True, [4, 8]],
        [tmp_path / "orbax", "float32", True, [4]],
        [tmp_path / "orbax-int8", "auto", True, [4]],
        [tmp_path / "int8", "auto", True, [4]],
        [tmp_path / "int4", "auto", True, [8]],
        [tmp_path / "int4", "auto", False, [2]],
        [tmp_path / "fp8_block", "auto", True, [2, 4]],
    ]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases, default=str)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
