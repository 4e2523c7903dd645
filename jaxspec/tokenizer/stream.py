"""Token ids to text: through bytes, so that a text can be given out while its tokens come."""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from jaxspec.errors import LoadError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that GPT-2's byte-level BPE writes the 256 bytes with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class Detokenizer:
    """What each token of a tokenizer adds to a text, in bytes, following the tokenizer's own decoder.

    Two kinds of decoder are known: byte level (GPT-2, Llama 3), and SentencePiece's: replacements, byte fallback
    and a stripped first space (Llama 2). LoadError names any other.

    A text is the UTF-8 of all its bytes. The `tokenizers` library says the same, except where byte-fallback tokens
    in a row are not UTF-8: it then gives up the valid characters among them too, which no stream can foresee.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], vocab_size: int) -> None:
        self.special_ids = special_ids
        self.leading_spaces = 0
        """How many spaces a text loses at its beginning."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._byte_level = self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._bytes: dict[int, bytes] = {}
        self._follow(backend.decoder)

    def _follow(self, decoder: tokenizers.decoders.Decoder | None) -> None:
        # A decoder's pickled state is its entry in tokenizer.json.
        description: dict[str, Any] = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
        fused = False
        for step in description.get("decoders", [description]):
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    self.leading_spaces = start
                case _:
                    raise LoadError(
                        f"tokenizer decoder {step['type']!r} is not supported (byte level and byte fallback are)"
                    )

    def bytes_of(self, index: int) -> bytes:
        """The bytes of one token; none for an id between the known ones that has no token."""
        known = self._bytes.get(index)
        if known is None:
            if not 0 <= index < self._vocab_size:
                raise RequestError(f"token id {index} is not in the vocabulary of {self._vocab_size}")
            known = self._bytes[index] = self._to_bytes(self._backend.id_to_token(index) or "")
        return known

    def _to_bytes(self, token: str) -> bytes:
        if self._byte_level:
            if all(character in _ALPHABET for character in token):
                return bytes(_ALPHABET[character] for character in token)
            return token.encode()  # an added token, written in plain text
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.encode()


class TextStream:
    """The text of one sample as its tokens come, never a part of a character."""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skipped = detokenizer.special_ids if skip_special_tokens else frozenset()
        self._spaces_to_drop = detokenizer.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these next ids; empty in the middle of a character."""
        data = b"".join(self._detokenizer.bytes_of(i) for i in ids if i not in self._skipped)
        return self._without_leading_spaces(self._utf8.decode(data))

    def finish(self) -> str:
        """The rest: U+FFFD where the last character was never completed."""
        return self._without_leading_spaces(self._utf8.decode(b"", final=True))

    def _without_leading_spaces(self, text: str) -> str:
        if not self._spaces_to_drop or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        dropped = min(spaces, self._spaces_to_drop)
        # Only a text that is all spaces so far can have more of them to drop.
        self._spaces_to_drop = self._spaces_to_drop - dropped if spaces == len(text) else 0
        return text[dropped:]
