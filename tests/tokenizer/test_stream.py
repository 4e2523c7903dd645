"""Streams against the whole text, and against the decoders of the tokenizers library."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxspec.errors import LoadError, RequestError
from jaxspec.tokenizer import Tokenizer
from jaxspec.tokenizer.stream import Detokenizer

IDS = st.lists(st.integers(0, 264), max_size=24)
TEXT = st.lists(st.sampled_from([*"ab1 \n'é日🎉\u0301\u200d👩", "<think>", "  "]), max_size=16).map("".join)


@given(ids=IDS, skip=st.booleans())
def test_byte_level_text_is_what_the_library_decodes(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    assert byte_level.decode(ids, skip) == byte_level._backend.decode(ids, skip_special_tokens=skip)


@given(text=TEXT, skip=st.booleans())
def test_byte_fallback_text_is_what_the_library_decodes(sentencepiece: Tokenizer, text: str, skip: bool) -> None:
    ids = sentencepiece.encode(text)
    assert sentencepiece.decode(ids, skip) == sentencepiece._backend.decode(ids, skip_special_tokens=skip)


@given(ids=IDS)
def test_byte_fallback_replaces_only_what_is_not_utf8(sentencepiece: Tokenizer, ids: list[int]) -> None:
    pieces = [sentencepiece._backend.id_to_token(i) or "" for i in ids if i not in sentencepiece.special_ids]
    data = b"".join(bytes([int(p[3:5], 16)]) if p.startswith("<0x") else p.replace("▁", " ").encode() for p in pieces)
    assert sentencepiece.decode(ids) == data.decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_a_stream_add_up(request: pytest.FixtureRequest, name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = request.getfixturevalue(name)
    chunks = data.draw(st.lists(IDS, max_size=6))
    stream = tokenizer.stream(skip)
    text = "".join([stream.push(chunk) for chunk in chunks]) + stream.finish()
    assert text == tokenizer.decode([i for chunk in chunks for i in chunk], skip)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(text=TEXT)
def test_a_stream_gives_whole_characters_as_soon_as_they_are(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    stream, shown = tokenizer.stream(skip_special_tokens=False), ""
    for index in ids:
        shown += stream.push([index])
        assert whole.startswith(shown)
    assert shown == whole
    assert stream.finish() == ""


def test_an_unfinished_character_ends_in_a_replacement(byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    first, second = byte_level.encode("日")[:2]
    assert stream.push([first]) == ""
    assert stream.push([second]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|end|>b<think>")
    assert byte_level.decode(ids) == "ab<think>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|end|>b<think>"


@pytest.mark.parametrize("index", [-1, 265])
def test_an_id_out_of_range_is_refused(byte_level: Tokenizer, index: int) -> None:
    assert byte_level.vocab_size == 265
    with pytest.raises(RequestError, match=f"token id {index} is not in the vocabulary of 265"):
        byte_level.decode([index])


def test_an_id_without_a_token_has_no_text() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 2}, []))
    backend.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(backend, frozenset(), vocab_size=3)
    assert [detokenizer.bytes_of(i) for i in range(3)] == [b"a", b"", b"b"]


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "none"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), "Strip"),  # would strip every token
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
    ],
)
def test_an_unknown_decoder_is_named(decoder: decoders.Decoder | None, name: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(LoadError, match=name):
        Detokenizer(backend, frozenset(), vocab_size=1)
