"""The engine on a tiny model: what a request gets must not depend on its company, and every end is exact."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import msgspec
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.errors import CapacityError, ConfigError, RequestError
from jaxspec.host.output import Transcript
from tests.oracles.serving import short_of_pages

PROMPTS = [
    "she sells",
    "the sea is wide and the sky is blue",
    "a",
    "sea shells by the shore, " * 6,
    "user assistant",
    "the",
    "sky is",
    "shells and shells and shells",
]
KINDS = [
    SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.8, seed=11, logprobs=0),
    SamplingParams(max_tokens=18, temperature=1.0, top_k=12, top_p=0.9, seed=12, logprobs=0),
    SamplingParams(max_tokens=25, temperature=1.3, min_p=0.05, repetition_penalty=1.3, seed=13, logprobs=0),
    SamplingParams(max_tokens=12, frequency_penalty=0.5, presence_penalty=0.4, min_tokens=12, logprobs=0),
    SamplingParams(max_tokens=9, logit_bias={300: 8.0}, temperature=0.7, seed=2**63, logprobs=0),
]
MIX = [(prompt, KINDS[i % len(KINDS)]) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def llm(tiny_model) -> LLM:
    return LLM(str(tiny_model), max_batch=8, page_size=16)


@pytest.fixture(scope="module")
def together(llm):
    return llm.generate([p for p, _ in MIX], [k for _, k in MIX])


def logprobs(output) -> np.ndarray:
    return np.float32([entry.logprob for entry in output.logprobs])


def unheld(llm: LLM) -> int:
    """Pages that no sequence holds: free ones, and those that the prefix cache would give up."""
    scheduler = llm.engine.scheduler
    return scheduler.pages.free + scheduler.cache.evictable


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the events of compiling that happen meanwhile."""
    seen: list[str] = []
    active = True

    def listen(name: str, seconds: float, **_) -> None:
        if active and "compile" in name:
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        active = False


def test_law_3_alone_or_in_company(llm, together):
    for (prompt, params), expected in zip(MIX, together, strict=True):
        alone = llm.generate(prompt, params)[0]
        assert alone.token_ids == expected.token_ids
        assert alone.text == expected.text
        np.testing.assert_allclose(logprobs(alone), logprobs(expected), atol=1e-3)


def test_law_3_order_of_arrival_and_waiting_for_rows(tiny_model, together):
    small = LLM(str(tiny_model), max_batch=3, page_size=8)
    order = [5, 2, 7, 0, 3, 1, 6, 4]
    got = small.generate([MIX[i][0] for i in order], [MIX[i][1] for i in order])
    for i, output in zip(order, got, strict=True):
        assert output.token_ids == together[i].token_ids


def test_waiting_for_pages_changes_nothing(llm, together):
    with short_of_pages(llm.engine, 17):
        got = llm.generate([p for p, _ in MIX], [k for _, k in MIX])
        assert unheld(llm) == 17
    assert [o.token_ids for o in got] == [o.token_ids for o in together]


def test_requests_that_arrive_later_join_the_batch(llm, together):
    done = {}
    for i, (prompt, params) in enumerate(MIX):
        llm.engine.add(f"{i}", prompt, params)
        for news in llm.engine.step():
            if news.finished is not None:
                done[int(news.request_id)] = news.finished
    while llm.engine.has_work:
        for news in llm.engine.step():
            if news.finished is not None:
                done[int(news.request_id)] = news.finished
    assert [done[i].token_ids for i in range(len(MIX))] == [o.token_ids for o in together]


def test_law_6_no_compilation_after_warm_up(llm, together):
    for prompt, params in MIX[:2]:
        llm.generate(prompt, params)
    with compilations() as seen:
        llm.generate([p for p, _ in reversed(MIX)], [k for _, k in reversed(MIX)])
        llm.generate("another prompt", SamplingParams(temperature=0.123, top_k=3, max_tokens=5, stop=["x"]))
        llm.generate([[1, 2, 3]], SamplingParams(logit_bias={5: 1.0, 6: 2.0}, max_tokens=5, stop_token_ids=[9]))
    assert seen == []


