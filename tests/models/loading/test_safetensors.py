"""Folders of safetensors: single, sharded and damaged ones."""

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16, jnp.float8_e4m3fn, np.int8, np.uint8])
def test_some_columns_of_some_rows(stored: Any, tmp_path: Path) -> None:
    """At offsets that are no multiples of a page, nor of the size of a number."""
    tensors = {"a": np.arange(7, dtype=np.int8), "b": (np.arange(300 * 1000) % 17).reshape(300, 1000).astype(stored)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for rows in ((0, 300), (17, 18), (255, 300)):
        for columns in (slice(0, 1), slice(3, 997), slice(999, 1000), slice(0, 1000), slice(None)):
            found = source.rows("b", *rows, columns)
            assert found.dtype == stored
            np.testing.assert_array_equal(found, tensors["b"][slice(*rows), columns])
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    assert source.rows("b", 0, 299, slice(1, 2)).shape == (299, 1)
    with pytest.raises(LoadError, match=r"model\.safetensors is cut short: tensor b cannot be read"):
        source.rows("b", 200, 300, slice(1, 2))


def cached(path: Path) -> int:
    """Bytes of a file that the kernel holds, in whole pages."""
    with path.open("rb") as file:
        pages = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    there = np.zeros(-(-pages.size // mmap.PAGESIZE), np.uint8)
    address, size = ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.size)
    assert ctypes.CDLL(None).mincore(address, size, there.ctypes.data_as(ctypes.c_void_p)) == 0
    return int((there & 1).sum()) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it has read")
def test_the_disk_reads_no_other_columns(tmp_path: Path) -> None:
    file, rows, row = tmp_path / "model.safetensors", 512, 8 * mmap.PAGESIZE
    save_file({"a": np.ones((rows, row), np.uint8)}, file)
    source = SafetensorsSource(tmp_path)  # after whose look at the header the kernel reads on
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(file):
        pytest.skip("a file system that lives in memory")
    assert source.rows("a", 0, rows, slice(row // 2, row // 2 + mmap.PAGESIZE)).all()
    assert 0 < cached(file) <= rows * 2 * mmap.PAGESIZE  # a page's worth of columns lies across two pages


def test_types_that_are_no_weights(folder: Any, random_tensors: Any, tiny_config: Any) -> None:
    tensors = random_tensors(tiny_config) | {"model.norm.weight": np.ones(64, np.int8)}
    with pytest.raises(LoadError, match=r"model\.norm\.weight is of type int8, not a floating-point type"):
        load_model(str(folder(tensors)))
