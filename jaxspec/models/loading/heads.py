"""Medusa heads in both layouts there are: that of published checkpoints and vLLM's.

How many heads there are, how deep they are and whether they are conditioned is told from the tensors: what a
config.json says of published ones is often wrong, and some come without.
"""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once this is imported)
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.families import Part
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading import located
from jaxspec.models.loading.safetensors import SINGLE, read_json
from jaxspec.models.spec import ModelSpec
from jaxspec.types import Params

Tensors = dict[str, np.ndarray]


class Layout(NamedTuple):
    """Where the tensors of heads are, and what they are called."""

    file: str
    block: str
    """The weight or bias (`kind`) of a block."""
    output: str
    """A head's own projection to logits."""


LAYOUTS = {
    "medusa": Layout("medusa_lm_head.safetensors", "{head}.{block}.linear.{kind}", "{head}.{layers}.weight"),
    "vllm": Layout(SINGLE, "blocks.{head}.layers.{block}.{kind}", "lm_heads.{head}.weight"),
}
FILES = (LAYOUTS["medusa"].file, "medusa_lm_head.pt", LAYOUTS["vllm"].file)
"""What a folder may hold its heads in."""
_MIX = "blocks.{head}.mix.weight"
"""Of a conditioned head, which only our own files hold; its first block is wider than others."""
_PREFIXES = ("medusa_heads.", "medusa_head.")
"""Before every name where the heads were saved as a part of something."""
_COPY = "lm_head.weight"
"""vLLM's name of the model's own projection, where it is beside the heads."""


def head_parts(spec: HeadsSpec, layout: Layout, head: int) -> Params:
    """The parameters of a head, with a `Part` for each array."""
    E, blocks = spec.embed_dim, {}
    for block in range(spec.layers):
        shape = (spec.conditioned, (head + 2) * E) if spec.conditioned and block == 0 else (E, E)
        blocks[f"block_{block}"] = {
            kind: Part(layout.block.format(head=head, block=block, kind=kind), of_kind)
            for kind, of_kind in (("weight", shape), ("bias", shape[:1]))
        }
    if spec.conditioned:
        blocks["mix"] = {"weight": Part(_MIX.format(head=head), (E, spec.conditioned))}
    parts: Params = {"blocks": blocks}
    if spec.own_output:
        parts["output"] = Part(layout.output.format(head=head, layers=spec.layers), (spec.vocab, E))
    return parts


def load_heads(path: Path, model: ModelSpec, dtype: Any) -> tuple[HeadsSpec, Params]:
    """Loads the Medusa heads of a folder or file that were made for a model like `model`, in a floating-point `dtype`.

    A folder holds `medusa_lm_head.safetensors`, `medusa_lm_head.pt` or `model.safetensors`, and need hold no config.
    Heads without a projection of their own use the model's; so do those whose config.json says `original_lm_head`,
    where copies of it in the file are left out. Heads without biases get zeros.
    LoadError where the file is missing or damaged, or where its tensors are no heads for this model: one is missing,
    misshapen or unexpected, or the hidden size or the vocabulary is another. ConfigError for a .pt file, which only
    torch can read, where torch is not installed.
    """
    file = _file_of(path)
    original = _says_original(file)
    with located(file):
        tensors = _without_prefix(_read(file))
        token_map = _take_token_map(tensors, model)
        spec, layout = _spec_of(tensors, model, token_map, original)
        parts = tuple(head_parts(spec, layout, head) for head in range(spec.num_heads))
        _check(tensors, jax.tree.leaves(parts))
    params: Params = {
        "heads": jax.tree.map(lambda part: jnp.array(tensors[part.name].astype(dtype, copy=False)), parts)
    }
    if token_map is not None:
        params["token_map"] = jnp.array(token_map.astype(np.int32))
    return spec, params


def _spec_of(
    tensors: Tensors, model: ModelSpec, token_map: np.ndarray | None, original: bool
) -> tuple[HeadsSpec, Layout]:
    """What the tensors are. Takes out copies of the model's own projection where these are said to be `original`."""
    layout = LAYOUTS["vllm" if any(name.startswith("blocks.") for name in tensors) else "medusa"]
    heads, layers = _count_blocks(tensors, layout)
    conditioned = _width(tensors, layout, heads, model)
    outputs = [layout.output.format(head=head, layers=layers) for head in range(heads)]
    vocab = _vocab_of(model) if token_map is None else len(token_map)
    for name in (*outputs, _COPY):
        if name in tensors:
            _fit_output(tensors, name, model, token_map)
            if original:
                del tensors[name]
    own_output = any(name in tensors for name in outputs)
    return HeadsSpec(heads, model.embed_dim, vocab, layers, own_output, conditioned), layout


def _file_of(path: Path) -> Path:
    if os.path.isdir(path):  # Path's own raises for a name that is too long
        for name in FILES:
            if (path / name).is_file():
                return path / name
        raise LoadError(f"{path} holds no heads: none of {', '.join(FILES)}")
    if not os.path.isfile(path):
        raise LoadError(f"no such file or folder: {path}")
    if path.suffix not in (".safetensors", ".pt"):
        raise LoadError(f"{path} is neither a folder nor a .safetensors or .pt file")
    return path


def _read(file: Path) -> Tensors:
    if file.suffix == ".pt":
        return _read_torch(file)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} is damaged or cut short: {error}") from error
    except AttributeError as error:
        raise LoadError(f"{file} holds tensors of a type that numpy has not: {error}") from error


