"""Folders of safetensors: single, sharded and damaged ones."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.errors import LoadError
from jaxspec.models.loading import load_model
from jaxspec.models.loading.safetensors import SafetensorsSource


@pytest.fixture
def shards(folder: Any) -> Path:
    """A folder whose tensors are dealt out to three files."""
    path = folder()
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def test_shards_give_what_one_file_gives(shards: Path, random_tensors: Any, tiny_config: Any, fused: Any) -> None:
    params = load_model(str(shards)).params
    jax.tree.map(np.testing.assert_array_equal, params, fused(random_tensors(tiny_config), tiny_config))


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / "part-1.safetensors").unlink()
    with pytest.raises(LoadError, match=r"has no part-1\.safetensors"):
        load_model(str(shards))


def test_a_shard_without_its_tensor(shards: Path) -> None:
    tensors = load_file(shards / "part-0.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, shards / "part-0.safetensors")
    with pytest.raises(LoadError, match=r"part-0\.safetensors: tensor lm_head\.weight is missing"):
        load_model(str(shards))


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"lm_head.weight": 3}}])
def test_a_damaged_index(index: dict[str, Any], shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"missing|weight_map"):
        load_model(str(shards))


@pytest.mark.parametrize("kept", [0.0, 1e-5, 1e-3, 0.5, 0.999999])
def test_a_truncated_file(kept: float, folder: Any) -> None:
    file = folder() / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or cut short"):
        load_model(str(file.parent))


def test_a_file_cut_short_after_it_was_opened(folder: Any) -> None:
    path = folder()
    source = SafetensorsSource(path)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="lm_head"):
        source.rows("lm_head.weight", 0, 1)


def test_types_that_are_no_weights(folder: Any, random_tensors: Any, tiny_config: Any) -> None:
    tensors = random_tensors(tiny_config) | {"model.norm.weight": np.ones(64, np.int8)}
    with pytest.raises(LoadError, match=r"model\.norm\.weight is of type int8, not a floating-point type"):
        load_model(str(folder(tensors)))
