"""The passkey task: prompts, and who is said to have found a number."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.bench import passkey
from jaxspec.bench.passkey import ANSWER, FILLER, NEEDLE, QUESTION, TASK, Try, by_place, make_prompt, retrieve
from jaxspec.config import EngineConfig
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.host.request import TextDelta
from jaxspec.llm import load

DEPTHS = (0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    config = EngineConfig(model=str(tiny_model), max_batch=2, max_context=248, prefill_chunk=128)
    return Engine(load(config), config)


def test_a_prompt_is_whole_sentences_around_the_number(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    for depth in DEPTHS:
        prompt = make_prompt(tokenizer, 12345, 240, depth)
        longest = max(len(tokenizer.encode(" " + sentence)) for sentence in FILLER)
        assert 240 - longest <= len(prompt) <= 240
        text = tokenizer.decode(prompt)
        needle = NEEDLE.format(key=12345)
        assert (text.startswith(TASK), text.endswith(QUESTION), text.count(needle)) == (True, True, 1)
        before, after = text.removeprefix(TASK).removesuffix(QUESTION).split(needle)
        assert len(before) / len(before + after) == pytest.approx(depth, abs=0.2)
        assert {part.strip() for part in re.findall(r"[^.]+\.", before + after)} <= set(FILLER)


def test_a_number_must_fit(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"a passkey and the question for it take \d+ tokens, more than 40"):
        make_prompt(engine.tokenizer, 12345, 40, 0.5)


@pytest.fixture
def answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], str]], None]:
    """Has a function of a prompt's text write the answers in place of the model."""
    real = passkey.finish

    def use(answer: Callable[[str], str]) -> None:
        def finish(engine: Engine, hear: Callable[[TextDelta], None]) -> list:
            def overheard(news: TextDelta) -> None:
                if news.finished is not None:
                    assert news.finished.stats.tokens <= ANSWER
                    text = answer(engine.tokenizer.decode(news.prompt_ids))
                    news = news._replace(finished=replace(news.finished, text=text))
                hear(news)

            return real(engine, overheard)

        monkeypatch.setattr(passkey, "finish", finish)

    return use


def number(text: str) -> str:
    return re.findall(r"\d{5}", text)[0]


def test_who_repeats_the_number_has_found_it(engine: Engine, answers) -> None:
    answers(lambda text: f" {number(text)}. It is")
    tries = retrieve(engine, 220, DEPTHS, keys=2)
    assert tries == [Try(220, depth, True) for depth in DEPTHS for _ in range(2)]


def test_who_sees_only_the_end_of_the_text_finds_what_is_there(engine: Engine, answers) -> None:
    answers(lambda text: " 00000" if text.index("secret number is") < len(text) * 0.4 else number(text))
    assert [one.found for one in retrieve(engine, 220, DEPTHS)] == [False, True, True]


def test_the_model_itself_is_asked(engine: Engine) -> None:
    assert [one.found for one in retrieve(engine, 200, (0.5,))] == [False]  # its weights are random


def test_numbers_are_the_same_for_everyone_and_differ_by_place(engine: Engine, answers) -> None:
    seen: list[str] = []
    answers(lambda text: seen.append(number(text)) or "")
    retrieve(engine, 200, DEPTHS, keys=2)
    first, seen[:] = list(seen), []
    retrieve(engine, 200, DEPTHS, keys=2)
    assert sorted(first) == sorted(seen)
    assert len(set(seen)) == 6


def test_cells_count_hits_of_tries() -> None:
    tries = [Try(256, 0.0, True), Try(256, 0.5, False), Try(256, 0.0, False), Try(512, 0.0, True)]
    assert by_place(tries) == [
        {"length": 256, "depth": 0.0, "found": 1, "tries": 2},
        {"length": 256, "depth": 0.5, "found": 0, "tries": 1},
        {"length": 512, "depth": 0.0, "found": 1, "tries": 1},
    ]
