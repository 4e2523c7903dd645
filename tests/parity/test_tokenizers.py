"""The tokenizers of other models, small ones made here, against transformers and sentencepiece."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

CHARACTERS = [
    *"abT1²٣ \n\t'é日한🎉\u0301\u200d\u00a0#_-.,!",
    "'s",
    "'LL",
    "  ",
    "   \n",
    "the ",
    "2024",
    "👩\u200d👧",
    "\r\n",
]
TEXT = st.lists(st.sampled_from(CHARACTERS), max_size=24).map("".join) | st.text(max_size=12)

# Byte-level pre-tokenizers: the same vocabulary in transformers' own class of that family.

MERGES = ["Ġ t", "h e", "Ġt he", "2 0", "20 2", "202 4", "' s", "' L", "'L L", "Ċ Ċ", "Ġ Ġ", "Ã ©", "ð Ł", "- .", "a b"]


def byte_level_metadata(pre: str) -> dict[str, Any]:
    tokens = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def vocabulary_and_merges() -> dict[str, Any]:
    tokens = byte_level_metadata("default")["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    return {"vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges}


def transformers_byte_level(name: str) -> Callable[[str], list[int]]:
    special = {"unk_token": None, "bos_token": None, "eos_token": "<|end|>", "pad_token": None}
    tokenizer = getattr(transformers, name)(**vocabulary_and_merges(), **special)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def llama3() -> Callable[[str], list[int]]:
    """What transformers makes of Llama 3's tiktoken file, which has no class of its own."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        def tokenizer(self) -> Any:
            return Library(models.BPE(**vocabulary_and_merges(), ignore_merges=True))

    converted = Converter(vocab_file=None, extra_special_tokens=["<|end|>"]).converted()
    return lambda text: converted.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def byte_level_pairs() -> dict[str, tuple[Tokenizer, Callable[[str], list[int]]]]:
    references = {
        "gpt-2": transformers_byte_level("GPT2Tokenizer"),
        "qwen2": transformers_byte_level("Qwen2Tokenizer"),
        "llama-bpe": llama3(),
    }
    return {pre: (Tokenizer.from_gguf(byte_level_metadata(pre)), encode) for pre, encode in references.items()}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
@settings(max_examples=300)
@given(text=TEXT)
def test_byte_level_ids_are_those_of_transformers(byte_level_pairs: Any, pre: str, text: str) -> None:
    tokenizer, encode = byte_level_pairs[pre]
    assert tokenizer.encode(text) == encode(text)


# SentencePiece: a model trained here by the sentencepiece package.


@pytest.fixture(scope="module")
def llama2() -> tuple[Tokenizer, Any]:
    generator = random.Random(0)
    words = ["the", "these", "there", "ab", "aab", "naïve", "1234", "日本", "über-", "aaaa", "  ", "x\ty", "don't", "."]
    lines = [" ".join(generator.choices(words, k=12)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=259 + 90,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Tokenizer.from_gguf(sentencepiece_metadata(processor)), processor


def sentencepiece_metadata(processor: Any) -> dict[str, Any]:
    ids = range(processor.get_piece_size())
    kinds = {"is_unknown": 2, "is_control": 3, "is_unused": 5, "is_byte": 6}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            next((kind for test, kind in kinds.items() if getattr(processor, test)(i)), 1) for i in ids
        ],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }


PIECES = [*CHARACTERS, "a", "aa", "aaaa", "ab", "these", "there", "日本", "1234", "naïve", "über", "don't", "\u2581"]


@settings(max_examples=400)
@given(text=st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_sentencepiece_ids_and_text(llama2: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, processor = llama2
    ids = processor.encode(text)
    assert tokenizer.encode(text) == [processor.bos_id(), *ids]
    assert tokenizer.decode(ids) == processor.decode(ids)


@given(ids=st.lists(st.integers(3, 310).filter(lambda i: i != 3 + ord(" ")), max_size=24))
def test_sentencepiece_streams_what_it_decodes(llama2: tuple[Tokenizer, Any], ids: list[int]) -> None:
    """Of bytes that are not UTF-8, sentencepiece writes one U+FFFD each, Unicode's rule one for a broken character.
    A first space written as a byte, which no text encodes to, it keeps and transformers drops, as we do."""
    tokenizer, processor = llama2
    stream = tokenizer.stream()
    text = "".join([stream.push([i]) for i in ids]) + stream.finish()
    assert text == tokenizer.decode(ids)
    assert text.replace("\ufffd", "") == processor.decode(ids).replace("\ufffd", "")


# Hugging Face folders, saved and read back by transformers.


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_folder_reads_as_in_transformers(
    tmp_path: Path, flags: dict[str, bool], llama2: tuple[Tokenizer, Any]
) -> None:
    model = json.loads(llama2[0]._backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    saved = transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, **flags)
    saved.chat_template = template
    saved.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.special_ids == set(theirs.all_special_ids)
    assert ours.vocab_size == len(theirs)
    messages = [{"role": "user", "content": "a  b"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)
    for text in ("", "these 1234 日本", "  ab\n\n🎉", "<s> the</s> x"):
        for frame in (True, False):
            ids = theirs.encode(text, add_special_tokens=frame)
            assert ours.encode(text, add_special_tokens=frame) == ids
            assert ours.decode(ids, skip_special_tokens=frame) == theirs.decode(ids, skip_special_tokens=frame)