def _read_torch(file: Path) -> Tensors:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"{file} needs torch ({error}): pip install 'jaxspec[parity]'") from error
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        return {name: _as_numpy(tensor.detach(), torch.bfloat16) for name, tensor in found.items()}
    except Exception as error:  # torch raises what comes, with messages of many lines
        raise LoadError(f"{file} is damaged or cut short, or holds more than tensors") from error


def _as_numpy(tensor: Any, bfloat16: Any) -> np.ndarray:
    """A torch tensor; torch makes no numpy array of bfloat16."""
    return (tensor.float() if tensor.dtype == bfloat16 else tensor).numpy()


def _without_prefix(tensors: Tensors) -> Tensors:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _count_blocks(tensors: Tensors, layout: Layout) -> tuple[int, int]:
    """Heads, and blocks of each. LoadError where one in between is missing, or heads differ."""
    pattern = layout.block.replace(".", r"\.").format(head=r"(\d+)", block=r"(\d+)", kind="(?:weight|bias)")
    blocks: dict[int, set[int]] = {}
    for name in tensors:
        if found := re.fullmatch(pattern, name, re.ASCII):
            blocks.setdefault(int(found[1]), set()).add(int(found[2]))
    if not blocks:
        raise LoadError("it holds no Medusa heads: it has no 0.0.linear.weight and no blocks.0.layers.0.weight")
    heads = _count(blocks, lambda head: layout.block.format(head=head, block=0, kind="weight"))
    depths = [
        _count(blocks[head], lambda block, head=head: layout.block.format(head=head, block=block, kind="weight"))
        for head in range(heads)
    ]
    for head, depth in enumerate(depths):
        if depth != depths[0]:
            raise LoadError(f"its heads differ in depth: head 0 has {depths[0]}, head {head} has {depth}")
    return heads, depths[0]


def _count(found: Collection[int], name: Callable[[int], str]) -> int:
    """How many there are, if they are 0, 1, 2 and so on."""
    for index in range(len(found)):
        if index not in found:
            raise LoadError(f"tensor {name(index)} is missing")
    return len(found)


def _take_token_map(tensors: Tensors, model: ModelSpec) -> np.ndarray | None:
    """The tokens that heads guess, where these are some only."""
    found = tensors.pop("token_map", None)
    if found is None:
        return None
    if found.ndim != 1 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise LoadError(f"tensor token_map is no list of token ids: {found.dtype} {list(found.shape)}")
    outside = found[(found < 0) | (found >= _vocab_of(model))]
    if outside.size:
        raise LoadError(f"tensor token_map holds token {outside[0]}, but this model has {_vocab_of(model)}")
    ids, times = np.unique(found, return_counts=True)
    if len(ids) < len(found):
        raise LoadError(f"tensor token_map holds token {ids[times > 1][0]} more than once")
    return found


def _vocab_of(model: ModelSpec) -> int:
    """Rows of the embedding in the model's checkpoint."""
    return model.vocab_size - model.added_vocab


def _fit_output(tensors: Tensors, name: str, model: ModelSpec, token_map: np.ndarray | None) -> None:
    """Takes from a projection over the whole vocabulary what heads guess. LoadError where it is over another one."""
    rows, whole = _matrix(tensors, name)[0], _vocab_of(model)
    if token_map is None:
        if rows != whole:
            hint = " (fewer need a token_map)" if rows < whole else ""
            raise LoadError(f"tensor {name} is over {rows} tokens, but this model has {whole}{hint}")
    elif rows == whole > len(token_map):
        tensors[name] = tensors[name][token_map]
    elif rows != len(token_map):
        raise LoadError(f"tensor {name} is over {rows} tokens, but token_map holds {len(token_map)}")


def _says_original(file: Path) -> bool:
    config = file.parent / "config.json"
    return config.is_file() and read_json(config).get("original_lm_head") is True


def _width(tensors: Tensors, layout: Layout, heads: int, model: ModelSpec) -> int:
    """Width of conditioned heads, 0 for others. LoadError where heads are for another hidden size."""
    mixes = [name for name in (_MIX.format(head=head) for head in range(heads)) if name in tensors]
    width = _matrix(tensors, mixes[0])[1] if mixes else 0
    shape = _matrix(tensors, layout.block.format(head=0, block=0, kind="weight"))
    hidden = shape[1] // 2 if width else shape[1]
    if hidden != model.embed_dim and shape == ((width, 2 * hidden) if width else (hidden, hidden)):
        raise LoadError(f"its heads are for a hidden size of {hidden}, but this model's is {model.embed_dim}")
    return width


def _matrix(tensors: Tensors, name: str) -> tuple[int, int]:
    """The shape of a matrix."""
    if name not in tensors:
        raise LoadError(f"tensor {name} is missing")
    shape = tensors[name].shape
    if len(shape) != 2:
        raise LoadError(f"tensor {name} has shape {list(shape)}, but is to be a matrix")
    return shape[0], shape[1]


def _check(tensors: Tensors, parts: list[Part]) -> None:
    """LoadError names a tensor that is missing, misshapen, of another type or unexpected."""
    if not any(name.endswith(".bias") for name in tensors):
        tensors |= {part.name: np.zeros(part.shape, np.float32) for part in parts if part.name.endswith(".bias")}
    for part in parts:
        if part.name not in tensors:
            raise LoadError(f"tensor {part.name} is missing")
        tensor = tensors[part.name]
        if tensor.shape != part.shape:
            raise LoadError(f"tensor {part.name} has shape {list(tensor.shape)}, not {list(part.shape)}")
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise LoadError(f"tensor {part.name} is of type {tensor.dtype}, not a floating-point type")
    for name in sorted(tensors.keys() - {part.name for part in parts}):
        raise LoadError(f"tensor {name} is unexpected: it is part of no head")
