"""Filling the parameter tree: checks of the tensor names, chunk edges, and the law on memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.errors import LoadError
from jaxspec.models.families import find_family
from jaxspec.models.loading import DTYPES, load_model
from jaxspec.models.loading.home import home_of
from jaxspec.models.loading.layout import layout_of
from jaxspec.models.loading.stream import read_parameters
from jaxspec.models.sharding import partition

Change = Callable[[dict[str, np.ndarray]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "layers.1.self_attn.k_proj.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda t: t.update({"model.norm.weight": np.ones((1, 64), np.float32)}),
            r"norm.weight has shape \[1, 64\], not \[64\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.ones((480, 32), np.float32)}),
            r"lm_head.weight has shape \[480, 32\], not \[480, 64\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
            "q_proj.bias is unexpected",
        ),
        (lambda t: t.update({"model.layers.2.extra": np.ones(1, np.float32)}), "layers.2.extra is unexpected"),
    ],
)
def test_tensors_that_do_not_fit(
    change: Change, message: str, folder: Any, random_tensors: Any, tiny_config: Any
) -> None:
    tensors = random_tensors(tiny_config)
    change(tensors)
    with pytest.raises(LoadError, match=message):
        load_model(str(folder(tensors)))


def test_buffers_of_old_checkpoints_are_no_parameters(folder: Any, random_tensors: Any, tiny_config: Any) -> None:
    tensors = random_tensors(tiny_config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load_model(str(folder(tensors))).params


def test_a_tied_checkpoint_may_hold_the_matrix_twice(folder: Any, random_tensors: Any, tiny_config: Any) -> None:
    tensors = random_tensors(tiny_config | {"tie_word_embeddings": True})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert "lm_head" not in load_model(str(folder(tensors, tie_word_embeddings=True))).params
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(LoadError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(str(folder(tensors, tie_word_embeddings=True)))


class _Memory:
    """A checkpoint in memory."""

    where = "memory"

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name].dtype

    def rows(self, name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        assert 0 <= start < stop <= len(self._tensors[name])
        return self._tensors[name][start:stop][..., columns]


@pytest.mark.parametrize("chunk", [1, 64, 7 * 64, 1000 * 64])
def test_chunk_edges(
    chunk: int, monkeypatch: pytest.MonkeyPatch, random_tensors: Any, tiny_config: Any, fused: Any
) -> None:
    monkeypatch.setattr("jaxspec.models.loading.shards.CHUNK", chunk)
    config = tiny_config | {"attention_bias": True, "mlp_bias": True}
    tensors = random_tensors(config)
    family = find_family("LlamaForCausalLM")
    tree = family.parameters(family.spec(config, 480))
    layout = layout_of(tree, DTYPES["float32"])
    params = read_parameters(_Memory(tensors), family, tree, layout, partition(layout), home_of(None), progress=False)
    jax.tree.map(np.testing.assert_array_equal, params, fused(tensors, config))


MEASURE = """
import re, sys
from pathlib import Path
import jax, numpy as np
from jaxspec.models.loading import load_model

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

tiny, model, weights, packed = sys.argv[1:]
options = {"weights": weights, "progress": False, "packed": packed == "True"}
load_model(tiny, **options)  # imports, thread stacks and XLA's own start are no part of the growth
before = kib("VmRSS")
model = load_model(model, **options)
sizes = [leaf.nbytes for leaf in jax.tree.leaves(model.params)]
print((kib("VmHWM") - before) * 1024 / sum(sizes), max(sizes) / sum(sizes))
"""


def _growth(tiny: Path, model: str, weights: str = "float32", packed: bool = True) -> tuple[float, float]:
    """Peak growth of the resident memory while a model loads, mapped files included, over its parameters' bytes; and
    the share of the largest of these."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of resident memory, mapped files included, is read from Linux's /proc")
    command = [sys.executable, "-c", MEASURE, str(tiny), model, weights, str(packed)]
    growth, share = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(growth), float(share)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("weights", "packed"), [("float32", True), ("int8", True), ("int4", True), ("fp8_block", True), ("int8", False)]
)
def test_memory_of_a_folder(
    tied: bool, weights: str, packed: bool, folder: Any, tiny_model: Path, random_tensors: Any, tiny_config: Any
) -> None:
    sizes = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    changes = sizes | {"tie_word_embeddings": tied}
    tensors = random_tensors(tiny_config | changes)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 300e6
    path = folder(tensors, **changes)
    growth, largest = _growth(tiny_model, str(path), weights, packed)
    (path / "model.safetensors").unlink()  # pytest keeps the folders of its last runs
    assert 0.95 < growth < 1.3 + (0 if weights == "float32" else largest)


@pytest.mark.slow
@pytest.mark.model
def test_memory_of_smollm2(tiny_model: Path) -> None:
    assert 0.95 < _growth(tiny_model, "smollm2-135m")[0] < 1.3
