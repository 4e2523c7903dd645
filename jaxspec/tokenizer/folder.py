"""A tokenizer from a Hugging Face folder, set up the way transformers sets it up."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxspec.errors import LoadError
from jaxspec.tokenizer.backend import Backend, frame


def backend_from_folder(path: Path) -> Backend:
    """Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
    generation_config.json and config.json. LoadError when tokenizer.json is missing or a file is damaged."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise LoadError(f"{path}: no tokenizer.json (save one with AutoTokenizer.from_pretrained(…).save_pretrained)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise LoadError(f"{file}: not a tokenizer: {' '.join(str(error).split())}") from error
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    bos, eos = (_declared_token(tokenizer, config, name, path) for name in ("bos_token", "eos_token"))
    if "add_bos_token" in config or "add_eos_token" in config:  # these overrule tokenizer.json
        frame(tokenizer, bos if config.get("add_bos_token") else None, eos if config.get("add_eos_token") else None)
    eos_ids = [] if eos is None else [eos]
    return Backend(tokenizer, bos, eos_ids + _generation_eos(path), _template_of(path, config))


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. LoadError when it is damaged."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{file}: expected a JSON object, not {type(content).__name__}")
    return content


def _generation_eos(path: Path) -> list[int]:
    """The end ids of generation_config.json, or else of config.json: one, a list, or none at all."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(path / name).get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) for i in ids):
            raise LoadError(f"{path / name}: eos_token_id must be an id or a list of ids, not {ids}")
        return ids
    return []


def _declared_token(tokenizer: Tokenizer, config: dict[str, Any], name: str, path: Path) -> int | None:
    """The id of the token that a config calls `name`, made special where tokenizer.json forgot to."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    index = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if index is None:
        raise LoadError(f"{path}: its {name} {token!r} is not in tokenizer.json")
    added = tokenizer.get_added_tokens_decoder().get(index)
    if added is None or not added.special:
        tokenizer.add_special_tokens([token])
    return index


def _template_of(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja before tokenizer_config.json; of several named templates the one called default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{file}: {error}") from error
    match config.get("chat_template"):
        case None | str() as template:
            return template
        case [*named] if all(isinstance(entry, dict) for entry in named):
            return next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
        case other:
            raise LoadError(f"{path}: chat_template must be a string or a list of them, not {type(other).__name__}")
