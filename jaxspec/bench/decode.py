"""Decoding speed of drafters on the same questions, side by side: decode time only, prefill left out.

All drafters answer a group of questions one after the other, then comes the next group, and the whole is repeated: a
machine that is busy for a while slows all of them, and ratios are taken within one repeat.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from jaxspec.bench.questions import Question
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.drafters import drafter_names
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError, JaxspecError, RequestError
from jaxspec.host.request import CompletionOutput
from jaxspec.llm import load


class Group(NamedTuple):
    """Questions of one category that are answered in one batch."""

    category: str
    questions: list[Question]


class Answers(NamedTuple):
    """What a drafter made of a group."""

    seconds: float
    """From the first round of the batch to its last token."""
    outputs: list[CompletionOutput]

    @property
    def tokens(self) -> int:
        return sum(output.stats.tokens for output in self.outputs)

    @property
    def token_ids(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]


Turn = dict[str, Answers]
"""The answers of every drafter to one group."""


def build_engines(config: EngineConfig, drafters: Sequence[str]) -> dict[str, Engine]:
    """An engine for each drafter, all with the parameters of one loading. ConfigError names an unknown drafter."""
    for name in drafters:
        if name not in drafter_names():
            raise ConfigError(f"no drafter named {name!r} (there are: {', '.join(drafter_names())})")
    loaded = load(config)
    return {name: Engine(loaded, msgspec.structs.replace(config, drafter=name)) for name in drafters}


def grouped(questions: Sequence[Question], batch: int) -> list[Group]:
    """The questions, of one category after the other, in groups of `batch`; the last of a category may be smaller."""
    groups = []
    for category in dict.fromkeys(question.category for question in questions):
        members = [question for question in questions if question.category == category]
        groups += [Group(category, members[i : i + batch]) for i in range(0, len(members), batch)]
    return groups


def submit(engine: Engine, group: Group, params: SamplingParams) -> None:
    """Queue the questions of a group under their places in it. RequestError names one that cannot be served."""
    for index, question in enumerate(group.questions):
        try:
            engine.add_chat(str(index), [{"role": "user", "content": question.turns[0]}], params)
        except JaxspecError as error:
            raise RequestError(f"question {question.question_id}: {error}") from error


def answer(engine: Engine, group: Group, params: SamplingParams) -> Answers:
    """Answer a group on an idle engine whose batch holds it."""
    outputs: dict[str, CompletionOutput] = {}
    submit(engine, group, params)
    while engine.has_work:
        for news in engine.step():
            if news.finished is not None:
                outputs[news.request_id] = news.finished
    for request_id, output in outputs.items():
        if output.finish_reason == "error":
            raise RequestError(f"question {group.questions[int(request_id)].question_id}: {output.stop_reason}")
    listed = [outputs[str(index)] for index in range(len(group.questions))]
    # All prompts of the batch are written before its first round, which starts all the clocks.
    return Answers(max(output.stats.seconds for output in listed), listed)


def warm_up(engines: dict[str, Engine], groups: Sequence[Group], params: SamplingParams) -> None:
    """Compile what the groups need, by answering one of each size; RequestError first where any cannot be served."""
    for engine in engines.values():
        for group in groups:
            submit(engine, group, params)
            for index in range(len(group.questions)):
                engine.abort(str(index))
        for group in {len(group.questions): group for group in groups}.values():
            answer(engine, group, params)


def context_of(engine: Engine, groups: Sequence[Group], max_tokens: int) -> int:
    """Tokens that a question's context has half way through its answer, on average."""
    texts = [
        engine.tokenizer.apply_chat_template([{"role": "user", "content": question.turns[0]}])
        for group in groups
        for question in group.questions
    ]
    prompt = sum(len(engine.tokenizer.encode(text, add_special_tokens=False)) for text in texts) // len(texts)
    return min(prompt + max_tokens // 2, engine.max_context - 1)


def measure(
    engines: dict[str, Engine],
    groups: Sequence[Group],
    params: SamplingParams,
    repeats: int,
    turns: list[list[Turn]],
    tell: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Add `repeats` rounds of turns to `turns`, one list a repeat; `tell` hears of the tokens of each answer.

    What was measured before an interruption stays in `turns`.
    """
    for _ in range(repeats):
        turns.append([])
        for group in groups:
            turn: Turn = {}
            for name, engine in engines.items():
                turn[name] = answer(engine, group, params)
                tell(turn[name].tokens)
            turns[-1].append(turn)
