"""Questions to measure with, in the format of Spec-Bench: one JSON object a line."""

import codecs
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec

from jaxspec.config import find_config
from jaxspec.errors import ConfigError, LoadError


class Question(msgspec.Struct, frozen=True):
    """One question; only its first turn is asked. Further fields of a row are left alone."""

    question_id: int | str
    category: str
    turns: Annotated[list[str], msgspec.Meta(min_length=1)]


def read_questions(source: str) -> list[Question]:
    """The questions of a file, or of configs/prompts/NAME.jsonl. ConfigError or LoadError where there are none."""
    path = Path(source) if source.endswith(".jsonl") else find_config("prompts", source, ".jsonl")
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from error
    questions = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise LoadError(f"{path} is empty: it must hold one question a line")
    return questions


def _parse(path: Path, number: int, line: bytes) -> Question:
    try:
        return msgspec.json.decode(line, type=Question)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadError(
            f'{path} line {number}: {error} (wanted: {{"question_id": 1, "category": "qa", "turns": ["Why ..?"]}})'
        ) from error


def choose(questions: Sequence[Question], categories: Sequence[str], limit: int | None) -> list[Question]:
    """The first `limit` questions of each of the categories; no categories means all, None all questions.

    ConfigError names the categories there are.
    """
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories:
        if category not in known:
            raise ConfigError(f"no questions of category {category!r} (there are: {', '.join(known)})")
    return [
        question
        for category in categories or known
        for question in [q for q in questions if q.category == category][:limit]
    ]


def mixed(questions: Sequence[Question]) -> list[Question]:
    """The questions, one of each category after the other."""
    known = dict.fromkeys(question.category for question in questions)
    columns = [[question for question in questions if question.category == category] for category in known]
    return [question for turn in zip_longest(*columns) for question in turn if question is not None]
