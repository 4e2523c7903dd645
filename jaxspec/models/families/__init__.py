"""Model families, one file each: how a published checkpoint maps onto the one transformer.

A new family is one new module in this folder that has the members of `Family`; it is found by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol, cast, runtime_checkable

from jaxspec.errors import LoadError
from jaxspec.models.spec import ModelSpec


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint and where it goes within a parameter."""

    name: str
    """Its Hugging Face name."""
    shape: tuple[int, ...]
    """Its shape in the checkpoint, at most two dimensions."""
    index: Any = ...
    """The part of the parameter that it fills, in row-major order."""
    dtype: Any = None
    """The type that it is stored in and stays in; None is any floating-point type, read as the one asked for."""


@dataclass(frozen=True)
class Parameter:
    """One array of the parameter tree, put together from tensors of a checkpoint."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@runtime_checkable
class Family(Protocol):
    """What a module in this folder has."""

    ARCHITECTURES: tuple[str, ...]
    """Names in `architectures` of config.json."""
    MODEL_TYPE: str
    """`model_type` of a config.json that is written from a GGUF file."""
    GGUF_ARCHITECTURE: str
    """`general.architecture` of a GGUF file."""
    GGUF_INTERLEAVED: tuple[str, ...]
    """Name endings of tensors whose rows a GGUF file holds in interleaved (pairwise) RoPE order within each head."""
    BUFFERS: tuple[str, ...]
    """Name endings of tensors in a checkpoint that are no parameters."""
    TIED: Mapping[str, str]
    """Tensors that a tied checkpoint may hold once more, and the tensor each must then equal."""

    @staticmethod
    def spec(config: Mapping[str, Any], valid_vocab: int) -> ModelSpec:
        """The spec of a config.json. LoadError names what is not supported."""
        ...

    @staticmethod
    def parameters(spec: ModelSpec) -> dict[str, Any]:
        """The parameter tree, with a `Parameter` for each array."""
        ...


def _families() -> list[Family]:
    return [cast(Family, import_module(f"{__name__}.{module.name}")) for module in iter_modules(__path__)]


def find_family(architecture: str) -> Family:
    """The family of a Hugging Face architecture (such as LlamaForCausalLM). LoadError names those there are."""
    families = _families()
    for family in families:
        if architecture in family.ARCHITECTURES:
            return family
    names = ", ".join(name for family in families for name in family.ARCHITECTURES)
    raise LoadError(f"architecture {architecture!r} is not supported (there are: {names})")


def find_gguf_family(architecture: str) -> Family:
    """The family of a GGUF `general.architecture` (such as llama). LoadError names those there are."""
    families = _families()
    for family in families:
        if architecture == family.GGUF_ARCHITECTURE:
            return family
    names = ", ".join(family.GGUF_ARCHITECTURE for family in families)
    raise LoadError(f"GGUF architecture {architecture!r} is not supported (there are: {names})")
