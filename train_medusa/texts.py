"""What heads learn from: questions of files, or ones that the model makes up, and the model's own answers to them."""

import codecs
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError, JaxspecError, LoadError, RequestError
from jaxspec.models.loading import LoadedModel
from jaxspec.tokenizer import Tokenizer
from train_medusa.base import identity
from train_medusa.config import DataConfig

ROWS_AT_ONCE = 32
"""Answers that the engine works on at the same time."""
TRIES = 20
"""Samples that a made-up question may take, on average."""
MARKER = "the user's words"

Progress = Callable[[str, int, int], None]
"""`(what, done, total)`: called as a long task goes on."""


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


class Text(NamedTuple):
    """Token ids of a conversation."""

    tokens: list[int]
    start: int
    """Index of the first token of the answer, which goes to the end."""


class Question(NamedTuple):
    """Token ids of a prompt, and of its answer if it has one."""

    prompt: list[int]
    answer: list[int] | None


def read_texts(
    config: DataConfig,
    loaded: LoadedModel,
    folder: Path,
    tell: Callable[[str], None],
    progress: Progress = no_progress,
) -> list[Text]:
    """The texts to train on: those of the files, in order, then those with questions that the model made up.

    A row of a file is `{"prompt": TEXT}`, one message of a user; `{"messages": [{"role", "content"}, ..]}`; or
    `{"conversations": [{"from": "human" or "gpt" or "system", "value"}, ..]}`. The answer is the last message where
    that is the assistant's, else `answer_ids`, token ids, where the row has those, else what the model answers. What
    the model says is kept in `folder` as it comes, so that a killed run goes on. A text longer than a row is cut, and
    `tell` hears of how many. ConfigError where a row of a file is wrong, LoadError where there is no such file.
    """
    if config.row > loaded.spec.max_context:
        raise ConfigError(f"row {config.row} is more than the {loaded.spec.max_context} tokens the model is made for")
    folder.mkdir(parents=True, exist_ok=True)
    questions = list(islice(_read_files(config, loaded), config.limit))
    if config.synthesize:
        questions += _made_up(config, loaded, folder / "prompts.jsonl", progress)
    questions = _answered(questions, config, loaded, folder / "answers.jsonl", tell, progress)
    texts = [Text([*prompt, *(answer or ())], len(prompt)) for prompt, answer in questions]
    if long := sum(len(text.tokens) > config.row for text in texts):
        tell(f"{long} of {len(texts)} texts are longer than a row: cut to their first {config.row} tokens")
    texts = [Text(text.tokens[: config.row], text.start) for text in texts]
    if config.learn == "answers":
        kept = [text for text in texts if text.start < len(text.tokens)]
        if len(kept) < len(texts):
            tell(f"{len(texts) - len(kept)} of {len(texts)} questions fill a row: there is no answer to learn")
        texts = kept
    if not texts:
        raise ConfigError("[data] gives no texts: name files with rows in them, or synthesize some questions")
    return texts


class _Message(msgspec.Struct):
    role: str
    content: str


class _Turn(msgspec.Struct):
    speaker: Literal["human", "gpt", "system"] = msgspec.field(name="from")
    value: str


class _Row(msgspec.Struct):
    prompt: str | None = None
    messages: list[_Message] | None = None
    conversations: list[_Turn] | None = None
    answer_ids: list[int] | None = None


