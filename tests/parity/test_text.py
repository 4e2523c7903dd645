"""SmolLM2's text and all chat templates against programs that nobody here wrote: llama.cpp, transformers."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models

from jaxspec.config import find_config, read_toml
from jaxspec.errors import RequestError
from jaxspec.models.loading.gguf import read_header
from jaxspec.models.loading.wheel import Wheel, cached_member
from jaxspec.tokenizer import Tokenizer
from jaxspec.tokenizer.chat import render_chat

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CHARACTERS = [*"abT1²٣ \n\t'é日한🎉\u0301\u200d\u00a0", "👩\u200d👧", "\r\n", "<|im_end|>"]
KNOWN = st.characters(min_codepoint=32, max_codepoint=0x3FFFF, codec="utf-8")  # SmolLM2 lacks some bytes beyond
TEXT = st.lists(st.sampled_from(CHARACTERS), max_size=24).map("".join) | st.text(KNOWN, max_size=12)


def shared_lines(name: str) -> list[dict[str, Any]]:
    if not (SHARED / name).is_file():
        pytest.skip(f"others' data is not ours to keep here: {name} is compared where it lies beside the checkout")
    with (SHARED / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    wheel = msgspec.convert(read_toml(find_config("models", "smollm2-135m"))["wheel"], Wheel)
    return Tokenizer.from_gguf(read_header(cached_member(wheel)).metadata)


@pytest.fixture(scope="module")
def reference(smollm2: Tokenizer) -> Any:
    """transformers' tokenizer object around the same vocabulary: its own decoding and chat rendering."""
    assert smollm2.bos_id is not None
    bos, eos = (smollm2._backend.id_to_token(i) for i in (smollm2.bos_id, smollm2.eos_ids[0]))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=smollm2._backend, bos_token=bos, eos_token=eos, chat_template=smollm2.chat_template
    )


@pytest.mark.model
def test_smollm2_ids_are_those_of_llama_cpp(smollm2: Tokenizer) -> None:
    rows = shared_lines("smollm2_tokens.jsonl")
    assert len(rows) == 86
    for row in rows:
        assert smollm2.encode(row["text"]) == row["ids"], row["text"]
        assert smollm2.decode(row["ids"], skip_special_tokens=False) == row["text"]


@pytest.mark.model
def test_smollm2_prompts_are_those_of_transformers(smollm2: Tokenizer, reference: Any) -> None:
    questions = shared_lines("spec_bench_dev.jsonl")
    assert {len(question["turns"]) for question in questions} == {1, 2}
    for question in questions:
        conversation = []
        for turn in question["turns"]:
            conversation.append({"role": "user", "content": turn})
            for wanted in (True, False):
                prompt = smollm2.apply_chat_template(conversation, wanted)
                assert prompt == reference.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=wanted
                )
            conversation.append({"role": "assistant", "content": "An answer, 答え."})


@pytest.mark.model
@given(
    chunks=st.lists(st.lists(st.integers(0, 49151) | st.integers(0, 280), max_size=12), max_size=6), skip=st.booleans()
)
def test_smollm2_streams_what_transformers_decodes(
    smollm2: Tokenizer, reference: Any, chunks: list[list[int]], skip: bool
) -> None:
    """Ids under 280 are special tokens and single bytes: text that is not UTF-8."""
    ids = list(itertools.chain.from_iterable(chunks))
    stream = smollm2.stream(skip)
    text = "".join([stream.push(chunk) for chunk in chunks]) + stream.finish()
    assert text == smollm2.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@given(text=TEXT)
def test_smollm2_streams_whole_characters(smollm2: Tokenizer, text: str) -> None:
    stream, shown = smollm2.stream(skip_special_tokens=False), ""
    for index in smollm2.encode(text):
        shown += stream.push([index])
        assert text.startswith(shown)
    assert shown == text


# What published chat templates do, in transformers' renderer and in ours.

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = [
    [{"role": "user", "content": " Hi <é> \"'\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
    [{"role": "user", "content": "1"}, {"role": "user", "content": "2", "name": None, "extra": {"a": [1, "é"]}}],
]
TEMPLATES = {
    "alternating roles": """{{ bos_token }}{% for message in messages %}
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{ raise_exception('roles must alternate') }}
        {% endif %}
        {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
        {% else %}{{ message['content'] | trim + eos_token }}{% endif %}
    {% endfor %}""",
    "no system role": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}ok",
    "headers": """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
        {%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
        {%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
        {{- '<|h|>system\\n' + system }}{{ 'tools!' if tools is not none }}{{ '' if date else 'no date' }}
        {%- for message in messages %}{{- '<|h|>' ~ message.role ~ '\\n' + message.content|trim + eos_token }}
        {%- endfor %}{%- if add_generation_prompt %}{{- '<|h|>assistant\\n' }}{%- endif %}""",
    "loop controls": """{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
        {% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index ~ message.content }}{% endfor %}""",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}\n{% endgeneration %}\n{% endfor %}",
    "macros and namespaces": """{% macro line(m) %}{{ m.role | upper }}: {{ m.content }}{% endmacro %}
        {% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{{ line(m) }}
        {% endfor %}{{ ns.last }}{{ messages[-1].content.split('i')[0] }}{{ messages[0].name }}""",
    "sandbox": "{{ messages.__class__.__base__.__subclasses__() }}",
    "immutable": "{% set _ = messages.append({}) %}{{ messages | length }}",
    "broken": "{% for m in messages %}",
}


@pytest.fixture(scope="module")
def renderer() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Library(models.BPE()), **TOKENS)


def outcomes(renderer: Any, template: str) -> Iterator[tuple[str | None, str | None]]:
    """For each conversation their prompt and ours; None where it is refused."""
    for messages, wanted in itertools.product(CONVERSATIONS, (True, False)):
        try:
            theirs = renderer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=wanted
            )
        except Exception:  # jinja2's own errors, of several kinds
            theirs = None
        try:
            ours = render_chat(template, messages, wanted, TOKENS)
        except RequestError:
            ours = None
        yield theirs, ours


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(renderer: Any, name: str) -> None:
    for theirs, ours in outcomes(renderer, TEMPLATES[name]):
        assert ours == theirs