def test_the_compilation_counter_counts():
    with compilations() as seen:
        jax.jit(lambda x: x * 3.25)(np.float32(2))
    assert seen


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_text_where_they_are_complete(llm, together, include: bool):
    whole = together[0].text
    for start, length in ((3, 1), (5, 4), (7, 9)):
        stop = whole[start : start + length]
        first = whole.index(stop)
        params = SamplingParams(
            max_tokens=24, ignore_eos=True, logprobs=0, stop=[stop, "never"], include_stop_str_in_output=include
        )
        output = llm.generate(MIX[0][0], params)[0].outputs[0]
        assert output.text == whole[: first + (len(stop) if include else 0)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == together[0].token_ids[: len(output.token_ids)]
        assert len(output.token_ids) == len(output.logprobs) == output.stats.tokens == output.stats.steps
        shorter = llm.tokenizer.decode(output.token_ids[:-1])
        assert stop not in shorter


def test_streamed_text_is_the_text(llm, together):
    for i, (prompt, params) in enumerate(MIX):
        llm.engine.add(f"{i}", prompt, params)
    parts: dict[int, str] = dict.fromkeys(range(len(MIX)), "")
    while llm.engine.has_work:
        for news in llm.engine.step():
            parts[int(news.request_id)] += news.text
    assert [parts[i] for i in range(len(MIX))] == [o.text for o in together]


def test_stop_ids_and_end_of_sequence(llm, together):
    ids = together[0].token_ids
    output = llm.generate(MIX[0][0], SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[ids[4]]))[0]
    end = ids.index(ids[4]) + 1
    assert output.token_ids == ids[:end]
    assert output.outputs[0].stop_reason == ids[4]
    forced = SamplingParams(max_tokens=24, logit_bias={2: 1000.0})
    output = llm.generate("she", forced)[0]
    assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([2], "stop", None)
    assert output.text == ""
    late = SamplingParams(max_tokens=24, logit_bias={2: 1000.0}, min_tokens=7)
    output = llm.generate("she", late)[0]
    assert len(output.token_ids) == 8
    assert output.token_ids.index(2) == 7


def test_logprobs_are_those_of_the_emitted_tokens(llm, together):
    for entry, token in zip(together[0].logprobs, together[0].token_ids, strict=True):
        assert entry.token_id == token
        assert len(entry.top) == 2
        assert next(iter(entry.top)) == token  # a greedy row emits the likeliest
        assert entry.logprob == pytest.approx(entry.top[token])
        assert entry.logprob < 0
    assert llm.generate("she", SamplingParams(max_tokens=2))[0].logprobs is None


def test_samples_and_seeds(llm):
    params = SamplingParams(temperature=1.2, max_tokens=12, n=3, seed=4, ignore_eos=True)
    first, second = llm.generate(["she sells"] * 2, params)
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    free = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True)
    unseeded = llm.generate(["she sells"] * 4, free)
    assert len({tuple(o.token_ids) for o in unseeded}) == 4
    again = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True, seed=unseeded[0].outputs[0].seed)
    assert llm.generate("she sells", again)[0].token_ids == unseeded[0].token_ids


def test_the_context_ends_the_text_at_its_last_slot(llm):
    ids = list(range(3, 203))
    output = llm.generate([ids], SamplingParams(max_tokens=1000, ignore_eos=True))[0]
    assert len(output.token_ids) == 256 - 200
    assert output.finish_reason == "length"


def test_prompts_that_cannot_be_served(llm):
    for prompt, params, message in (
        ([1] * 256, SamplingParams(), "256 tokens and the context holds 256"),
        ([], SamplingParams(), "empty"),
        ([5000], SamplingParams(), "prompt token ids must be 0 to"),
        ([1], SamplingParams(logit_bias={5000: 1.0}), "logit_bias ids must be 0 to"),
        ([1], SamplingParams(stop_token_ids=[5000]), "stop_token_ids must be 0 to"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], params)
    assert not llm.engine.has_work


def test_a_bad_prompt_leaves_nothing_of_the_good_ones_behind(llm):
    with pytest.raises(RequestError):
        llm.generate([[1, 2], []])
    assert not llm.engine.has_work


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tiny_model):
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    scarce = LLM(str(tiny_model), page_size=16, kv_memory=4 * page_bytes / 2**30)
    with pytest.raises(RequestError, match="needs 5 pages of 16 slots, the pool has 4"):
        scarce.generate([[1] * 40], SamplingParams(max_tokens=40))
    with pytest.raises(CapacityError, match="less than one page"):
        LLM(str(tiny_model), kv_memory=1e-9)


