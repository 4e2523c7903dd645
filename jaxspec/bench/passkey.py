"""Passkey retrieval (Mohtashami and Jaggi, 2023): a number hidden in text about other things, asked for at its end."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from jaxspec.bench.engine import finish
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.host.request import TextDelta
from jaxspec.tokenizer import Tokenizer

TASK = "Somewhere in this text there is a secret number. Find it and remember it.\n\n"
NEEDLE = "The secret number is {key}. Remember it: {key} is the secret number."
QUESTION = "\n\nWhat is the secret number? The secret number is"
FILLER = (
    "The road runs along the river for a while.",
    "Birds sit on the old wall in the morning.",
    "A cart goes by, and then another one.",
    "The baker opens his shop and sweeps the step.",
    "It may rain later, or it may not.",
    "Children walk to school in small groups.",
    "Someone paints a door green.",
    "The wind turns the leaves over.",
)
ANSWER = 8
"""Tokens of an answer: a space, five digits and some to spare."""


class Try(NamedTuple):
    """One number that was hidden and asked for."""

    length: int
    """Tokens of the prompt at most."""
    depth: float
    """Where the number stood: 0 is the beginning of the text, 1 its end."""
    found: bool


def make_prompt(tokenizer: Tokenizer, key: int, length: int, depth: float) -> list[int]:
    """As many whole sentences around the number as `length` tokens hold. ConfigError where they do not even hold it."""

    def encoded(count: int) -> list[int]:
        sentences = list(islice(cycle(FILLER), count))
        sentences.insert(round(depth * count), NEEDLE.format(key=f"{key:05}"))
        return tokenizer.encode(TASK + " ".join(sentences) + QUESTION)

    count = bisect_right(range(length), length, key=lambda count: len(encoded(count))) - 1
    if count < 0:
        raise ConfigError(f"a passkey and the question for it take {len(encoded(0))} tokens, more than {length}")
    return encoded(count)


def retrieve(engine: Engine, length: int, depths: Sequence[float], keys: int = 1) -> list[Try]:
    """Ask greedily for `keys` numbers at each depth, all at once, of an idle engine.

    Which numbers they are depends on length and depth alone. ConfigError or RequestError where a prompt cannot be
    served.
    """
    hidden: list[tuple[float, int]] = []
    for depth in depths:
        numbers = random.Random(f"{length} {depth}")
        hidden += [(depth, numbers.randrange(10_000, 100_000)) for _ in range(keys)]
    for place, (depth, key) in enumerate(hidden):
        engine.add(str(place), make_prompt(engine.tokenizer, key, length, depth), SamplingParams(max_tokens=ANSWER))
    answers: dict[str, str] = {}

    def hear(news: TextDelta) -> None:
        if news.finished is not None:
            answers[news.request_id] = news.finished.text

    finish(engine, hear)
    return [Try(length, depth, str(key) in answers[str(place)]) for place, (depth, key) in enumerate(hidden)]


def by_place(tries: Sequence[Try]) -> list[dict[str, int | float]]:
    """Hits of tries for each length and depth: a cell of a heat map each."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for one in tries:
        cells.setdefault((one.length, one.depth), []).append(one.found)
    return [
        {"length": length, "depth": depth, "found": sum(found), "tries": len(found)}
        for (length, depth), found in cells.items()
    ]
