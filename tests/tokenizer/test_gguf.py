"""Tokenizers from GGUF metadata. Their ids are compared with other programs' in tests/parity/test_text.py."""

from typing import Any

import pytest

from jaxspec.errors import LoadError
from jaxspec.tokenizer import Tokenizer


def pieces(metadata: dict[str, Any], text: str, add_special_tokens: bool = False) -> list[str]:
    ids = Tokenizer.from_gguf(metadata).encode(text, add_special_tokens)
    return [metadata["tokenizer.ggml.tokens"][i] for i in ids]


def test_byte_level(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (265, 1, (0,))
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.chat_template == byte_level_metadata["tokenizer.chat_template"]
    assert pieces(byte_level_metadata, "<|start|>é ab<think>") == ["<|start|>", "Ã©", "Ġa", "b", "<think>"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "1", "2", "'", "S"]),
        ("gpt-2", ["12", "12", "'", "S"]),
        ("llama-bpe", ["12", "1", "2", "'S"]),
        ("qwen2", ["1", "2", "1", "2", "'S"]),
    ],
)
def test_the_pre_tokenizer_says_what_may_merge(
    byte_level_metadata: dict[str, Any], pre: str, expected: list[str]
) -> None:
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    metadata = byte_level_metadata | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "'S"],
        "tokenizer.ggml.merges": [*byte_level_metadata["tokenizer.ggml.merges"], "' S"],
        "tokenizer.ggml.token_type": [*byte_level_metadata["tokenizer.ggml.token_type"], 1],
    }
    assert pieces(metadata, "1212'S") == expected


def test_llama3_takes_a_word_of_the_vocabulary_that_no_merge_leads_to(byte_level_metadata: dict[str, Any]) -> None:
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], "xyz"]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 1]
    metadata = byte_level_metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert pieces(metadata, "xyz") == ["x", "y", "z"]
    assert pieces(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, "xyz") == ["xyz"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<|start|>", "a"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|start|>", "a", "<|end|>"]),
        ({"add_bos_token": None, "pre": "llama3"}, ["<|start|>", "a"]),
        ({"add_bos_token": None, "pre": "qwen2"}, ["a"]),
    ],
)
def test_the_frame_of_a_text(byte_level_metadata: dict[str, Any], changes: dict[str, Any], expected: list[str]) -> None:
    metadata = byte_level_metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    assert pieces(metadata, "a", add_special_tokens=True) == expected


def test_every_end_token_ends_a_text(byte_level_metadata: dict[str, Any]) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 0}
    assert Tokenizer.from_gguf(byte_level_metadata | ends).eos_ids == (0, 5)


def test_sentencepiece(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
    assert tokenizer.chat_template is None
    assert pieces(sentencepiece_metadata, "ab  é日", add_special_tokens=True) == [
        *("<s>", "▁ab", "▁▁", "é", "<0xE6>", "<0x97>", "<0xA5>")
    ]


@pytest.mark.parametrize(("spaced", "expected"), [(True, ["▁a", "</s>", "▁a"]), (False, ["a", "</s>", "a"])])
def test_a_space_comes_before_each_text_between_special_tokens(
    sentencepiece_metadata: dict[str, Any], spaced: bool, expected: list[str]
) -> None:
    metadata = sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": spaced}
    assert pieces(metadata, "a</s>a") == expected
    assert Tokenizer.from_gguf(metadata).decode(Tokenizer.from_gguf(metadata).encode("a b")) == "a b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "model 'rwkv' is not supported"),
        ({"model": None}, "no model .key tokenizer.ggml.model"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported .*smollm"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"tokens": None}, "no tokens"),
        ({"token_type": None}, "no token_type"),
        ({"token_type": [1]}, "not as many"),
        ({"merges": None}, "no merges"),
        ({"merges": ["a zz"]}, "damaged: .*zz"),
        ({"merges": ["a"]}, "damaged"),
        ({"bos_token_id": 999}, "bos_token_id 999 is not one of its 265 tokens"),
        ({"eot_token_id": -1}, "eot_token_id -1"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    byte_level_metadata: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    metadata = byte_level_metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(LoadError, match=message) as caught:
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})
    assert "\n" not in str(caught.value)


def test_a_token_must_not_come_twice(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata["tokenizer.ggml.tokens"][3] = byte_level_metadata["tokenizer.ggml.tokens"][4]
    with pytest.raises(LoadError, match="hold a token twice"):
        Tokenizer.from_gguf(byte_level_metadata)
