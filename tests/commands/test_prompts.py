"""Prompts from arguments, files and standard input."""

import io
import sys
from pathlib import Path

import pytest

from jaxspec.commands.prompts import Prompt, parse_object, parse_source, read_lines, read_prompts
from jaxspec.errors import LoadError, RequestError


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_arguments_are_chats_unless_raw():
    assert read_prompts(["a"], None, False, None) == [Prompt("a", [{"role": "user", "content": "a"}])]
    assert read_prompts(["a", "b"], None, True, None) == [Prompt("a", "a"), Prompt("b", "b")]
    with_system = read_prompts(["a"], None, False, "be brief")[0].source
    assert [message["role"] for message in with_system] == ["system", "user"]  # pyright: ignore[reportArgumentType]


def test_standard_input_is_one_prompt(monkeypatch):
    stdin(monkeypatch, "two\nlinës\r\n".encode())
    assert read_prompts([], None, True, None) == [Prompt("two\nlinës", "two\nlinës")]


@pytest.mark.parametrize(("content", "said"), [(b"", "empty"), (b" \n", "empty"), (b"\xff", "UTF-8")])
def test_standard_input_without_a_prompt(monkeypatch, content, said):
    stdin(monkeypatch, content)
    with pytest.raises((RequestError, LoadError), match=said):
        read_prompts([], None, False, None)


def test_a_terminal_is_not_waited_for(monkeypatch):
    stdin(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(RequestError, match="no prompt"):
        read_prompts([], None, False, None)


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n two\nthree")
    assert [p.text for p in read_prompts([], str(path), True, None)] == ["one", " two", "three"]
    assert read_lines(str(path))[1] == (3, b" two")


def test_a_jsonl_file_of_prompts(tmp_path: Path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "category": "x"}\n\n{"turns": ["b", "later"]}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]}\n'
    )
    assert [p.text for p in read_prompts([], str(path), False, None)] == ["a", "b", "c"]
    assert "1 rows have several turns" in capsys.readouterr().err
    with pytest.raises(RequestError, match="prompt 3 is a chat"):
        read_prompts([], str(path), True, None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: not a JSON object"),
        ("[]", "line 2: not a JSON object"),
        ('{"prompt": "a", "temperature": 1}', "line 2: 'temperature' is a flag here"),
        ('{"turns": []}', "line 2: 'turns'"),
        ('{"question": "a"}', "line 2: needs either"),
        ('{"prompt": " "}', "prompt 2 is empty"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row, said):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row)
    with pytest.raises(RequestError, match=said):
        read_prompts([], str(path), False, None)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "messages": []},
        {"prompt": None},
        {"prompt": ["a"]},
        {"messages": []},
        {"messages": "a"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
def test_what_is_no_request(fields):
    with pytest.raises(RequestError):
        parse_source(fields)


@pytest.mark.parametrize("line", [b"\xff", b"", b"nul", b'{"a": 1', b'{"a": NaN}', b"3", b'{"a": "\xff"}'])
def test_what_is_no_json_object(line):
    with pytest.raises(RequestError, match="not a JSON object"):
        parse_object(line)
