"""Heads from files in both layouts, written here name by name; what is wrong with a file is one clear error."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading.heads import load_heads
from tests.models.test_heads import MODEL, VOCAB, E

Tensors = dict[str, np.ndarray]
WIDTH = 12
TOKENS = np.array([5, 0, 39, 17], np.int64)


def normal(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(shape)
    return rng.normal(size=shape).astype(np.float32)


def published(heads: int = 3, layers: int = 1, own: bool = True) -> Tensors:
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = normal(E, E) + i + 10 * j
            tensors[f"{i}.{j}.linear.bias"] = normal(E) + i + 10 * j
        if own:
            tensors[f"{i}.{layers}.weight"] = normal(VOCAB, E) + i
    return tensors


def vllm(heads: int = 2, layers: int = 1, bias: bool = False, rows: int = VOCAB) -> Tensors:
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"blocks.{i}.layers.{j}.weight"] = normal(E, E) + i + 10 * j
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = normal(E) + i + 10 * j
        tensors[f"lm_heads.{i}.weight"] = normal(rows, E) + i
    return tensors


def conditioned(heads: int = 2, layers: int = 1, embed: int = E) -> Tensors:
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            inputs, outputs = (embed, embed) if j else ((i + 2) * embed, WIDTH)
            tensors[f"blocks.{i}.layers.{j}.weight"] = normal(outputs, inputs)
            tensors[f"blocks.{i}.layers.{j}.bias"] = normal(outputs)
        tensors[f"blocks.{i}.mix.weight"] = normal(embed, WIDTH)
    return tensors


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    name = "model.safetensors" if any(name.startswith("blocks") for name in tensors) else "medusa_lm_head.safetensors"
    save_file(tensors, folder / name, {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_equal(found: Any, expected: np.ndarray) -> None:
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (3, 1), (2, 3), (11, 1)])
def test_the_published_layout(heads: int, layers: int, own: bool, tmp_path: Path) -> None:
    tensors = published(heads, layers, own)
    spec, params = load_heads(write(tmp_path, tensors), MODEL, jnp.float32)
    assert spec == HeadsSpec(heads, E, VOCAB, layers, own)
    assert params.keys() == {"heads"}
    for i, head in enumerate(params["heads"]):
        assert head.keys() == ({"blocks", "output"} if own else {"blocks"})
        assert head["blocks"].keys() == {f"block_{j}" for j in range(layers)}
        for j in range(layers):
            assert_equal(head["blocks"][f"block_{j}"]["weight"], tensors[f"{i}.{j}.linear.weight"])
            assert_equal(head["blocks"][f"block_{j}"]["bias"], tensors[f"{i}.{j}.linear.bias"])
        if own:
            assert_equal(head["output"], tensors[f"{i}.{layers}.weight"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_layout_of_vllm(layers: int, bias: bool, tmp_path: Path) -> None:
    tensors = vllm(layers=layers, bias=bias)
    spec, params = load_heads(write(tmp_path, tensors), MODEL, jnp.float32)
    assert spec == HeadsSpec(2, E, VOCAB, layers, own_output=True)
    for i, head in enumerate(params["heads"]):
        for j in range(layers):
            weight, given = (tensors.get(f"blocks.{i}.layers.{j}.{kind}") for kind in ("weight", "bias"))
            assert_equal(head["blocks"][f"block_{j}"]["weight"], weight)
            assert_equal(head["blocks"][f"block_{j}"]["bias"], np.zeros(E) if given is None else given)
        assert_equal(head["output"], tensors[f"lm_heads.{i}.weight"])


@pytest.mark.parametrize("layers", [1, 2])
def test_conditioned_heads(layers: int, tmp_path: Path) -> None:
    tensors = conditioned(layers=layers)
    spec, params = load_heads(write(tmp_path, tensors), MODEL, jnp.float32)
    assert spec == HeadsSpec(2, E, VOCAB, layers, conditioned=WIDTH)
    for i, head in enumerate(params["heads"]):
        assert_equal(head["blocks"]["block_0"]["weight"], tensors[f"blocks.{i}.layers.0.weight"])
        assert_equal(head["blocks"]["mix"]["weight"], tensors[f"blocks.{i}.mix.weight"])
        assert len(head["blocks"]) == layers + 1


@pytest.mark.parametrize("rows", [VOCAB, len(TOKENS)])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_a_token_map(rows: int, dtype: Any, tmp_path: Path) -> None:
    tensors = vllm(rows=rows) | {"token_map": TOKENS.astype(dtype)}
    config = {"truncated_vocab_size": len(TOKENS), "vocab_size": VOCAB}
    spec, params = load_heads(write(tmp_path, tensors, config), MODEL, jnp.float32)
    assert spec == HeadsSpec(2, E, len(TOKENS), own_output=True)
    assert params["token_map"].dtype == jnp.int32
    np.testing.assert_array_equal(params["token_map"], TOKENS)
    for i, head in enumerate(params["heads"]):
        weight = tensors[f"lm_heads.{i}.weight"]
        assert_equal(head["output"], weight if rows == len(TOKENS) else weight[TOKENS])


def test_a_token_map_of_every_token_moves_no_rows(tmp_path: Path) -> None:
    tensors = vllm() | {"token_map": np.arange(VOCAB)[::-1].copy()}
    _, params = load_heads(write(tmp_path, tensors), MODEL, jnp.float32)
    assert_equal(params["heads"][0]["output"], tensors["lm_heads.0.weight"])


@pytest.mark.parametrize(
    "copies", [(), ("lm_head.weight",), ("lm_heads.0.weight",), ("lm_heads.0.weight", "lm_heads.1.weight")]
)
def test_copies_of_the_models_own_projection_are_left_out(copies: tuple[str, ...], tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in vllm().items() if name.startswith("blocks")}
    tensors |= {name: normal(VOCAB, E) for name in copies}
    folder = write(tmp_path, tensors, {"original_lm_head": True})
    spec, params = load_heads(folder, MODEL, jnp.float32)
    assert spec == HeadsSpec(2, E, VOCAB)
    assert all(head.keys() == {"blocks"} for head in params["heads"])
    if copies:  # without the config's word these are what they are
        (folder / "config.json").unlink()
        if len(copies) == 2:
            assert load_heads(folder, MODEL, jnp.float32)[0].own_output
        else:
            with pytest.raises(LoadError, match=r"lm_head\S*\.weight is (missing|unexpected)"):
                load_heads(folder, MODEL, jnp.float32)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
@pytest.mark.parametrize(
    "tensors", [published(), vllm(), vllm(rows=4) | {"token_map": TOKENS}], ids=["medusa", "vllm", "token_map"]
)
def test_names_with_a_prefix(prefix: str, tensors: Tensors, tmp_path: Path) -> None:
    plain, prefixed = tmp_path / "plain", tmp_path / "prefixed"
    plain.mkdir()
    prefixed.mkdir()
    expected = load_heads(write(plain, tensors), MODEL, jnp.float32)
    found = load_heads(write(prefixed, {prefix + name: t for name, t in tensors.items()}), MODEL, jnp.float32)
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


@pytest.mark.parametrize("wrong", [2, 5, "many", None])
def test_the_tensors_overrule_the_config(wrong: Any, tmp_path: Path) -> None:
    config = {"medusa_num_heads": wrong, "medusa_num_layers": wrong, "hidden_size": 4096, "vocab_size": 32001}
    spec, _ = load_heads(write(tmp_path, published(), config), MODEL, jnp.float32)
    assert spec == HeadsSpec(3, E, VOCAB, 1, own_output=True)


@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64, jnp.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_types(stored: Any, wanted: Any, tmp_path: Path) -> None:
    tensors = {name: tensor.astype(stored) for name, tensor in published().items()}
    _, params = load_heads(write(tmp_path, tensors), MODEL, wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    expected = tensors["2.0.linear.weight"].astype(wanted)
    np.testing.assert_array_equal(np.asarray(params["heads"][2]["blocks"]["block_0"]["weight"]), expected)


def test_a_file_itself_and_the_first_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, published(heads=2))
    write(tmp_path, vllm(heads=4))
    assert load_heads(tmp_path, MODEL, jnp.float32)[0].num_heads == 2
    assert load_heads(tmp_path / "model.safetensors", MODEL, jnp.float32)[0].num_heads == 4


def test_the_file_may_be_replaced_while_its_heads_are_in_use(tmp_path: Path) -> None:
    tensors = published()
    _, params = load_heads(write(tmp_path, tensors), MODEL, jnp.float32)
    file = tmp_path / "medusa_lm_head.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert_equal(params["heads"][0]["output"], tensors["0.1.weight"])


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


WRONG: list[tuple[Tensors, str]] = [
    (without(published(), "0.0.linear.weight"), "tensor 0.0.linear.weight is missing"),
    (without(published(), "1.0.linear.weight"), "tensor 1.0.linear.weight is missing"),
    (without(published(), "1.0.linear.weight", "1.0.linear.bias"), "tensor 1.0.linear.weight is missing"),
    (without(published(), "2.0.linear.bias"), "tensor 2.0.linear.bias is missing"),
    (without(published(), "0.1.weight"), "tensor 0.1.weight is missing"),
    (without(published(), "2.0.linear.weight", "2.0.linear.bias"), "tensor 2.1.weight is unexpected"),
    (without(published(2, 3), "1.1.linear.weight", "1.1.linear.bias"), "tensor 1.1.linear.weight is missing"),
    (without(vllm(), "lm_heads.1.weight"), "tensor lm_heads.1.weight is missing"),
    (without(vllm(bias=True), "blocks.0.layers.0.weight"), "tensor blocks.0.layers.0.weight is missing"),
    (without(conditioned(), "blocks.0.mix.weight"), "tensor blocks.0.mix.weight is missing"),
    (without(conditioned(3), "blocks.1.mix.weight"), "tensor blocks.1.mix.weight is missing"),
    (
        published() | {"1.1.linear.weight": normal(E, E), "1.1.linear.bias": normal(E)},
        "its heads differ in depth: head 0 has 1, head 1 has 2",
    ),
    (published() | {"1.0.linear.bias": normal(E + 1)}, f"1.0.linear.bias has shape [{E + 1}], not [{E}]"),
    (published() | {"1.0.linear.weight": normal(E, 8)}, f"1.0.linear.weight has shape [{E}, 8], not [{E}, {E}]"),
    (published() | {"0.0.linear.weight": normal(E, 8)}, f"0.0.linear.weight has shape [{E}, 8], not [{E}, {E}]"),
    (published() | {"0.0.linear.weight": normal(E)}, f"0.0.linear.weight has shape [{E}], but is to be a matrix"),
    (published() | {"0.1.weight": normal(VOCAB)}, f"0.1.weight has shape [{VOCAB}], but is to be a matrix"),
    (published() | {"0.1.weight": normal(VOCAB, 8)}, f"0.1.weight has shape [{VOCAB}, 8], not [{VOCAB}, {E}]"),
    (conditioned() | {"blocks.0.mix.weight": normal(WIDTH)}, f"mix.weight has shape [{WIDTH}], but is to be a matrix"),
    (conditioned() | {"blocks.1.mix.weight": normal(E, 3)}, f"mix.weight has shape [{E}, 3], not [{E}, {WIDTH}]"),
    (
        conditioned() | {"blocks.1.layers.0.weight": normal(WIDTH, 2 * E)},
        f"blocks.1.layers.0.weight has shape [{WIDTH}, {2 * E}], not [{WIDTH}, {3 * E}]",
    ),
    (conditioned(embed=48), f"its heads are for a hidden size of 48, but this model's is {E}"),
    (
        {"0.0.linear.weight": normal(48, 48), "0.0.linear.bias": normal(48)},
        f"its heads are for a hidden size of 48, but this model's is {E}",
    ),
    (
        published() | {"1.1.weight": normal(VOCAB + 1, E)},
        f"1.1.weight is over {VOCAB + 1} tokens, but this model has 40",
    ),
    (vllm(rows=9), "lm_heads.0.weight is over 9 tokens, but this model has 40 (fewer need a token_map)"),
    (vllm(rows=9) | {"token_map": TOKENS}, "lm_heads.0.weight is over 9 tokens, but token_map holds 4"),
    (vllm(rows=4) | {"token_map": TOKENS + 1}, "token_map holds token 40, but this model has 40"),
    (vllm(rows=4) | {"token_map": TOKENS - 1}, "token_map holds token -1, but this model has 40"),
    (vllm(rows=4) | {"token_map": np.array([3, 1, 2, 3])}, "token_map holds token 3 more than once"),
    (vllm(rows=4) | {"token_map": TOKENS.astype(np.float32)}, "token_map is no list of token ids: float32 [4]"),
    (vllm(rows=4) | {"token_map": TOKENS[None]}, "token_map is no list of token ids: int64 [1, 4]"),
    (vllm(rows=4) | {"token_map": TOKENS[:0]}, "token_map is no list of token ids: int64 [0]"),
    (published() | {"extra": normal(3)}, "tensor extra is unexpected"),
    (vllm() | {"lm_head.weight": normal(VOCAB, E)}, "tensor lm_head.weight is unexpected"),
    (published() | {"1.0.linear.weight": np.ones((E, E), np.int8)}, "is of type int8, not a floating-point type"),
    ({"model.norm.weight": normal(E)}, "it holds no Medusa heads"),
    ({}, "it holds no Medusa heads"),
    ({"9999999999.0.linear.weight": normal(E, E)}, "tensor 0.0.linear.weight is missing"),
]


@pytest.mark.parametrize(("tensors", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_tensor_is_named(tensors: Tensors, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, tensors)
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        load_heads(folder, MODEL, jnp.float32)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_another_vocabulary_is_refused_whatever_the_config_says(tmp_path: Path) -> None:
    folder = write(tmp_path, vllm(), {"original_lm_head": True})
    with pytest.raises(LoadError, match=f"is over {VOCAB} tokens, but this model has 41"):
        load_heads(folder, replace(MODEL, vocab_size=41, valid_vocab=41), jnp.float32)


@pytest.mark.parametrize("kept", [0.0, 1e-3, 0.5, 0.9999])
def test_a_truncated_file(kept: float, tmp_path: Path) -> None:
    file = write(tmp_path, published()) / "medusa_lm_head.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(LoadError, match=r"medusa_lm_head\.safetensors is damaged or cut short"):
        load_heads(tmp_path, MODEL, jnp.float32)


def test_a_damaged_config(tmp_path: Path) -> None:
    folder = write(tmp_path, published())
    (folder / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config\.json"):
        load_heads(folder, MODEL, jnp.float32)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"holds no heads: none of medusa_lm_head\.safetensors, "):
        load_heads(tmp_path, MODEL, jnp.float32)
    for path in (tmp_path / "nothing.pt", Path("x" * 5000)):
        with pytest.raises(LoadError, match="no such file or folder"):
            load_heads(path, MODEL, jnp.float32)
    (tmp_path / "heads.bin").touch()
    with pytest.raises(LoadError, match=r"heads\.bin is neither a folder nor"):
        load_heads(tmp_path / "heads.bin", MODEL, jnp.float32)


def test_a_pt_file_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "medusa_lm_head.pt").touch()
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt needs torch .*pip install 'jaxspec\[parity\]'"):
        load_heads(tmp_path, MODEL, jnp.float32)


def test_a_type_that_numpy_has_not(tmp_path: Path) -> None:
    tensors = {"0.0.linear.weight": normal(E, E).astype(jnp.float8_e4m3fn), "0.0.linear.bias": normal(E)}
    with pytest.raises(LoadError, match=r"holds tensors of a type that numpy has not: .*float8_e4m3fn"):
        load_heads(write(tmp_path, tensors), MODEL, jnp.float32)