def test_bad_engine_options_are_refused(tiny_model):
    for options, message in (
        ({"drafter": "no such"}, "no drafter named 'no such'"),
        ({"kv_dtype": "int3"}, "no kv_dtype named 'int3'"),
        ({"weights": "int3"}, "weights must be"),
        ({"max_context": 10_000}, "more than the 256 tokens"),
        ({"max_batch": 0}, "max_batch must be 1 or more"),
        ({"spam": 1}, "spam"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tiny_model), **options)


def test_abort_frees_rows_and_pages(llm):
    free = unheld(llm)
    for name in ("a", "b"):
        llm.engine.add(name, "she sells", SamplingParams(max_tokens=60, n=2, ignore_eos=True))
    llm.engine.step()
    assert {news.request_id for news in llm.engine.step()} == {"a", "b"}
    llm.engine.abort("a")
    assert {news.request_id for news in llm.engine.step()} == {"b"}
    llm.engine.abort("b")
    assert not llm.engine.has_work
    assert unheld(llm) == free


def test_bfloat16_weights_and_cache_run(tiny_model):
    small = LLM(str(tiny_model), weights="bfloat16", kv_dtype="bfloat16", max_batch=1)
    output = small.generate("she sells", SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert len(output.token_ids) == 8


def test_chat_applies_the_template(llm):
    messages = [{"role": "user", "content": "she sells"}]
    output = llm.chat(messages, SamplingParams(max_tokens=4))[0]
    text = llm.tokenizer.apply_chat_template(messages)
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert llm.chat([messages, messages], SamplingParams(max_tokens=4))[1].token_ids == output.token_ids


@pytest.mark.model
def test_the_default_model_says_what_it_is_known_to_say():
    llm = LLM(max_batch=1)
    output = llm.chat([{"role": "user", "content": "Write a short poem about the sea."}], SamplingParams(max_tokens=6))
    assert output[0].token_ids == [504, 6147, 282, 260, 5065, 28]


def test_text_is_made_while_the_device_runs_the_next_rounds(llm, monkeypatch):
    """What was read is told after the next rounds were handed over."""
    push, flying = Transcript.push, []

    def watched(self, tokens, now):
        flying.append(llm.engine._flight is not None)
        return push(self, tokens, now)

    monkeypatch.setattr(Transcript, "push", watched)
    llm.generate("she sells", SamplingParams(max_tokens=60, ignore_eos=True))
    assert len(flying) > 2
    assert all(flying[:-1])


def test_best_of_gives_the_likeliest_of_all_samples(llm):
    every = SamplingParams(temperature=1.3, max_tokens=12, n=5, seed=4, stop=["e"], logprobs=0)
    ranked = sorted(llm.generate("she sells", every)[0].outputs, key=lambda o: -float(np.mean(logprobs(o))))
    assert len({len(o.token_ids) for o in ranked}) > 1
    best = msgspec.structs.replace(every, n=2, best_of=5)
    quiet, told = llm.generate(["she sells"] * 2, [msgspec.structs.replace(best, logprobs=None), best])
    for outputs in (quiet.outputs, told.outputs):
        assert [(o.token_ids, o.text, o.finish_reason, o.seed) for o in outputs] == [
            (o.token_ids, o.text, o.finish_reason, 4) for o in ranked[:2]
        ]
        assert [o.index for o in outputs] == [0, 1]
    assert [o.logprobs for o in quiet.outputs] == [None, None]
    assert [o.logprobs for o in told.outputs] == [o.logprobs for o in ranked[:2]]


def test_best_of_is_told_at_the_end_and_can_be_aborted(llm):
    params = SamplingParams(temperature=1.3, max_tokens=40, best_of=3, ignore_eos=True)
    news = []
    for name in ("stays", "goes"):
        llm.engine.add(name, "she sells", params)
    llm.engine.step()
    llm.engine.step()
    llm.engine.abort("goes")
    while llm.engine.has_work:
        assert news == []
        news = llm.engine.step()
    [delta] = news
    assert (delta.request_id, delta.tokens, delta.text) == ("stays", 40, delta.finished.text)
    assert llm.engine._contests == {}
