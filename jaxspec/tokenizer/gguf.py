"""A `tokenizers` tokenizer from the metadata of a GGUF file: the ids of the one that the model was trained with."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxspec.errors import LoadError
from jaxspec.tokenizer.backend import Backend, frame

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type; the others (normal, unused, byte) need nothing done."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_LLAMA3 = (_WORDS.format(digits="{1,3}"),)
_QWEN2 = (_WORDS.format(digits=""),)

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
"""tokenizer.ggml.pre: the patterns that split a text before BPE, each one splitting the pieces of those before it."""


def backend_from_gguf(metadata: Mapping[str, Any]) -> Backend:
    """Builds the tokenizer that the `tokenizer.ggml.*` keys describe.

    LoadError names a key that is missing or wrong, and a tokenizer model or pre-tokenizer that is not supported.
    """
    model = _required(metadata, "model")
    if model not in _BUILDERS:
        raise LoadError(f"GGUF tokenizer model {model!r} is not supported ({', '.join(_BUILDERS)} are)")
    tokens = list(_required(metadata, "tokens"))
    types = list(_required(metadata, "token_type"))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise LoadError("the GGUF file's tokenizer.ggml.tokens hold a token twice, or are not as many as token_type")
    try:
        tokenizer = _BUILDERS[model](metadata, tokens, types)
    except LoadError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise LoadError(f"the GGUF file's tokenizer is damaged: {' '.join(str(error).split())}") from error
    _add_tokens(tokenizer, tokens, types)
    bos = _token_id(metadata, "bos", len(tokens))
    ends = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    # What llama.cpp does where the file does not say.
    starts_with_bos = model == "llama" or _SPLITS[metadata["tokenizer.ggml.pre"]] is _LLAMA3
    frame(
        tokenizer,
        bos if metadata.get("tokenizer.ggml.add_bos_token", starts_with_bos) else None,
        ends[0] if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    eos_ids = [end for end in ends if end is not None]
    return Backend(tokenizer, bos, eos_ids, metadata.get("tokenizer.chat_template"))


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not 0 <= value < count:
        raise LoadError(f"the GGUF file's {name}_token_id {value} is not one of its {count} tokens")
    return None if value is None else int(value)


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise LoadError(f"the GGUF file's tokenizer has no {name} (key tokenizer.ggml.{name})")
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """Byte-level BPE of GPT-2, Llama 3, SmolLM2."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise LoadError(f"GGUF pre-tokenizer {pre!r} is not supported ({', '.join(_SPLITS)} are)")
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3's vocabulary holds words that no merge leads to.
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=_SPLITS[pre] is _LLAMA3))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as its tokenizer.json does; GGUF does not say so
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece BPE with byte fallback of Llama 2, TinyLlama, Vicuna."""
    scores = _required(metadata, "scores")
    mergeable = {
        t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind not in (_UNKNOWN, _CONTROL)
    }
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        BPE(
            {token: index for index, token in enumerate(tokens)},
            _merges(mergeable, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend("▁")] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best: as merges, every split of every token into
    two tokens, the best score first, and of one token the longest left part first."""
    splits = [
        (-scores[index], -size, token)
        for token, index in vocabulary.items()
        for size in range(1, len(token))
        if token[:size] in vocabulary and token[size:] in vocabulary
    ]
    return [(token[:-minus_size], token[-minus_size:]) for _, minus_size, token in sorted(splits)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Makes control tokens special, and both they and user-defined tokens found in a text before anything else."""
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""tokenizer.ggml.model."""
