"""Several engines as one; that their texts are right, and all are used, tests/test_parallel.py says."""

import random
from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.replicas import Replicas


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), data_parallel=2, max_batch=2, seed=7)


def test_requests_get_the_seeds_that_one_engine_would_give_them(llm: LLM):
    assert isinstance(llm.engine, Replicas)
    for name in "abcd":
        llm.engine.add(name, "the sea", SamplingParams(temperature=1.0))
    samples = [running.sample for engine in llm.engine.engines for running in engine.scheduler.waiting]
    for name in "abcd":
        llm.engine.abort(name)
    one = random.Random(7)
    assert {sample.request_id: sample.seed for sample in samples} == {name: one.getrandbits(64) for name in "abcd"}


def test_requests_go_to_the_engine_with_least_to_do_and_are_called_off_there(llm: LLM):
    engine, params = llm.engine, SamplingParams(n=3, max_tokens=200, ignore_eos=True)
    engine.add("many", "the sea", params)
    engine.add("one", "the sea", SamplingParams(max_tokens=200, ignore_eos=True))
    engine.add("two", "the sea", SamplingParams(n=2, max_tokens=200, ignore_eos=True))
    engine.add("last", "the sea", SamplingParams(max_tokens=200, ignore_eos=True))
    assert [one.samples for one in engine.engines] == [4, 3]
    assert engine.samples == engine.status().waiting == 7
    engine.abort("two")
    assert [one.samples for one in engine.engines] == [4, 1]
    for name in ("many", "one", "last"):
        engine.abort(name)
    assert not engine.has_work
    assert engine.step() == []


def test_a_pin_is_kept_by_every_engine(llm: LLM):
    document = "the sea is wide and the sky is blue " * 8
    kept = llm.pin(document)
    assert kept > 0
    for engine in llm.engine.engines:
        assert engine.scheduler.cache.pinned > 0
    assert llm.unpin(document) == kept
    assert all(engine.scheduler.cache.pinned == 0 for engine in llm.engine.engines)
