"""From files and a model to texts: what rows mean, what is refused, and that nothing is answered twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.loading import LoadedModel, load_model
from train_medusa import texts as texts_module
from train_medusa.config import DataConfig
from train_medusa.texts import Text, read_texts

SHARED = Path(__file__).parents[3] / "shared" / "data" / "smollm2_answers.jsonl"
QUESTIONS = ["the sea", "she sells", "is the sky blue", "by the shore", "sea shells", "wide"]


class KilledError(Exception):
    """Stands for a signal."""


@pytest.fixture(autouse=True)
def small(monkeypatch, unoptimised) -> None:
    """One engine serves all tests."""
    monkeypatch.setattr(texts_module, "ROWS_AT_ONCE", 1)


def silent(said: str) -> None:
    raise AssertionError(f"said: {said}")


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def prompts(path: Path, *questions: str) -> str:
    return write(path, *({"prompt": question} for question in questions))


def greedy(loaded: LoadedModel, questions: list[str], tokens: int) -> list[list[int]]:
    """Each question's answer, decoded by itself."""
    engine = Engine(loaded, EngineConfig(max_batch=1, max_context=128))
    answers = []
    for question in questions:
        params = SamplingParams(max_tokens=tokens)
        engine.add_chat("0", [{"role": "user", "content": question}], params)
        while engine.has_work:
            answers += [news.finished.token_ids for news in engine.step() if news.finished is not None]
    return answers


def test_what_the_three_kinds_of_rows_mean(loaded: LoadedModel, tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "the sea"}, {"role": "assistant", "content": "is wide"}
    file = write(
        tmp_path / "in.jsonl",
        {"source": "x", "prompt": "the sea", "answer_ids": [9, 8, 7]},
        "",
        {"messages": [user, said]},
        {"messages": [{"role": "system", "content": "blue"}, user, said, user], "answer_ids": [5]},
        {"conversations": [{"from": "system", "value": "blue"}, {"from": "human", "value": "the sea"}]}
        | {"answer_ids": [4]},
        {"conversations": [{"from": "human", "value": "the sea"}, {"from": "gpt", "value": "is wide"}]},
    )
    texts = read_texts(DataConfig(files=[file], row=128), loaded, tmp_path, silent)
    encode = loaded.tokenizer.encode
    asks = "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nblue<|im_end|>\n"
    turn = system + asks + "is wide<|im_end|>\n" + asks
    answer = encode("is wide<|im_end|>")
    assert texts == [
        Text([*encode(asks), 9, 8, 7], len(encode(asks))),
        Text([*encode(asks), *answer], len(encode(asks))),
        Text([*encode(turn), 5], len(encode(turn))),
        Text([*encode(system + asks), 4], len(encode(system + asks))),
        Text([*encode(asks), *answer], len(encode(asks))),
    ]
    assert answer[-1] in loaded.tokenizer.eos_ids
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[]", "line 2: Expected `object`, got `array`"),
        ({"text": "x"}, "line 2: needs one of 'prompt', 'messages' and 'conversations'"),
        ({"prompt": "x", "messages": []}, "line 2: needs one of"),
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"messages": []}, "line 2: the prompt is empty"),
        ({"prompt": 3}, "line 2: Expected `str | null`, got `int` - at `$.prompt`"),
        ({"messages": [{"role": "user"}]}, "line 2: Object missing required field `content`"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "line 2: Invalid enum value 'robot'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: the answer comes first"),
        ({"prompt": "x", "answer_ids": []}, "line 2: answer_ids must be one or more of 0 to 305"),
        ({"prompt": "x", "answer_ids": [1, 306]}, "line 2: answer_ids must be one or more of 0 to 305"),
        ({"prompt": "x", "answer_ids": [-1]}, "line 2: answer_ids must be"),
        (
            {
                "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
                "answer_ids": [1],
            },
            "line 2: there are answer_ids, and the last message is an answer, too",
        ),
        ('{"prompt": "\\ud800"}', "line 2: "),
    ],
)
def test_a_bad_row_is_refused_by_its_line(loaded: LoadedModel, tmp_path: Path, row: Any, said: str) -> None:
    file = write(tmp_path / "in.jsonl", {"prompt": "x", "answer_ids": [1]}, row)
    with pytest.raises(ConfigError) as error:
        read_texts(DataConfig(files=[file], row=128), loaded, tmp_path, silent)
    assert str(error.value).startswith(f"{file} line 2: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_there_is_not_is_said(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read .*nope\.jsonl: No such file"):
        read_texts(DataConfig(files=[str(tmp_path / "nope.jsonl")], row=128), loaded, tmp_path, silent)
    with pytest.raises(ConfigError, match=r"\[data\] gives no texts"):
        read_texts(DataConfig(files=[write(tmp_path / "in.jsonl")], row=128), loaded, tmp_path, silent)
    with pytest.raises(ConfigError, match="row 257 is more than the 256 tokens the model is made for"):
        read_texts(DataConfig(files=[write(tmp_path / "in.jsonl")], row=257), loaded, tmp_path, silent)