_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def _read_files(config: DataConfig, loaded: LoadedModel) -> Iterator[Question]:
    for file in config.files:
        try:
            lines = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        except OSError as error:
            raise LoadError(f"cannot read {file}: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _question(msgspec.json.decode(line, type=_Row), loaded)
            except (JaxspecError, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file} line {number}: {error}") from error


def _question(row: _Row, loaded: LoadedModel) -> Question:
    tokenizer, messages = loaded.tokenizer, _messages(row)
    if messages[-1]["role"] != "assistant":
        return Question(_encoded(tokenizer, messages), _checked(row.answer_ids, loaded.spec.valid_vocab))
    if row.answer_ids is not None:
        raise RequestError("there are answer_ids, and the last message is an answer, too: leave one out")
    if len(messages) == 1:
        raise RequestError("the answer comes first: a message of the user must come before it")
    prompt = tokenizer.apply_chat_template(messages[:-1])
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise RequestError("the chat template does not put this answer right after the prompt for it: leave it out")
    answer = tokenizer.encode(whole.removeprefix(prompt), add_special_tokens=False)
    # The model ends there; what templates write before the next message is not its own.
    end = next((place for place, token in enumerate(answer, 1) if token in tokenizer.eos_ids), len(answer))
    return Question(tokenizer.encode(prompt, add_special_tokens=False), answer[:end])


def _messages(row: _Row) -> list[dict[str, Any]]:
    given = [part for part in (row.prompt, row.messages, row.conversations) if part is not None]
    if len(given) != 1:
        raise RequestError("needs one of 'prompt', 'messages' and 'conversations'")
    if not given[0]:
        raise RequestError("the prompt is empty")
    if row.prompt is not None:
        return [{"role": "user", "content": row.prompt}]
    if row.messages is not None:
        return [msgspec.structs.asdict(message) for message in row.messages]
    return [{"role": _ROLES[turn.speaker], "content": turn.value} for turn in row.conversations or ()]


def _encoded(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _checked(answer: list[int] | None, vocab: int) -> list[int] | None:
    if answer is not None and not (answer and min(answer) >= 0 and max(answer) < vocab):
        raise RequestError(f"answer_ids must be one or more of 0 to {vocab - 1}, the model's vocabulary")
    return answer


class Job(NamedTuple):
    """A prompt, as token ids, and how to go on from it."""

    prompt: list[int]
    params: SamplingParams


class Sampled(msgspec.Struct, frozen=True):
    """A row of a file of finished samples."""

    request: str
    """Digest of all that decides the sample."""
    text: str
    token_ids: list[int]
    finish_reason: str


def sample(loaded: LoadedModel, jobs: Sequence[Job], path: Path, context: int, progress: Progress) -> list[Sampled]:
    """A sample of each job, in order: those that the file has already are taken from it, others join it as they finish.

    `context` bounds the tokens of a prompt and its sample. ConfigError where the file is of another kind.
    """
    model = identity(loaded)
    keys = [hashlib.sha256(msgspec.json.encode([model, *job])).hexdigest()[:16] for job in jobs]
    done, wanted = _read_sampled(path), dict(zip(keys, jobs, strict=True))
    todo = {key: job for key, job in wanted.items() if key not in done}
    if todo:
        with path.open("ab") as file:
            for count, row in enumerate(_samples(loaded, todo, context), len(wanted) - len(todo) + 1):
                file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
                done[row.request] = row
                progress(path.stem, count, len(wanted))
    return [done[key] for key in keys]


def _samples(loaded: LoadedModel, jobs: dict[str, Job], context: int) -> Iterator[Sampled]:
    """The samples as they finish."""
    engine = Engine(loaded, EngineConfig(model=loaded.name, max_batch=ROWS_AT_ONCE, max_context=context))
    for key, job in jobs.items():
        engine.add(key, job.prompt, job.params)
    while engine.has_work:
        for news in engine.step():
            if (output := news.finished) is not None:
                if output.finish_reason == "error":
                    raise JaxspecError(f"the model cannot go on from a prompt: {output.stop_reason}")
                yield Sampled(news.request_id, output.text, output.token_ids, output.finish_reason)


def _read_sampled(path: Path) -> dict[str, Sampled]:
    """The rows of the file; a torn last one of a killed run is cut off."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    try:
        rows = [msgspec.json.decode(line, type=Sampled) for line in content[:end].splitlines()]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} was not written by this program ({error}): move it away") from error
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
    return {row.request: row for row in rows}


def _answered(
    questions: list[Question],
    config: DataConfig,
    loaded: LoadedModel,
    path: Path,
    tell: Callable[[str], None],
    progress: Progress,
) -> list[Question]:
    """The questions with the model's answers to those that have none, and leave room for one in a row."""
    asked = [place for place, (prompt, answer) in enumerate(questions) if answer is None and len(prompt) < config.row]
    jobs, short = [], 0
    for place in asked:
        prompt = questions[place].prompt
        short += (room := config.row - len(prompt)) < config.max_answer
        # Equal questions have equal answers, wherever they stand.
        seed = zlib.crc32(np.array(prompt, np.int32).tobytes())
        params = SamplingParams(temperature=config.temperature, max_tokens=min(config.max_answer, room), seed=seed)
        jobs.append(Job(prompt, params))
    if short:
        tell(f"{short} of {len(jobs)} questions leave an answer less than {config.max_answer} tokens of a row")
    found = list(questions)
    for place, output in zip(asked, sample(loaded, jobs, path, config.row, progress), strict=True):
        found[place] = Question(questions[place].prompt, output.token_ids)
    return found


def _made_up(config: DataConfig, loaded: LoadedModel, path: Path, progress: Progress) -> list[Question]:
    """Questions that a chat model asks itself, given the empty turn of a user (Xu et al., 2024): all different."""
    header, params = _user_turn(loaded.tokenizer, config.row)
    texts: dict[str, None] = {}
    tries = 0
    while len(texts) < config.synthesize:
        if tries >= TRIES * max(config.synthesize, ROWS_AT_ONCE):
            raise ConfigError(f"synthesize: {tries} samples gave {len(texts)} different questions: ask for fewer")
        more = max(config.synthesize - len(texts), ROWS_AT_ONCE)
        jobs = [Job(header, msgspec.structs.replace(params, seed=seed)) for seed in range(tries, tries + more)]
        outputs = sample(loaded, jobs, path, config.row, progress)
        texts |= dict.fromkeys(output.text.strip() for output in outputs if output.finish_reason == "stop")
        texts.pop("", None)
        tries += more
    return [
        Question(_encoded(loaded.tokenizer, [{"role": "user", "content": text}]), None)
        for text in list(texts)[: config.synthesize]
    ]


def _user_turn(tokenizer: Tokenizer, row: int) -> tuple[list[int], SamplingParams]:
    """What comes before the words of a user, as token ids, and how to sample them: half a row at most."""
    template = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}])
    before, marker, after = template.partition(MARKER)
    if not marker:
        raise ConfigError("synthesize: the chat template does not show what the user says")
    header, end = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
    ids = [token for token in end if token in tokenizer.special_ids][:1]
    strings = [after.strip()] if after.strip() and not ids else []
    return header, SamplingParams(temperature=1.0, max_tokens=row // 2, stop_token_ids=ids, stop=strings)
