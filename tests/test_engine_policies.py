"""Eviction policies through the engine: what it writes is what the model says without any cache, each token seeing the
first ones and the last, however drafts, chunks, preemption and pages that have gone back come in between."""

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.bench.engine import finish
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError, RequestError
from jaxspec.host.request import CompletionOutput
from jaxspec.models.loading import LoadedModel, load_model
from tests.driver import SPEC, VOCAB, write_heads
from tests.oracles import dense
from tests.oracles.serving import Results, Work, poison, preempt_every_round, serve, told
from tests.oracles.small import DRAFTS, shrink, transformer_of

PAGE, GROUP, TRAINED, WINDOW, SINKS = 8, 4, 48, 13, 4
CLOSE = 0.05
"""How far rounding before it is stored may move a log probability."""
ENDLESS = {"max_context": 1000, "kv_window": WINDOW, "kv_sinks": SINKS}
POLICIES = {
    "window": {"kv_policy": "window"},
    "cache": {"kv_policy": "sinks"},
    "text": {"kv_policy": "sinks", "kv_positions": "text"},
}


@pytest.fixture(scope="module")
def transformer(tiny_model) -> LoadedModel:
    """A small transformer whose text varies with the context."""
    return transformer_of(load_model(str(tiny_model), progress=False).tokenizer, TRAINED)


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> str:
    return str(write_heads(tmp_path_factory.mktemp("heads"), SPEC, conditioned=16))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, transformer: LoadedModel, heads: str):
    """Makes engines whose pages, groups and rows are small."""
    shrink(monkeypatch, PAGE, transformer, GROUP)

    def make(policy: str, drafter: str = "none", **options) -> Engine:
        shape = {"medusa_heads": heads, "max_batch": 3, "page_size": PAGE, "prefill_chunk": 24}
        every = DRAFTS | shape | ENDLESS | POLICIES[policy] | options
        return Engine(transformer, EngineConfig(drafter=drafter, **every))

    return make


def some_work() -> list[Work]:
    """Prompts longer and shorter than the window; one is asked for two samples, and one goes on from another."""
    rng = random.Random(9)
    text = [rng.randrange(3, VOCAB) for _ in range(90)]
    prompts = [text[:75], text[:9], [*text[:70], 5, 6], text[20:27] * 3]
    kinds = [{}, {"temperature": 0.8, "n": 2}, {}, {"temperature": 0.7, "top_k": 20}]
    return [
        Work(f"{i}", prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=i, logprobs=2, **kinds[i]), 3 * i)
        for i, prompt in enumerate(prompts)
    ]


def says(
    transformer: LoadedModel, policy: str, prompt: list[int], output: CompletionOutput, kv_dtype: str = "float32"
) -> np.ndarray:
    """Log probabilities of the emitted tokens without a cache."""
    mask = WINDOW, 0 if policy == "window" else SINKS, policy == "cache"
    stored = {"int8": dense.in_int8, "float32": lambda x: x}[kv_dtype]
    text = prompt + output.token_ids
    found = dense.logprobs(transformer.params, transformer.spec, text, *mask, stored)[len(prompt) - 1 : -1]
    return found[np.arange(len(found)), output.token_ids]


FEW = [("cache", "none", "float32"), ("text", "ngram", "int8")]
REST = [
    (policy, drafter, kv_dtype)
    for policy in POLICIES
    for drafter in ("none", "ngram", "layer_skip", "draft_model", "medusa", "ngram_medusa")
    for kv_dtype in ("float32", "int8")
    if (policy, drafter, kv_dtype) not in FEW
]


@pytest.mark.parametrize(
    ("policy", "drafter", "kv_dtype"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_laws_1_3b_and_5_the_text_is_that_of_no_cache(
    unoptimised, build, transformer, policy: str, drafter: str, kv_dtype: str
):
    engine = preempt_every_round(poison(build(policy, drafter, kv_dtype=kv_dtype)))
    work = some_work()
    results = serve(engine, work, engine.scheduler.table_width + 6)
    assert min(engine.scheduler.counters.hit_tokens, engine.scheduler.counters.preemptions) > 20
    for item in work:
        for index in range(item.params.n):
            output = results.pop((item.name, index))
            expected = says(transformer, policy, item.prompt, output, kv_dtype)
            np.testing.assert_allclose(told(output), expected, atol=1e-3 if kv_dtype == "float32" else CLOSE)
            if not item.params.temperature:
                best = [next(iter(entry.top.items())) for entry in output.logprobs or []]
                assert [token for token, _ in best] == output.token_ids
    assert not results


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "drafter"), [("cache", "none"), ("window", "draft_model"), ("text", "medusa")])
def test_int4_and_its_tails(unoptimised, build, policy: str, drafter: str):
    """Drafts and all else change no more than rounding does before it is stored."""
    plain: Results = serve(build(policy, kv_dtype="int4", prefix_cache=False), some_work())
    engine = preempt_every_round(poison(build(policy, drafter, kv_dtype="int4")))
    results = serve(engine, some_work(), engine.scheduler.table_width + 6)
    compared = 0
    for key, expected in plain.items():
        gaps = [abs(float(np.subtract(*list(entry.top.values())[:2]))) for entry in expected.logprobs or []]
        same = next((i for i, gap in enumerate(gaps) if gap < 2 * CLOSE), len(gaps))
        assert results[key].token_ids[:same] == expected.token_ids[:same]
        np.testing.assert_allclose(told(results[key])[:same], told(expected)[:same], atol=CLOSE)
        compared += same
    assert compared > 10  # of few tokens this model is sure


