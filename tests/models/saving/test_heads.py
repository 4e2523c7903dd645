"""What `save_heads` writes loads again bit for bit, and has the names that others look for."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.heads import HeadsSpec, init_heads
from jaxspec.models.loading.heads import load_heads
from jaxspec.models.saving import heads
from jaxspec.models.saving.heads import save_heads
from jaxspec.types import Params
from tests.models.saving.test_saving import assert_bits_equal
from tests.models.test_heads import MODEL, TOKEN_MAP, VOCAB, E

PLAIN = [
    HeadsSpec(1, E, VOCAB),
    HeadsSpec(4, E, VOCAB, own_output=True),
    HeadsSpec(11, E, VOCAB, layers=2),
    HeadsSpec(2, E, VOCAB, layers=3, own_output=True),
]
OURS = [
    HeadsSpec(3, E, len(TOKEN_MAP)),
    HeadsSpec(3, E, len(TOKEN_MAP), own_output=True),
    HeadsSpec(3, E, VOCAB, conditioned=24),
    HeadsSpec(2, E, len(TOKEN_MAP), layers=2, own_output=True, conditioned=8),
]


def heads_of(spec: HeadsSpec, dtype: Any = jnp.float32) -> Params:
    """Random parameters of every array, some of them not finite or minus zero."""
    rng = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        numbers = rng.normal(size=leaf.shape)
        numbers.flat[:3] = (-0.0, np.inf, np.nan)
        return jnp.asarray(numbers, leaf.dtype)

    shapes = jax.eval_shape(
        lambda: init_heads(spec, jax.random.key(0), jnp.zeros((spec.vocab, E)), dtype),
    )
    params = jax.tree.map(fill, shapes)
    return params if spec.vocab == VOCAB else params | {"token_map": jnp.asarray(TOKEN_MAP)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("layout", "spec"), [("medusa", spec) for spec in PLAIN] + [("vllm", spec) for spec in PLAIN + OURS], ids=str
)
def test_round_trip(layout: str, spec: HeadsSpec, dtype: Any, tmp_path: Path) -> None:
    params = heads_of(spec, dtype)
    save_heads(spec, params, tmp_path / "out", layout)
    found, again = load_heads(tmp_path / "out", MODEL, dtype)
    assert found == spec
    assert_bits_equal(again, params)


def test_names_of_the_published_layout(tmp_path: Path) -> None:
    params = heads_of(PLAIN[3])
    save_heads(PLAIN[3], params, tmp_path, about={"base_model_name_or_path": "owner/base", "hidden_size": 1})
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert tensors.keys() == {
        f"{i}.{name}"
        for i in range(2)
        for name in [f"{j}.linear.{kind}" for j in range(3) for kind in ("weight", "bias")] + ["3.weight"]
    }
    np.testing.assert_array_equal(tensors["1.3.weight"], params["heads"][1]["output"])
    np.testing.assert_array_equal(tensors["0.2.linear.bias"], params["heads"][0]["blocks"]["block_2"]["bias"])
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": 2,
        "medusa_num_layers": 3,
        "hidden_size": E,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "torch_dtype": "float32",
        "base_model_name_or_path": "owner/base",
    }


def test_names_of_the_layout_of_vllm(tmp_path: Path) -> None:
    spec = OURS[1]
    save_heads(spec, heads_of(spec, jnp.bfloat16), tmp_path, "vllm", {"vocab_size": VOCAB, "training": {"steps": 3}})
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == {"token_map"} | {
        name
        for i in range(3)
        for name in (f"blocks.{i}.layers.0.weight", f"blocks.{i}.layers.0.bias", f"lm_heads.{i}.weight")
    }
    assert tensors["token_map"].dtype == np.int64
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (VOCAB, len(TOKEN_MAP))
    assert (config["torch_dtype"], config["training"]) == ("bfloat16", {"steps": 3})


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the layout must be medusa or vllm, not 'torch'"):
        save_heads(PLAIN[0], heads_of(PLAIN[0]), tmp_path / "out", "torch")
    with pytest.raises(ConfigError, match="medusa cannot hold heads that guess some tokens only: choose vllm"):
        save_heads(OURS[0], heads_of(OURS[0]), tmp_path / "out")
    with pytest.raises(ConfigError, match="medusa cannot hold conditioned heads: choose vllm"):
        save_heads(OURS[2], heads_of(OURS[2]), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_heads_of_another_layout(tmp_path: Path) -> None:
    save_heads(PLAIN[0], heads_of(PLAIN[0]), tmp_path)
    with pytest.raises(ConfigError, match=r"holds medusa_lm_head\.safetensors already"):
        save_heads(PLAIN[0], heads_of(PLAIN[0]), tmp_path, "vllm")


def test_later_heads_replace_earlier_ones_or_leave_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some" / "where"
    save_heads(PLAIN[0], heads_of(PLAIN[0]), folder)
    (folder / "tree.json").write_text("kept")
    save_heads(PLAIN[1], heads_of(PLAIN[1]), folder)
    assert load_heads(folder, MODEL, jnp.float32)[0] == PLAIN[1]

    def on_a_full_disk(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heads, "save_file", on_a_full_disk)
    with pytest.raises(JaxspecError, match=r"cannot write .*where: .*No space left"):
        save_heads(PLAIN[3], heads_of(PLAIN[3]), folder)
    assert load_heads(folder, MODEL, jnp.float32)[0] == PLAIN[1]
    assert {path.name for path in folder.iterdir()} == {"config.json", "medusa_lm_head.safetensors", "tree.json"}


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JaxspecError, match=r"cannot write .*file"):
        save_heads(PLAIN[0], heads_of(PLAIN[0]), tmp_path / "file")


def test_others_may_read_as_the_user_has_it(tmp_path: Path) -> None:
    save_heads(PLAIN[0], heads_of(PLAIN[0]), tmp_path / "out")
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {usual}