def test_an_answer_that_the_template_hides_is_refused(loaded: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    rewritten = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", rewritten)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    file = write(tmp_path / "in.jsonl", {"messages": messages})
    with pytest.raises(ConfigError, match="line 1: the chat template does not put this answer right after"):
        read_texts(DataConfig(files=[file], row=128), loaded, tmp_path, silent)


def test_the_model_answers_what_has_no_answer(loaded: LoadedModel, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *({"prompt": q} for q in QUESTIONS), {"prompt": "x", "answer_ids": [3]})
    shown: list[tuple[str, int, int]] = []
    config = DataConfig(files=[file], row=128, max_answer=12)
    texts = read_texts(config, loaded, tmp_path / "run", silent, lambda *news: shown.append(news))
    assert [text.tokens[text.start :] for text in texts] == [*greedy(loaded, QUESTIONS, 12), [3]]
    assert shown == [("answers", done, len(QUESTIONS)) for done in range(1, len(QUESTIONS) + 1)]
    assert read_texts(config, loaded, tmp_path / "run", silent, lambda *news: silent("done already")) == texts


def test_a_limit_counts_rows_over_all_files(loaded: LoadedModel, tmp_path: Path) -> None:
    row = {"prompt": "x", "answer_ids": [3]}
    files = [write(tmp_path / "a.jsonl", row, row), write(tmp_path / "b.jsonl", row, row, "{")]
    assert len(read_texts(DataConfig(files=files, row=128, limit=3), loaded, tmp_path, silent)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_run_answers_only_the_rest(loaded: LoadedModel, tmp_path: Path, temperature, monkeypatch) -> None:
    file = prompts(tmp_path / "in.jsonl", *QUESTIONS)
    config = DataConfig(files=[file], row=128, max_answer=9, temperature=temperature)
    whole = read_texts(config, loaded, tmp_path / "whole", silent)

    def kill(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KilledError

    with pytest.raises(KilledError):
        read_texts(config, loaded, tmp_path / "cut", silent, kill)
    path = tmp_path / "cut" / "answers.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)
    assert len(kept) == 2
    path.write_bytes(b"".join(kept) + kept[0][:20])

    asked = []
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda *args: asked.append(args[1]) or add(*args))
    assert read_texts(config, loaded, tmp_path / "cut", silent) == whole
    assert len(asked) == len(QUESTIONS) - 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["request"] for row in rows}) == len(rows) == len(QUESTIONS)


@pytest.mark.parametrize("change", ["temperature", "max_answer", "weights"])
def test_answers_of_another_question_or_model_are_not_used(loaded: LoadedModel, tmp_path: Path, change: str) -> None:
    file, model = prompts(tmp_path / "in.jsonl", "the sea"), loaded
    read_texts(DataConfig(files=[file], row=128, max_answer=5), loaded, tmp_path, silent)
    options: dict[str, Any] = {"row": 128, "max_answer": 5}
    if change == "weights":
        model = loaded._replace(params=loaded.params | {"norm": {"weight": -loaded.params["norm"]["weight"]}})
    else:
        options[change] = {"temperature": 1.0, "max_answer": 6}[change]
    read_texts(DataConfig(files=[file], **options), model, tmp_path, silent)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_a_file_of_another_kind_is_left_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    mine = prompts(tmp_path / "answers.jsonl", "the sea")
    with pytest.raises(ConfigError, match=r"answers\.jsonl was not written by this program .*: move it away"):
        read_texts(DataConfig(files=[mine], row=128, max_answer=5), loaded, tmp_path, silent)
    assert json.loads(Path(mine).read_text()) == {"prompt": "the sea"}


