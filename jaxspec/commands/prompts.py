"""Where prompts come from: arguments, a file or standard input; and requests written as JSON."""

import codecs
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxspec.commands.options import SAMPLING
from jaxspec.commands.running import Messages
from jaxspec.errors import LoadError, RequestError


class Prompt(NamedTuple):
    """What to answer: `source` is text to complete, or the messages of a chat."""

    text: str
    """The prompt as its author wrote it: of a chat, the last message."""
    source: str | Messages


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str


def read_lines(path: str) -> list[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number from 1. LoadError when unreadable or empty."""
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise LoadError(f"{path} is empty: it must hold one prompt a line")
    return found


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line. RequestError when it is none."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"not a JSON object: {error}") from error


def parse_source(fields: dict[str, Any]) -> str | Messages:
    """The request in `fields`: exactly one of `prompt` and `messages`. RequestError for anything else."""
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("needs either 'prompt' or 'messages'")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise RequestError("'prompt' must be a string")
        return fields["prompt"]
    try:
        messages = msgspec.convert(fields["messages"], list[Message])
    except msgspec.ValidationError as error:
        raise RequestError(f"'messages' must be a list of {{role, content}}: {error}") from error
    if not messages:
        raise RequestError("'messages' is empty")
    return [msgspec.structs.asdict(message) for message in messages]


def read_prompts(arguments: list[str], file: str | None, raw: bool, system: str | None) -> list[Prompt]:
    """What the command line asks for, in order. Raises RequestError or LoadError when there is nothing to answer."""
    if arguments and file:
        raise RequestError("give prompts as arguments or with --file, not both")
    if raw and system is not None:
        raise RequestError("--system needs a chat: leave out --raw")
    if file and file.endswith(".jsonl"):
        sources = _read_rows(file)
    elif file:
        sources = [_decode(line, f"{file} line {number}") for number, line in read_lines(file)]
    else:
        sources = arguments or [_read_stdin()]
    return [_prompt(number, source, raw, system) for number, source in enumerate(sources, 1)]


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError('no prompt: give one as an argument, such as jaxspec generate "Hello!"')
    return _decode(sys.stdin.buffer.read(), "standard input").rstrip("\r\n")


def _decode(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error


def _read_rows(path: str) -> list[str | Messages]:
    """The requests of a .jsonl file. Columns that describe a row are welcome; options would be silently lost."""
    sources, cut = [], 0
    for number, line in read_lines(path):
        try:
            fields = parse_object(line)
            if option := next((name for name in SAMPLING if name in fields), None):
                raise RequestError(f"{option!r} is a flag here; `jaxspec batch` takes options from each row")
            if "turns" in fields:
                turns = _turns(fields["turns"])
                cut += len(turns) > 1
                fields = {"prompt": turns[0]}
            sources.append(parse_source(fields))
        except RequestError as error:
            raise RequestError(f"{path} line {number}: {error}") from error
    if cut:
        print(f"note: {cut} rows have several turns; only the first of each is asked", file=sys.stderr)
    return sources


def _turns(turns: Any) -> list[str]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise RequestError("'turns' must be a list of strings")
    return turns


def _prompt(number: int, source: str | Messages, raw: bool, system: str | None) -> Prompt:
    text = source if isinstance(source, str) else source[-1]["content"]
    if not text.strip():
        raise RequestError(f"prompt {number} is empty")
    if raw:
        if not isinstance(source, str):
            raise RequestError(f"prompt {number} is a chat: leave out --raw")
        return Prompt(text, source)
    messages = [{"role": "user", "content": source}] if isinstance(source, str) else source
    return Prompt(text, [{"role": "system", "content": system}, *messages] if system is not None else messages)
