"""Chat prompts: what a template may do, and what is refused. tests/parity/test_text.py compares with transformers."""

from datetime import datetime
from typing import Any

import pytest

from jaxspec.errors import RequestError
from jaxspec.tokenizer import Tokenizer
from jaxspec.tokenizer.chat import render_chat

USER = {"role": "user", "content": "Hi"}


def render(template: str, *messages: Any, add_generation_prompt: bool = False, **variables: Any) -> str:
    return render_chat(template, list(messages or [USER]), add_generation_prompt, variables)


def test_a_conversation(byte_level: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "Ho"}]
    assert byte_level.apply_chat_template(messages) == "<|start|>Hi<|end|>Ho<|end|>"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_generation_prompt(wanted: bool) -> None:
    assert render("{% if add_generation_prompt %}yes{% endif %}", add_generation_prompt=wanted) == "yes" * wanted


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {% if m %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'é': '<'} | tojson }}", '{"é": "<"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{{ tools is none and documents is none }}{{ unheard_of }}", "True"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ messages[0].name is defined }}", "False"),
    ],
)
def test_what_templates_use(template: str, expected: str) -> None:
    assert render(template, USER | {"name": None}) == expected


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", {"role": "user", "content": parts}) == "a\nb"


def test_the_messages_are_left_as_they_are() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    render("{{ messages[0].content }}", message)
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ unheard_of.name }}", "'unheard_of' is undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_refuses_the_request_in_one_line(template: str, reason: str) -> None:
    with pytest.raises(RequestError, match="the chat template cannot render this conversation") as caught:
        render(template)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list"),
        ([], "at least one"),
        (["Hi"], "message 1 must be an object with role and content, not str"),
        ([USER, {"content": "x"}], "message 2 has no role"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": None}], "message 1 has no content"),
        ([{"role": 1, "content": "x"}], "the role of message 1 must be a string, not int"),
        ([{"role": "user", "content": 5}], "the content of message 1 must be a string or text parts, not int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has a part that is not"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "message 1 has a part that is not"),
        ([{"role": "user", "content": ["x"]}], "message 1 has a part that is not"),
    ],
)
def test_a_malformed_message_is_named(byte_level: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        byte_level.apply_chat_template(messages)


def test_a_model_without_a_template_takes_raw_prompts(sentencepiece: Tokenizer) -> None:
    with pytest.raises(RequestError, match="raw prompts"):
        sentencepiece.apply_chat_template([USER])