def test_texts_are_written_far_beyond_what_was_trained_in_flat_memory(unoptimised, build, transformer):
    """With as many pages as a text has at once, and not one for the prefix cache, which keeps what it can."""
    engine = poison(build("cache", max_batch=1))
    width, most = engine.scheduler.table_width, 0
    count = engine._send_pages

    def send_and_count() -> None:
        nonlocal most
        most = max(most, *(len(running.table.pages) for running in engine.scheduler.rows.values()))
        count()

    engine._send_pages = send_and_count
    params = SamplingParams(max_tokens=10 * TRAINED, ignore_eos=True, logprobs=2)
    item = Work("long", list(range(3, 40)), params)
    output = serve(engine, [item], width)["long", 0]
    assert len(output.token_ids) == 10 * TRAINED > 5 * width * PAGE // 2
    assert width - 2 <= most <= width
    np.testing.assert_allclose(told(output), says(transformer, "cache", item.prompt, output), atol=1e-3)


@pytest.mark.slow
def test_a_million_tokens_in_flat_memory_with_right_angles(transformer):
    """What sees no further back than window after window is told by the first tokens and the last alone, in float64 and
    at small positions: only how far apart tokens are enters."""
    window, length = 200, 1_000_000
    spec = replace(transformer.spec, max_context=256)
    config = EngineConfig(
        kv_policy="sinks",
        kv_window=window,
        max_context=length + 200,
        max_batch=1,
        prefill_chunk=1024,
        prefix_cache=False,
    )
    engine = Engine(transformer._replace(spec=spec), config)
    assert engine.program.pool.num_pages == engine.scheduler.table_width < 25
    prompt = np.random.default_rng(4).integers(3, VOCAB, length).tolist()
    engine.add("0", prompt, SamplingParams(max_tokens=150, ignore_eos=True, logprobs=1))
    [output] = finish(engine)
    before = spec.num_layers * window
    short = prompt[: config.kv_sinks] + prompt[-before:] + output.token_ids
    found = dense.logprobs(transformer.params, spec, short, window, config.kv_sinks, True)[
        config.kv_sinks + before - 1 :
    ]
    np.testing.assert_allclose(told(output), found[np.arange(150), output.token_ids], atol=1e-3)


def test_a_conversation_goes_on_from_pages_that_were_given_back(unoptimised, build, transformer):
    engine = poison(build("cache"))
    params = SamplingParams(max_tokens=70, ignore_eos=True, logprobs=2)
    first = Work("first", list(range(3, 40)), params)
    answer = serve(engine, [first])["first", 0]
    second = Work("second", [*first.prompt, *answer.token_ids, 5, 6, 7], params)
    output = serve(engine, [second])["second", 0]
    written = len(first.prompt) + len(answer.token_ids) - 1
    assert output.stats.cached_tokens == written - written % PAGE
    np.testing.assert_allclose(told(output), says(transformer, "cache", second.prompt, output), atol=1e-3)


def test_what_cannot_be_is_refused(build):
    for options, message in (
        ({"kv_policy": "h3o"}, "no kv_policy named 'h3o'"),
        ({"kv_policy": "full"}, "max_context 1000 is more than the 48 tokens .*: lower it, or take kv_policy sinks"),
        ({"kv_window": 45}, "and of so long a text a token sees 49: lower kv_window"),
        ({"kv_window": 3, "drafter": "ngram"}, "kv_window 3 is less than a draft: it must be 4 or more"),
        ({"kv_window": 0}, "kv_window must be 1 or more"),
        ({"kv_sinks": 0}, "kv_sinks must be 1 or more"),
        ({"kv_positions": "slot"}, "kv_positions must be cache or text"),
    ):
        with pytest.raises(ConfigError, match=message):
            build("cache", **options)
    engine = build("cache", kv_memory=4 * 2 * 2 * 2 * PAGE * 8 * 4 / 2**30)
    needs = f"needs {engine.scheduler.table_width} pages of {PAGE} slots, .*: lower max_tokens or kv_window"
    with pytest.raises(RequestError, match=needs):
        engine.add("0", [5] * 90, SamplingParams(max_tokens=900))
    engine.add("0", [5] * 4, SamplingParams(max_tokens=5))
