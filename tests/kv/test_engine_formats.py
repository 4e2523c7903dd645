"""Laws 1, 3 and 5 through the engine with formats that lose something: hits, forks, preemption, poison, drafts."""

import random

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.host.request import CompletionOutput
from jaxspec.models.loading import LoadedModel, load_model
from tests.driver import VOCAB
from tests.oracles.serving import Results, Work, poison, preempt_every_round, serve
from tests.oracles.small import DRAFTS, shrink, transformer_of

PAGE, GROUP, CONTEXT = 8, 4, 120
CLOSE = 0.02
"""Rounding before it is stored may move a log probability by this much."""


@pytest.fixture(scope="module")
def transformer(tiny_model) -> LoadedModel:
    """A small transformer whose text varies with the context."""
    return transformer_of(load_model(str(tiny_model), progress=False).tokenizer, CONTEXT)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, transformer: LoadedModel):
    """Makes engines whose pages, groups and rows are small."""
    shrink(monkeypatch, PAGE, transformer, GROUP)

    def make(kv_dtype: str, drafter: str, **options) -> Engine:
        shape = {"max_batch": 4, "page_size": PAGE, "prefill_chunk": 32}
        return Engine(transformer, EngineConfig(kv_dtype=kv_dtype, drafter=drafter, **DRAFTS | shape | options))

    return make


def some_work() -> list[Work]:
    """Prompts that begin alike, of which one is asked for three samples."""
    rng = random.Random(9)
    text = [rng.randrange(3, VOCAB) for _ in range(70)]
    prompts = [text[:40], text[:9], [*text[:41], 5], text[20:27] * 3, text[:63], [*text[:24], 7, 8]]
    kinds = [{}, {"temperature": 0.8, "n": 3}]
    return [
        Work(f"{i}", prompt, SamplingParams(max_tokens=18, ignore_eos=True, seed=i, logprobs=2, **kinds[i % 2]), 3 * i)
        for i, prompt in enumerate(prompts)
    ]


def clear(output: CompletionOutput) -> int:
    """Tokens before the first that rounding may change."""
    gaps = [abs(float(np.subtract(*list(entry.top.values())[:2]))) for entry in output.logprobs]
    return next((i for i, gap in enumerate(gaps) if gap < 2 * CLOSE), len(gaps))


PAIRS = [("int8", "ngram"), ("int4", "draft_model"), pytest.param("fp8", "layer_skip", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("kv_dtype", "drafter"), PAIRS)
def test_nothing_that_happens_on_the_way_changes_a_text(unoptimised, build, kv_dtype: str, drafter: str) -> None:
    plain: Results = serve(build(kv_dtype, "none", prefix_cache=False), some_work())
    clean, engine = (preempt_every_round(wrap(build(kv_dtype, drafter))) for wrap in (lambda engine: engine, poison))
    first, second = (serve(e, some_work(), 34) for e in (clean, engine))
    counters = engine.scheduler.counters
    assert min(counters.hit_tokens, counters.preemptions) > 10
    assert first.keys() == second.keys() == plain.keys()
    compared = 0
    for key, expected in plain.items():
        assert second[key].token_ids == first[key].token_ids
        assert second[key].logprobs == first[key].logprobs
        assert np.isfinite([entry.logprob for entry in first[key].logprobs]).all()
        same = clear(expected)
        assert first[key].token_ids[:same] == expected.token_ids[:same]
        both = ([entry.logprob for entry in output.logprobs[:same]] for output in (first[key], expected))
        np.testing.assert_allclose(*both, atol=CLOSE)
        compared += same
    assert compared > 0.5 * sum(len(output.token_ids) for output in plain.values())


def test_tails_come_out_of_the_same_memory(build) -> None:
    plain, tails = (build(name, "none", kv_memory=2**-15).program.pool for name in ("int8", "int4"))
    room = 2**15
    assert plain.num_pages == room // plain.page_bytes
    assert tails.num_pages == (room - 4 * tails.tail_bytes) // tails.page_bytes


def test_what_cannot_be_is_refused_before_a_model_is_loaded(tiny_model) -> None:
    from jaxspec import LLM

    for options, message in (
        ({"kv_dtype": "int3"}, "no kv_dtype named 'int3'"),
        ({"kv_dtype": "int4", "page_size": 16}, "int4 needs pages of a multiple of 64 slots"),
        ({"drafter": "oracle"}, "no drafter named 'oracle'"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM("no-such-model", **options)
