"""Tokenizers from Hugging Face folders, written here by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from jaxspec.errors import LoadError, RequestError
from jaxspec.tokenizer import Tokenizer

BOS, EOS = "<|start|>", "<|end|>"
DECLARED = {"bos_token": BOS, "eos_token": EOS}


@pytest.fixture
def folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level._backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": BOS, "eos_token": {"content": EOS}})
    return tmp_path


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_tokenizer_json(folder: Path, byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = "<|start|>é ab 12<think>🎉<|end|>"
    assert tokenizer.encode(text) == byte_level.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (265, 1, (0,))
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.chat_template is None


def test_a_bare_tokenizer_json_is_enough(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())


def test_special_tokens_map_serves_where_the_config_is_silent(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": EOS})
    write(folder, "special_tokens_map.json", {"bos_token": BOS, "eos_token": BOS})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (0,))


@pytest.mark.parametrize(("ids", "expected"), [(7, (0, 7)), ([1, 0, 7], (0, 1, 7)), (None, (0, 9))])
def test_every_id_that_ends_a_text(folder: Path, ids: Any, expected: tuple[int, ...]) -> None:
    write(folder, "generation_config.json", {"eos_token_id": ids})
    write(folder, "config.json", {"eos_token_id": 9})
    assert Tokenizer.from_folder(folder).eos_ids == expected


@pytest.mark.parametrize(("flags", "expected"), [({}, [2]), ({"add_bos_token": True}, [1, 2])])
def test_the_config_says_whether_a_text_begins_with_bos(folder: Path, flags: Any, expected: list[int]) -> None:
    write(folder, "tokenizer_config.json", DECLARED | flags)
    assert Tokenizer.from_folder(folder).encode("!") == expected


def test_a_declared_token_becomes_special(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": "<think>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_ids == {0, 1, 264}
    assert tokenizer.vocab_size == 265


def test_truncation_saved_in_the_file_is_off(folder: Path) -> None:
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_folder(folder).encode("!!!!")) == 4


def test_chat_templates(folder: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    named = [{"name": "rag", "template": "2"}, {"name": "default", "template": "1{{ bos_token }}{{ eos_token }}"}]
    write(folder, "tokenizer_config.json", DECLARED | {"chat_template": named})
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "1<|start|><|end|>"
    (folder / "chat_template.jinja").write_text("3", encoding="utf-8")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "3"


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", '{"version": "1.0"}', "not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: "),
        ("tokenizer_config.json", "[]", "expected a JSON object, not list"),
        ("tokenizer_config.json", '{"eos_token": "<|nowhere|>"}', "eos_token '<|nowhere|>' is not in tokenizer.json"),
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token 5 is not in"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be a string"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id must be an id or a list of ids"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(LoadError) as caught:
        Tokenizer.from_folder(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_unicode_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        byte_level.encode("\ud83c")
