"""What one process of several reads: the parts of its own devices, and little more memory than they take."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec.config import find_config
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import Part, llama
from jaxspec.models.loading import Checkpoint, load_model, open_model, read_model, read_model_config
from jaxspec.models.loading.home import Home
from jaxspec.models.loading.safetensors import SafetensorsSource
from jaxspec.models.loading.stream import ProgressBar
from jaxspec.models.quantization import Quantized, dequantize
from jaxspec.models.sharding import partition, shared_dimension
from tests.driver import stack_layers

SIZES = {"head_dim": 128, "intermediate_size": 1024, "vocab_size": 1024, "num_key_value_heads": 8}
"""As they are shared by eight devices: nothing to be repeated or padded."""
BIASES = {"attention_bias": True, "mlp_bias": True}
FLOAT32 = np.dtype(np.float32)


def read_for(found: Checkpoint, devices: int, own: tuple[int, ...], scheme: str | None = None) -> list[Any]:
    """The parameters that a process reads for its own devices, as each of these has them."""

    def put(shards: list[np.ndarray], spec: PartitionSpec) -> list[np.ndarray]:
        return list(shards) if shared_dimension(spec) is not None else [shards[0]] * len(own)

    params = read_model(found, found.spec.spread(devices), FLOAT32, scheme, Home(devices, own, put))
    return [jax.tree.map(lambda parts, at=at: parts[at], params, is_leaf=is_list) for at in range(len(own))]


def is_list(node: Any) -> bool:
    return isinstance(node, list)


def part_of(params: Any, device: int, devices: int) -> Any:
    """What one of the devices has of the arrays of a single one."""

    def part(array: np.ndarray, spec: PartitionSpec) -> np.ndarray:
        shared = shared_dimension(spec)
        return np.asarray(array) if shared is None else np.split(np.asarray(array), devices, shared)[device]

    return jax.tree.map(part, params, partition(params))


def assert_trees_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of each tensor that are read from safetensors."""
    read: Counter[str] = Counter()
    rows = SafetensorsSource.rows

    def counted(self: SafetensorsSource, name: str, *which: Any) -> np.ndarray:
        found = rows(self, name, *which)
        read[name] += found.nbytes
        return found

    monkeypatch.setattr(SafetensorsSource, "rows", counted)
    return read


