"""What a run ends in: the heads, and for Medusa-2 the model, in folders that jaxspec loads."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import JaxspecError
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading import open_model
from jaxspec.models.saving import GB
from jaxspec.models.saving.heads import save_heads
from jaxspec.models.saving.leaves import Leaf
from jaxspec.models.saving.safetensors import write_safetensors
from jaxspec.models.saving.text import write_text_files
from jaxspec.types import Params

STORED = np.dtype(jnp.bfloat16)


def write_heads(spec: HeadsSpec, params: Params, folder: Path, about: Mapping[str, Any]) -> Params:
    """Writes heads in bfloat16, in the published layout where that can hold them, and gives what was written.

    `about` are further entries of their config.json. JaxspecError where writing fails.
    """
    stored = {"heads": jax.tree.map(lambda a: jnp.asarray(jax.device_get(a), STORED), params["heads"])}
    if "token_map" in params:
        stored["token_map"] = params["token_map"]
    layout = "vllm" if spec.conditioned or "token_map" in params else "medusa"
    save_heads(spec, stored, folder, layout, about)
    return stored


def write_base(model: str, params: Params, folder: Path) -> None:
    """Writes a trained model in bfloat16 to a folder that `--model` takes, with the config.json and the tokenizer of
    `model`, which it was trained from. An earlier one there is replaced. JaxspecError where writing fails."""
    found = open_model(model)
    leaves = jax.tree.map(
        lambda parameter, array: Leaf(parameter, STORED, partial(_stored, array)), found.tree, {**params}
    )
    scratch = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        changes = {"quantization_config": None, "dtype": None, "torch_dtype": STORED.name}
        write_text_files(found, scratch, changes)
        write_safetensors(jax.tree.leaves(leaves), scratch, 5.0 * GB)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    except OSError as error:
        raise JaxspecError(f"cannot write {folder}: {error.strerror or error}") from error


def _stored(array: jax.Array) -> np.ndarray:
    return np.asarray(jax.device_get(array)).astype(STORED)
