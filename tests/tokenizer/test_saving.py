"""A tokenizer that was written to a folder and read again is the same. (What transformers reads: tests/parity.)"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec.tokenizer import Tokenizer

TEXT = st.lists(st.sampled_from([*"ab1é日🎉 \n", "<|start|>", "<|end|>", "<think>", "<s>", "</s>"]), max_size=12)


def saved(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(folder)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=TEXT)
def test_the_same_ids_and_text(
    kind: str, pieces: list[str], request: pytest.FixtureRequest, reread: dict[str, Tokenizer]
) -> None:
    text, ours, theirs = "".join(pieces), reread[kind], request.getfixturevalue(kind)
    for frame in (True, False):
        ids = theirs.encode(text, frame)
        assert ours.encode(text, frame) == ids
        assert ours.decode(ids, frame) == theirs.decode(ids, frame)


@pytest.fixture(scope="module")
def reread(
    tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer, sentencepiece: Tokenizer
) -> dict[str, Tokenizer]:
    kinds = {"byte_level": byte_level, "sentencepiece": sentencepiece}
    return {kind: saved(tokenizer, tmp_path_factory.mktemp(kind)) for kind, tokenizer in kinds.items()}


CHANGES: list[dict[str, Any]] = [
    {},
    {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
    {"tokenizer.ggml.eot_token_id": 264, "tokenizer.ggml.eom_token_id": 5},
    {"tokenizer.ggml.bos_token_id": None, "tokenizer.chat_template": None},
    {"tokenizer.ggml.eos_token_id": None},
    {"tokenizer.ggml.pre": "llama-bpe"},
    {"tokenizer.ggml.pre": "qwen2"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "plain")
def test_all_that_it_knows(changes: dict[str, Any], byte_level_metadata: dict[str, Any], tmp_path: Path) -> None:
    metadata = {key: value for key, value in (byte_level_metadata | changes).items() if value is not None}
    before = Tokenizer.from_gguf(metadata)
    after = saved(before, tmp_path)
    for name in ("bos_id", "eos_ids", "special_ids", "chat_template", "vocab_size", "vocabulary"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.encode("é 12 ab") == before.encode("é 12 ab")


def test_a_folder_may_be_saved_again(byte_level: Tokenizer, tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        byte_level = saved(byte_level, tmp_path / name)
        texts.append({path.name: path.read_text() for path in (tmp_path / name).iterdir()})
    assert texts[0] == texts[1]
