"""What a model's folder has beside its tensors: config.json, and the files of its tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import LoadError
from jaxspec.models.loading import Checkpoint

_COPIED = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of Llama 3.1 to 3.3, which alone have factors in a GGUF file; they differ in `factor`."""


def write_text_files(found: Checkpoint, folder: Path, changes: dict[str, Any]) -> None:
    """Writes config.json with `changes` (None takes a key out), and the tokenizer: copies of a folder's files, or new
    ones for a GGUF file.

    LoadError where a GGUF file says what no config.json can. OSError where writing fails.
    """
    if found.path.is_dir():
        config = found.config
        for path in {path for pattern in _COPIED for path in found.path.glob(pattern) if path.is_file()}:
            shutil.copyfile(path, folder / path.name)
    else:
        config = _config_of_gguf(found)
        found.tokenizer.save(folder)
    config = {key: value for key, value in config.items() if key not in changes}
    config |= {key: value for key, value in changes.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config_of_gguf(found: Checkpoint) -> dict[str, Any]:
    """A config.json that means the spec of a GGUF file, to transformers too."""
    ends = found.tokenizer.eos_ids
    config = {
        "architectures": [found.family.ARCHITECTURES[0]],
        "model_type": found.family.MODEL_TYPE,
        **found.config,
        "bos_token_id": found.tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
    }
    plain = np.array(found.family.spec(config, found.spec.valid_vocab).inv_freq)
    wanted = np.array(found.spec.inv_freq)
    if not np.array_equal(plain, wanted):
        config["rope_scaling"] = _LLAMA3 | {"factor": round(float((plain / wanted).max()), 3)}
    meant = found.family.spec(config, found.spec.valid_vocab).inv_freq
    if not np.allclose(meant, wanted, rtol=1e-6, atol=0):
        raise LoadError("its RoPE factors are not those of Llama 3.1 to 3.3: no config.json says what they are")
    return config
