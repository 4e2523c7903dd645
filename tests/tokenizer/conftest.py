"""Two small tokenizers, as GGUF metadata: the bytes, some merges, some special tokens."""

from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def make_byte_level() -> dict[str, Any]:
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["Ġ a", "1 2", "Ã ©", "ð Ł", "ðŁ İ", "a b"]  # of é, and of the first bytes of an emoji
    special = ["<|end|>", "<|start|>"]
    tokens = [*special, *alphabet, *(merge.replace(" ", "") for merge in merges), "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    }


def make_sentencepiece() -> dict[str, Any]:
    pieces = ["▁a", "▁▁", "ab", "▁ab", "▁", "a", "b", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.token_type": [
            *(UNKNOWN, CONTROL, CONTROL),
            *[BYTE] * 256,
            *[NORMAL] * len(pieces),
            USER_DEFINED,
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture
def byte_level_metadata() -> dict[str, Any]:
    return make_byte_level()


@pytest.fixture
def sentencepiece_metadata() -> dict[str, Any]:
    return make_sentencepiece()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(make_byte_level())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(make_sentencepiece())
