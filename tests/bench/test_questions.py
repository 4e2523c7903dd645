"""Questions in Spec-Bench's format, and our own set of them."""

from collections import Counter
from pathlib import Path

import pytest

from jaxspec.bench.questions import Question, choose, read_questions
from jaxspec.errors import ConfigError, LoadError

SHARED = Path(__file__).parents[3] / "shared" / "data" / "spec_bench_dev.jsonl"
OF_WORDS = ["writing", "roleplay", "reasoning", "math", "coding", "stem", "humanities", "qa", "math_reasoning"]
OF_PASSAGES = ["extraction", "translation", "summarization", "rag"]


def test_our_own_set() -> None:
    questions = read_questions("default")
    assert Counter(q.category for q in questions) == dict.fromkeys(OF_WORDS + OF_PASSAGES, 4)
    assert len({q.question_id for q in questions}) == len({q.turns[0] for q in questions}) == 52
    for question in questions:
        if question.category in OF_PASSAGES:
            assert 80 <= len(question.turns[0].split()) <= 300, question


@pytest.mark.skipif(
    not SHARED.exists(), reason="Spec-Bench is not ours to keep here: read where it lies beside the checkout"
)
def test_spec_bench_itself_can_be_read() -> None:
    questions = read_questions(str(SHARED))
    assert len(questions) == 240
    assert {q.category for q in questions} == {*OF_WORDS, *OF_PASSAGES}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"question_id": 1, "category": "a", "turns": ["x"]}\n{', "line 2: "),
        ('{"question_id": 1, "turns": ["x"]}', "missing required field `category`"),
        ('{"question_id": 1, "category": "a", "turns": []}', "line 1: Expected `array` of length >= 1"),
        ('{"question_id": 1, "category": "a", "turns": "x"}', "line 1: Expected `array`"),
        ("[1]", "line 1: Expected `object`"),
        ("\xff", "line 1: "),
        ("\n\n", "is empty"),
    ],
)
def test_other_files_are_refused_by_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(LoadError) as error:
        read_questions(str(path))
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no prompts config named 'nope' \(there are: default\)"):
        read_questions("nope")
    with pytest.raises(LoadError, match="cannot read"):
        read_questions(str(tmp_path / "nope.jsonl"))


def test_choose() -> None:
    questions = [Question(i, "abab"[i], ["?"]) for i in range(4)]
    assert [q.question_id for q in choose(questions, [], None)] == [0, 2, 1, 3]
    assert [q.question_id for q in choose(questions, ["b", "a"], 1)] == [1, 0]
    with pytest.raises(ConfigError, match=r"category 'c' \(there are: a, b\)"):
        choose(questions, ["c"], None)
