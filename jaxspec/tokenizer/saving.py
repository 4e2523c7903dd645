"""A tokenizer to the files of a Hugging Face folder, which `Tokenizer.from_folder` and transformers read."""

import json
from pathlib import Path
from typing import Any

from jaxspec.tokenizer.backend import Backend


def save_backend(backend: Backend, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json (special tokens, chat template) and generation_config.json (every id
    that ends a text). OSError where the folder is missing or cannot be written to."""
    tokenizer, bos, ends = backend.tokenizer, backend.bos_id, backend.eos_ids
    # How a text is framed (add_bos_token and its like) is part of tokenizer.json: the post-processor.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else tokenizer.id_to_token(bos),
        "eos_token": tokenizer.id_to_token(ends[0]) if ends else None,
        "unk_token": getattr(tokenizer.model, "unk_token", None),
        "clean_up_tokenization_spaces": False,
        "chat_template": backend.chat_template,
    }
    generation = {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    given = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(given, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
