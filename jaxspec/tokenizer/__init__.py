"""Text to token ids and back, and conversations to prompts. No jax here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import RequestError
from jaxspec.tokenizer.backend import Backend
from jaxspec.tokenizer.chat import render_chat
from jaxspec.tokenizer.folder import backend_from_folder
from jaxspec.tokenizer.gguf import backend_from_gguf
from jaxspec.tokenizer.saving import save_backend
from jaxspec.tokenizer.stream import Detokenizer, TextStream

__all__ = ["TextStream", "Tokenizer"]


class Tokenizer:
    """The text side of one model. Built by `from_folder` or `from_gguf`."""

    vocab_size: int
    """Ids it knows: the largest plus one, added tokens included."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Every id that ends a text; the first is the one a chat template calls `eos_token`."""
    special_ids: frozenset[int]
    """Control tokens: `decode` leaves them out by default."""
    chat_template: str | None

    def __init__(self, backend: Backend) -> None:
        self._backend = backend.tokenizer
        # A tokenizer.json may have been saved with truncation on; a prompt must never lose its end in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.vocab_size = 1 + max(self._backend.get_vocab().values(), default=-1)
        self.bos_id = backend.bos_id
        self.eos_ids = tuple(dict.fromkeys(backend.eos_ids))
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.chat_template = backend.chat_template
        self._detokenizer = Detokenizer(self._backend, self.special_ids, self.vocab_size)

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """From a Hugging Face folder: its tokenizer.json, and the configs and chat template beside it.
        LoadError when tokenizer.json is missing or a file is damaged."""
        return cls(backend_from_folder(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the key/value pairs of a GGUF file. LoadError names a tokenizer model or pre-tokenizer that is
        not supported, or the key that is missing."""
        return cls(backend_from_gguf(metadata))

    def save(self, folder: Path) -> None:
        """Writes the tokenizer files of a Hugging Face folder: `from_folder` then gives this tokenizer again.
        OSError where they cannot be written."""
        save_backend(Backend(self._backend, self.bos_id, list(self.eos_ids), self.chat_template), folder)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""
        return self._backend.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids; `add_special_tokens`
        adds what the model frames a text with (a BOS for Llama, nothing for SmolLM2). A rendered chat template holds
        its own, so encode it without. RequestError when the text is not valid Unicode."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise RequestError("the text is not a string of valid Unicode (has it half a surrogate pair?)") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD. RequestError for an id out of range."""
        stream = self.stream(skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Decodes ids as they come; what it gives adds up to `decode` of all of them."""
        return TextStream(self._detokenizer, skip_special_tokens)

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, as text with the model's special tokens written out.

        Args:
            messages: a list of dicts with `role` and `content` (a string, or a list of `{"type": "text", "text": …}`
                parts, which newlines join), and whatever else the template reads. Checked here: it may come
                straight from a JSON file.
            add_generation_prompt: end where the assistant's answer begins.

        Raises RequestError when the model has no template, a message is malformed or the template refuses.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template: give raw prompts instead")
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        variables = {name: self._backend.id_to_token(index) for name, index in ids.items() if index is not None}
        return render_chat(self.chat_template, messages, add_generation_prompt, variables)
