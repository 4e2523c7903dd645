"""What a tokenizer is made of, whichever kind of file it came from."""

from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


class Backend(NamedTuple):
    """A tokenizer of the `tokenizers` library, and what it does not know itself."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_ids: list[int]
    """Every id that ends a text, the one a chat template calls `eos_token` first."""
    chat_template: str | None


def frame(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes `encode` put these ids around a text, and nothing else."""
    before, after = ([] if i is None else [(tokenizer.id_to_token(i), i)] for i in (bos, eos))
    single = [token for token, _ in before] + ["$A"] + [token for token, _ in after]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=before + after)
