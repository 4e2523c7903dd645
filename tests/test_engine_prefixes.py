"""The engine keeps what was computed: for prompts that begin alike, and, pinned, for as long as was asked."""

import math
import time

import msgspec
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.errors import RequestError
from tests.oracles.serving import short_of_pages


@pytest.fixture(scope="module")
def llm(tiny_model) -> LLM:
    return LLM(str(tiny_model), max_batch=8, page_size=16)


def test_the_prefix_cache_spares_what_was_computed(llm, tiny_model):
    llm.engine.scheduler.cache.clear()
    prompt, params = "sea shells by the shore, " * 6, SamplingParams(max_tokens=20, ignore_eos=True)
    first = llm.generate(prompt, params)[0]
    again, salted = (llm.generate(prompt, p)[0] for p in (params, msgspec.structs.replace(params, cache_salt="mine")))
    whole = (len(first.prompt_token_ids) - 1) // 16 * 16
    assert [r.stats.cached_tokens for r in (first, again, salted)] == [0, whole, 0]
    assert first.token_ids == again.token_ids == salted.token_ids
    turn = llm.generate([[*first.prompt_token_ids, *first.token_ids, 5, 6]], params)[0]
    assert turn.stats.cached_tokens == (len(first.prompt_token_ids) + len(first.token_ids) - 1) // 16 * 16
    off = LLM(str(tiny_model), max_batch=8, page_size=16, prefix_cache=False)
    assert [off.generate(prompt, params)[0].token_ids for _ in range(2)] == [first.token_ids] * 2
    assert off.engine.scheduler.counters.hit_tokens == 0


def crowd(llm: LLM) -> None:
    """Others take all pages that can be had."""
    llm.generate([[7 + i, *range(80)] for i in range(5)], SamplingParams(max_tokens=4))


def test_a_pinned_prefix_is_found_until_its_time_is_over_or_it_is_unpinned(llm):
    beginning, params = [5, 6, *range(60)], SamplingParams(max_tokens=4)
    pins = llm.engine.scheduler.pins
    with short_of_pages(llm.engine, 22):
        for end in (lambda: pins.tick(time.perf_counter() + 60.0), lambda: llm.unpin(beginning)):
            assert llm.pin(beginning, ttl=60.0) == 48
            for expected in (48, 48, 0):
                if not expected:
                    assert end() in (None, 48)
                crowd(llm)
                outputs = llm.generate([[*beginning, 9, 8], [*beginning, 7]], params)
                assert min(o.stats.cached_tokens for o in outputs) == expected
        assert llm.unpin(beginning) == 0


def test_text_and_messages_can_be_pinned(llm):
    text = "sea shells by the shore, " * 4
    tokens = llm.pin(text, cache_salt="mine")
    assert tokens == len(llm.tokenizer.encode(text)) // 16 * 16 > 0
    assert llm.unpin(text) == 0
    assert llm.unpin(text, cache_salt="mine") == tokens
    system = [{"role": "system", "content": text}]
    with short_of_pages(llm.engine, 22):
        tokens = llm.pin(system)
        crowd(llm)
        answer = llm.chat([*system, {"role": "user", "content": "she"}], SamplingParams(max_tokens=2))[0]
        assert answer.stats.cached_tokens == tokens > 0
        assert llm.unpin(system) == tokens


def test_pins_that_leave_too_little_are_refused_and_all_others_get_on(llm, tiny_model):
    with short_of_pages(llm.engine, 22):
        assert llm.pin([1, *range(70)], ttl=math.inf) == 64
        with pytest.raises(RequestError, match=r"would pin 4 more pages of 16 tokens, and 2 more may be \(6 in all"):
            llm.pin([2, *range(70)])
        assert not llm.engine.has_work
        assert llm.pin([2, *range(40)]) == 32
        largest = llm.generate([[i] * 216 for i in range(3)], SamplingParams(max_tokens=40, ignore_eos=True))
        assert [len(output.token_ids) for output in largest] == [40, 40, 40]
        assert llm.unpin([1, *range(70)]) + llm.unpin([2, *range(70)]) == 64 + 32
    with pytest.raises(RequestError, match="cache_ttl must be above 0"):
        llm.pin("the sea", ttl=0.0)


def test_without_a_prefix_cache_nothing_can_be_pinned(tiny_model):
    off = LLM(str(tiny_model), max_batch=1, prefix_cache=False)
    with pytest.raises(RequestError, match="prefix cache, which is off"):
        off.pin("the sea")
    assert off.unpin("the sea") == 0
