"""The shape of a model, from wherever it is written down: all that memory depends on, and no weights."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import Family, find_family, find_gguf_family
from jaxspec.models.loading import architecture_of, gguf, locate_model, located, read_model_config
from jaxspec.models.loading.safetensors import read_json
from jaxspec.models.quantization import scheme_of
from jaxspec.models.spec import ModelSpec

LATENT_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Names in `architectures` of models with latent attention, whose cache is counted though they cannot be run yet."""

EVERY_ID = sys.maxsize
"""Ids of a tokenizer that leaves no row of the embedding without a token: none is read here."""


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): of a token a layer keeps one latent and one RoPE key that all
    heads share, and no keys and values."""

    num_layers: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    max_context: int


class Shape(NamedTuple):
    """A model as `read_shape` gives it; `name` is what was asked for."""

    name: str
    spec: ModelSpec | LatentSpec
    parameters: dict[str, Any] | None
    """The parameter tree, with a `Parameter` for each array; None where only the cache can be counted."""
    stored: str | None = None
    """The scheme that its matrices are quantised in already, if they are."""
    family: Family | None = None
    """None where only the cache can be counted."""

    @property
    def attention(self) -> str:
        """MLA; or MHA, GQA or MQA, as one, some or all query heads share a key/value head."""
        if isinstance(self.spec, LatentSpec):
            return "MLA"
        if self.spec.group == 1:
            return "MHA"
        return "MQA" if self.spec.num_kv_heads == 1 else "GQA"

    @property
    def sizes(self) -> dict[str, int]:
        """What the cache depends on."""
        spec = self.spec
        common = {"layers": spec.num_layers, "heads": spec.num_heads}
        if isinstance(spec, LatentSpec):
            return common | {"latent_dim": spec.latent_dim, "rope_dim": spec.rope_dim}
        return common | {"kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}


def read_shape(model: str) -> Shape:
    """The shape of a name in configs/models, a Hugging Face folder, its config.json alone, or a .gguf file.

    LoadError where that is missing, damaged or of an architecture that is not known.
    """
    path = Path(os.path.expanduser(model)) if model.endswith(".json") else locate_model(model)
    if path is None:
        raise LoadError(f"{model}: the hub is not asked for a shape: fetch the model's config.json and give that")
    if path.is_dir():
        path = path / "config.json"
    with located(path):
        if path.suffix == ".gguf":
            return _of_gguf(model, path)
        return _of_config(model, _configured(path) if path.suffix == ".toml" else read_json(path))


def _configured(path: Path) -> dict[str, Any]:
    shape = read_model_config(path).shape
    if shape is None:
        raise ConfigError(f"{path} has no [shape] to plan with")
    return shape


def _of_config(model: str, config: Mapping[str, Any]) -> Shape:
    architecture = architecture_of(config)
    if architecture in LATENT_ARCHITECTURES:
        return Shape(model, _latent_spec(config), None)
    family, stored = find_family(architecture), scheme_of(config)
    plain = config if stored is None else {**config, "quantization_config": None}
    spec = family.spec(plain, EVERY_ID)
    return Shape(model, spec, family.parameters(spec), stored, family)


def _of_gguf(model: str, path: Path) -> Shape:
    file = gguf.read_header(path)
    family = find_gguf_family(gguf.architecture(file))
    config = gguf.hugging_face_config(file)
    spec = family.spec(config, EVERY_ID)
    return Shape(model, spec, family.parameters(spec), family=family)


class _LatentConfig(msgspec.Struct):
    """The keys of config.json that matter."""

    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    max_position_embeddings: int


def _latent_spec(config: Mapping[str, Any]) -> LatentSpec:
    try:
        sizes = msgspec.structs.astuple(msgspec.convert(dict(config), _LatentConfig))
    except msgspec.ValidationError as error:
        raise LoadError(f"config: {error}") from error
    if min(sizes) < 1:
        raise LoadError("config: a size is not above 0")
    return LatentSpec(*sizes)