def test_long_texts_are_cut_and_counted(loaded: LoadedModel, tmp_path: Path) -> None:
    long, longer = "the sea " * 55, "the sea " * 80
    file = write(
        tmp_path / "in.jsonl",
        {"prompt": "the sea", "answer_ids": [9] * 150},
        {"prompt": long},
        {"prompt": longer},
        {"prompt": longer, "answer_ids": [9]},
    )
    size = len(loaded.tokenizer.encode(f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"))
    assert 108 < size < 128
    told: list[str] = []
    config = DataConfig(files=[file], row=128, max_answer=20)
    first, second = read_texts(config, loaded, tmp_path, told.append)
    assert (len(first.tokens), len(second.tokens), second.start) == (128, 128, size)
    assert told == [
        "1 of 1 questions leave an answer less than 20 tokens of a row",
        "3 of 4 texts are longer than a row: cut to their first 128 tokens",
        "2 of 4 questions fill a row: there is no answer to learn",
    ]
    everything = DataConfig(files=[file], row=128, max_answer=20, learn="all")
    assert [len(text.tokens) for text in read_texts(everything, loaded, tmp_path, told.append)] == [128] * 4


def test_the_model_makes_up_its_own_questions(loaded: LoadedModel, tmp_path: Path) -> None:
    config = DataConfig(files=[], row=128, synthesize=6, max_answer=4)
    texts = read_texts(config, loaded, tmp_path / "whole", silent)
    heads = [loaded.tokenizer.decode(text.tokens[: text.start], skip_special_tokens=False) for text in texts]
    assert len(set(heads)) == 6
    for head in heads:
        question = head.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert question.strip()
        assert question != head

    def kill(what: str, done: int, total: int) -> None:
        if (what, done) == ("prompts", 5):
            raise KilledError

    with pytest.raises(KilledError):
        read_texts(config, loaded, tmp_path / "cut", silent, kill)
    assert len((tmp_path / "cut" / "prompts.jsonl").read_text().splitlines()) == 5
    assert read_texts(config, loaded, tmp_path / "cut", silent) == texts
    # More are asked for: those that there are come first.
    more = DataConfig(files=[], row=128, synthesize=7, max_answer=4)
    assert read_texts(more, loaded, tmp_path / "cut", silent)[:6] == texts


def test_a_template_without_the_user_s_words_makes_up_nothing(loaded: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    config = DataConfig(files=[], row=128, synthesize=2)
    monkeypatch.setattr(loaded.tokenizer, "chat_template", "hello")
    with pytest.raises(ConfigError, match="synthesize: the chat template does not show what the user says"):
        read_texts(config, loaded, tmp_path, silent)


@pytest.mark.model
@pytest.mark.skipif(not SHARED.exists(), reason="the answers lie beside the checkout, not in it")
def test_answers_of_the_real_model(tmp_path: Path) -> None:
    loaded = load_model("smollm2-135m", progress=False)
    texts = read_texts(DataConfig(files=[str(SHARED)], limit=50), loaded, tmp_path, lambda said: None)
    rows = [json.loads(line) for line in SHARED.read_text().splitlines()[:50]]
    for text, row in zip(texts, rows, strict=True):
        assert text.tokens[text.start :] == row["answer_ids"][: 512 - text.start]
        head = loaded.tokenizer.decode(text.tokens[: text.start], skip_special_tokens=False)
        assert head.endswith(row["prompt"] + "<|im_end|>\n<|im_start|>assistant\n")
        assert head.startswith("<|im_start|>system\n")
