"""Medusa heads to folders that `load_heads` reads again, bit for bit."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading.heads import FILES, LAYOUTS, head_parts
from jaxspec.types import Params


def save_heads(
    spec: HeadsSpec, params: Params, folder: Path, layout: str = "medusa", about: Mapping[str, Any] | None = None
) -> None:
    """Writes heads and a config.json to a folder. Each file replaces an earlier one in one step, or not at all.

    Args:
        spec: the shape of the heads.
        params: their parameters; each array keeps its type.
        folder: made where it is not there.
        layout: `medusa` (that of published checkpoints) or `vllm`, which alone has a vocabulary of some tokens and, of
            our own making, conditioned heads. vLLM itself wants heads without a projection of their own to have a copy
            of the model's beside them, which is not written.
        about: further entries of config.json, such as the model that they were made for and how. Where heads guess some
            tokens only, `vocab_size`, the model's, is one: nothing else here knows it.

    ConfigError for another layout, for heads that it cannot hold, and for a folder that holds heads in another file.
    JaxspecError where writing fails.
    """
    _check_layout(spec, params, folder, layout)
    names = LAYOUTS[layout]
    tensors = {
        part.name: np.ascontiguousarray(array)
        for head, parameters in enumerate(params["heads"])
        for part, array in zip(jax.tree.leaves(head_parts(spec, names, head)), jax.tree.leaves(parameters), strict=True)
    }
    config = dict(about or {}) | _config(spec, next(iter(tensors.values())).dtype)
    if "token_map" in params:
        tensors["token_map"] = np.asarray(params["token_map"], np.int64)  # what torch takes for an index
    else:
        config["vocab_size"] = spec.vocab
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".heads-", dir=folder) as temporary:
            scratch = Path(temporary)
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            (scratch / "config.json").write_text(text, encoding="utf-8")
            save_file(tensors, scratch / names.file, {"format": "pt"})
            # It makes files for their owner alone.
            (scratch / names.file).chmod((scratch / "config.json").stat().st_mode)
            for name in (names.file, "config.json"):
                (scratch / name).replace(folder / name)
    except (OSError, SafetensorError) as error:
        raise JaxspecError(f"cannot write {folder}: {error}") from error


def _check_layout(spec: HeadsSpec, params: Params, folder: Path, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"the layout must be {' or '.join(LAYOUTS)}, not {layout!r}")
    if layout == "medusa" and (spec.conditioned or "token_map" in params):
        what = "conditioned heads" if spec.conditioned else "heads that guess some tokens only"
        raise ConfigError(f"the layout medusa cannot hold {what}: choose vllm")
    for other in FILES:
        if other != LAYOUTS[layout].file and (folder / other).exists():
            raise ConfigError(f"{folder} holds {other} already: name another folder, or remove it first")


def _config(spec: HeadsSpec, dtype: np.dtype) -> dict[str, Any]:
    """What both vLLM and the published checkpoints' own code look for; vLLM takes the medusa_num_ names as well."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": spec.num_heads,
        "medusa_num_layers": spec.layers,
        "hidden_size": spec.embed_dim,
        "truncated_vocab_size": spec.vocab,
        "medusa_fc_bias": True,
        "original_lm_head": not spec.own_output,
        "torch_dtype": dtype.name,
    }
