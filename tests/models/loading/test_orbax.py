"""Models as orbax checkpoints, written here by orbax itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.errors import LoadError
from jaxspec.models.loading import load_model, orbax

Tree = dict[str, Any]


@pytest.fixture
def checkpoint(folder: Any, random_tensors: Any, tiny_config: Any, fused: Any) -> Callable[..., tuple[Path, Tree]]:
    """Writes a folder whose parameters, after a change, are an orbax checkpoint."""

    def write(change: Callable[[Tree], object] = lambda _: None, **how: Any) -> tuple[Path, Tree]:
        tensors = random_tensors(tiny_config)
        path, tree = folder(tensors), fused(tensors, tiny_config)
        (path / "model.safetensors").unlink()
        change(tree)
        ocp.PyTreeCheckpointer(**how).save(path / "params", tree)
        return path, tree

    return write


def as_jax(tree: Tree) -> None:
    tree.update(jax.tree.map(jnp.asarray, tree))


@pytest.mark.parametrize("change", [lambda _: None, as_jax], ids=["numpy", "jax"])
@pytest.mark.parametrize("how", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=["ocdbt", "files", "zarr3"])
def test_arrays_of_either_kind(change: Callable[[Tree], object], how: dict[str, bool], checkpoint: Any) -> None:
    path, tree = checkpoint(change, **how)
    loaded = load_model(str(path), "float32").params
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16, np.float32])
def test_types(stored: Any, checkpoint: Any) -> None:
    path, tree = checkpoint(lambda tree: tree.update(jax.tree.map(lambda array: array.astype(stored), tree)))
    for weights in ("float32", "bfloat16"):
        for found, array in zip(*map(jax.tree.leaves, (load_model(str(path), weights).params, tree)), strict=True):
            np.testing.assert_array_equal(found, array.astype(jnp.dtype(weights)))


def test_each_array_is_read_once_and_let_go(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tree = checkpoint()
    read, source_parts = [], orbax.OrbaxSource._parts

    def counted(self: orbax.OrbaxSource, name: str) -> dict[str, np.ndarray]:
        assert not self._held
        read.append(name)
        return source_parts(self, name)

    monkeypatch.setattr(orbax.OrbaxSource, "_parts", counted)
    load_model(str(path))
    assert len(read) == len(jax.tree.leaves(tree))


def misshape(tree: Tree) -> None:
    tree["layers"][1]["gate_up"]["weight"] = np.zeros((2, 64, 96), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["layers"][1].pop("qkv"), r"array layers\.1\.qkv\.weight is missing"),
        (lambda tree: tree.pop("lm_head"), r"array lm_head\.weight is missing"),
        (misshape, r"array layers\.1\.gate_up\.weight has shape \[2, 64, 96\], not \[2, 96, 64\]"),
        (lambda tree: tree["norm"].update(bias=np.zeros(64)), r"array norm\.bias is unexpected"),
        (lambda tree: tree["norm"].update(weight=np.zeros(64, int)), r"norm\.weight is of type int64"),
        (lambda tree: tree.update(step=3), "is no orbax checkpoint, or damaged: .*step"),
    ],
)
def test_arrays_that_do_not_fit(change: Callable[[Tree], object], message: str, checkpoint: Any) -> None:
    path, _ = checkpoint(change)
    with pytest.raises(LoadError, match=message) as caught:
        load_model(str(path))
    assert str(path / "params") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder(checkpoint: Any) -> None:
    path, _ = checkpoint()
    for file in sorted((path / "params").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    with pytest.raises(LoadError, match=r"params is no orbax checkpoint, or damaged: "):
        load_model(str(path))


def test_damaged_data(checkpoint: Any) -> None:
    path, _ = checkpoint()
    data = max((file for file in (path / "params").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(LoadError, match=r"params is no orbax checkpoint, or damaged: ") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)
