"""Conversations to prompts by a model's own Jinja template, in the dialect that transformers established.

A template comes with the weights, from strangers: it runs in a sandbox and sees nothing but the conversation.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import RequestError


def render_chat(template: str, messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
    """The prompt that a template makes of messages.

    Args:
        template: Jinja source.
        messages: as `Tokenizer.apply_chat_template` takes them.
        add_generation_prompt: end where the assistant's answer begins.
        variables: what else the template may read, such as `bos_token`.

    Raises RequestError when a message is malformed, or the template fails, refuses or leaves its sandbox.
    """
    conversation = _checked(messages)
    try:
        return _compile(template).render(
            messages=conversation,
            tools=None,  # templates test these with `is not none`, which an undefined name would pass
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as error:  # a template is a program: it can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"the chat template cannot render this conversation: {reason}") from error


def _checked(messages: Any) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message")
    return [_checked_message(message, number) for number, message in enumerate(messages, start=1)]


def _checked_message(message: Any, number: int) -> dict:
    """A message whose content is one string, without the keys that are None, which templates take for given."""
    if not isinstance(message, dict):
        raise RequestError(f"message {number} must be an object with role and content, not {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in message:
            raise RequestError(f"message {number} has no {key}")
    if not isinstance(message["role"], str):
        raise RequestError(f"the role of message {number} must be a string, not {type(message['role']).__name__}")
    return {**message, "content": _text_of(message["content"], number)}


def _text_of(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"the content of message {number} must be a string or text parts, not {type(content).__name__}"
        )
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise RequestError(
                    f'message {number} has a part that is not {{"type": "text", "text": …}}: text only here'
                )
    return "\n".join(texts)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    functions: dict[str, Callable] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    environment.filters["tojson"] = _tojson
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