@pytest.mark.parametrize("own", [(0,), (5,), (2, 3), (1, 6), tuple(range(8))])
@pytest.mark.parametrize("chunk", [3000, 2**19])
def test_a_process_reads_what_its_devices_have(
    own: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch, folder: Any, read: Counter[str]
) -> None:
    monkeypatch.setattr("jaxspec.models.loading.shards.CHUNK", chunk)
    path = str(folder(**SIZES, **BIASES))
    one = load_model(path).params
    read.clear()
    found = read_for(open_model(path), 8, own)
    for device, params in zip(own, found, strict=True):
        assert_trees_equal(params, part_of(one, device, 8))
    if own == (1, 6):  # what lies between the columns of two devices is read with them
        return
    alike = sum(
        array.nbytes * (1 if spec == PartitionSpec() else len(own))
        for array, spec in zip(jax.tree.leaves(found[0]), jax.tree.leaves(partition(found[0])), strict=True)
    )
    assert read.total() == alike


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8_block"])
def test_rows_are_read_whole_where_they_share_a_scale(scheme: str, folder: Any, read: Counter[str]) -> None:
    path = str(folder(**SIZES))
    one = load_model(path, scheme, packed=True).params
    whole = dict(read)
    read.clear()
    for device, params in zip((2, 3), read_for(open_model(path), 8, (2, 3), scheme), strict=True):
        assert_trees_equal(params, part_of(one, device, 8))
    for name, size in read.items():
        in_full = name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight"))
        assert size == (whole[name] if in_full else whole[name] // 4), name


def test_repeated_heads_and_padded_words(folder: Any, read: Counter[str]) -> None:
    """Two devices to a key/value head, and the last ones with fewer words than others or none."""
    found = open_model(str(folder(**SIZES | {"num_key_value_heads": 4, "vocab_size": 500})))
    one = read_for(found, 1, (0,))[0]
    read.clear()
    for device in range(8):
        params = read_for(found, 8, (device,))[0]
        joined, whole = params["layers"][1]["qkv"]["weight"], one["layers"][1]["qkv"]["weight"]
        np.testing.assert_array_equal(joined, whole[device // 2, [device % 2, 2, 3]][None])
        rows = one["lm_head"]["weight"][device * 128 : (device + 1) * 128]
        np.testing.assert_array_equal(params["lm_head"]["weight"], np.pad(rows, ((0, 128 - len(rows)), (0, 0))))
    for name, size in read.items():
        times = 8 if name.endswith("norm.weight") else 2 if "k_proj" in name or "v_proj" in name else 1
        assert size == times * 4 * math.prod(found.source.shapes[name]), name


@pytest.mark.parametrize(("weights", "packed"), [("float32", True), ("int4", True), ("int4", False)])
def test_a_stack_of_layers(weights: str, packed: bool, folder: Any) -> None:
    path = str(folder(**BIASES))
    layered, stack = (load_model(path, weights, packed=packed, stacked=how).params for how in (False, True))
    assert_trees_equal(stack, stack_layers(layered))


@pytest.mark.parametrize(("weights", "less"), [("float32", 482), ("fp8_block", 512)])
def test_the_vocabulary_of_another_model(weights: str, less: int, folder: Any) -> None:
    path = str(folder(vocab_size=600))
    own = load_model(path, weights, packed=True)
    for size in (less, 600, 1024):
        model = load_model(path, weights, packed=True, vocab_size=size)
        assert (model.spec.vocab_size, model.spec.vocab_size - model.spec.added_vocab) == (size, 600)
        for name in ("embed", "lm_head"):
            numbers, expected = (as_numbers(params[name]["weight"]) for params in (model.params, own.params))
            assert numbers.shape == (size, 64)
            np.testing.assert_array_equal(numbers[:600], expected[:size])
            assert not numbers[600:].any()
    known = own.spec.valid_vocab
    assert known < less
    with pytest.raises(LoadError, match=f"its tokenizer has {known} tokens: they cannot be cut to {known - 1}"):
        load_model(path, vocab_size=known - 1)


def as_numbers(weight: Any) -> np.ndarray:
    return np.asarray(dequantize(weight, FLOAT32) if isinstance(weight, Quantized) else weight)


@pytest.mark.parametrize(
    ("devices", "weights", "sizes", "message"),
    [
        (3, "float32", {}, "8 query heads.* cannot be shared by 3 devices: take 1, 2, 4"),
        (
            8,
            "float32",
            {"intermediate_size": 1020},
            "1020 features of the MLP cannot be shared by 8 devices: take 1, 2, 4",
        ),
        (
            4,
            "int4",
            {"head_dim": 8},
            "o_proj.weight has 16 inputs on each of 4 devices, not a multiple of the 32 .*fewer",
        ),
        (8, "int4", {"intermediate_size": 640}, "has 80 inputs on each of 8 devices, not a multiple of the 32 .*int8"),
        (
            8,
            "fp8_block",
            {"head_dim": 64},
            "o_proj.weight has 64 inputs on each of 8 devices, not a multiple of the 128",
        ),
        (
            8,
            "fp8_block",
            {"intermediate_size": 1536},
            "has 192 (inputs|rows) on each of 8 devices, not a multiple of the 128",
        ),
    ],
)
def test_what_cannot_be_shared(devices: int, weights: str, sizes: Any, message: str, folder: Any) -> None:
    found = open_model(str(folder(**SIZES | sizes)))
    scheme = None if weights == "float32" else weights
    with pytest.raises((ConfigError, LoadError), match=message) as caught:
        read_for(found, devices, (0,), scheme)
    assert "\n" not in str(caught.value)


def test_the_bar_counts_the_share(monkeypatch: pytest.MonkeyPatch, folder: Any) -> None:
    totals, done = [], []

    class Bar(ProgressBar):
        def __init__(self, what: str, total: int, enabled: bool) -> None:
            super().__init__(what, total, enabled)
            totals.append(total)

        def advance(self, elements: int) -> None:
            done.append(elements)

    monkeypatch.setattr("jaxspec.models.loading.stream.ProgressBar", Bar)
    for scheme in (None, "int8"):
        found = read_for(open_model(str(folder(**SIZES))), 8, (3,), scheme)
        assert totals.pop() == sum(done) == sum(array.size for array in jax.tree.leaves(found))
        done.clear()


LAYERS = 80
BF16 = 2
MEASURE = """
import json, re, sys
from pathlib import Path

import jax, numpy as np
from jaxspec.models.loading import load_model, open_model, read_model
from jaxspec.models.loading.home import Home
from jaxspec.models.loading.safetensors import SafetensorsSource

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

tiny, path, scheme = sys.argv[1:]
read, rows = [], SafetensorsSource.rows

def counted(self, name, *which):
    found = rows(self, name, *which)
    read.append(found.nbytes)
    return found

SafetensorsSource.rows = counted
home = Home(64, (5,), lambda shards, spec: jax.device_put(shards[0], may_alias=True))
load_model(tiny, progress=False)  # imports, thread stacks and XLA's own start are no part of the growth
read.clear()
before = kib("VmRSS")
found = open_model(path)
params = read_model(found, found.spec.spread(64), np.dtype("bfloat16"), scheme or None, home)
share = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"share": share, "read": sum(read), "growth": (kib("VmHWM") - before) * 1024}))
"""


def llama_70b(folder: Path, layers: int, tokenizer: Path) -> None:
    """Llama-3.3-70B with fewer layers, as it is published, in files that hold nothing and take no room on the disk."""
    shape = read_model_config(find_config("models", "llama-3.3-70b")).shape
    config = dict(shape or {}) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(tokenizer / "tokenizer.json", folder)
    files: list[list[Part]] = [[]]
    for parameter in jax.tree.leaves(llama.parameters(llama.spec(config, 1000))):
        for part in parameter.parts:
            if BF16 * sum(math.prod(p.shape) for p in [*files[-1], part]) > 5e9:
                files.append([])
            files[-1].append(part)
    names = {}
    for number, parts in enumerate(files, 1):
        name, end, header = f"model-{number:05}-of-{len(files):05}.safetensors", 0, {}
        for part in parts:
            begin, end = end, end + BF16 * math.prod(part.shape)
            header[part.name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [begin, end]}
            names[part.name] = name
        text = json.dumps(header).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / name, 8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "scheme"), [(LAYERS, ""), (4, "int8")])
def test_one_of_64_devices_loads_its_share_of_70b(layers: int, scheme: str, tmp_path: Path, tiny_model: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of resident memory, mapped files included, is read from Linux's /proc")
    llama_70b(tmp_path, layers, tiny_model)
    command = [sys.executable, "-c", MEASURE, str(tiny_model), str(tmp_path), scheme]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    E, F, D, words = 8192, 28672, 128, 2048  # of 131,072, with those that pad them
    by_inputs = layers * (E * E + E * F)
    other = layers * (E * E + 2 * E * F) // 64 + layers * 2 * D * E + 2 * words * E + (2 * layers + 1) * E
    if scheme:  # scales are of whole rows
        assert found["read"] == BF16 * (other + by_inputs)
    else:
        assert found["read"] == found["share"] == BF16 * (other + by_inputs // 64)
    assert found["growth"] <= 1.2 * found["share"]
