"""Law 3b on SmolLM2 through the engine: pages, chunks, company and giving way change a text at near-ties only."""

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.llm import load
from jaxspec.models.loading import LoadedModel
from tests.oracles.serving import Results, Work, preempt_every_round, serve, until_a_near_tie

TEXT = """
A lighthouse keeper writes down what the sea does every hour of the night. At nine the water was flat and grey, and
two boats went out to the west with their lamps lit. At ten a wind came up from the south; the first waves broke on the
outer rocks, and the birds that sleep there left for the cliffs. By midnight nobody could have said where the sky ended.
The keeper trimmed the lamp, made tea, and counted the seconds between one flash of lightning and its thunder: nine,
then seven, then four. At one the glass shook in its frame. At two there was a cry, or what sounded like one, from below
the stairs that lead down to the landing, and the keeper took the long rope and the small lantern and opened the door.
"""
WINDOWS = [(0, 60), (12, 90), (0, 120), (40, 135), (70, 136)]
"""Words of the text that are a prompt; the first and the third begin alike."""
TOKENS = 24


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load(EngineConfig())


def work(loaded: LoadedModel) -> list[Work]:
    words = TEXT.split()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    prompts = [loaded.tokenizer.encode(" ".join(words[first:last])) for first, last in WINDOWS]
    return [Work(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]


def one_by_one(engine: Engine, requests: list[Work]) -> Results:
    return {key: output for request in requests for key, output in serve(engine, [request]).items()}


def compare(first: Results, second: Results) -> None:
    """The same tokens up to the first whose two likeliest are nearly as likely, which are few, with the same logits."""
    assert first.keys() == second.keys()
    compared = 0
    for key, output in first.items():
        same = until_a_near_tie(output)
        compared += same
        assert output.token_ids[:same] == second[key].token_ids[:same]
        both = ([entry.logprob for entry in results[key].logprobs[:same]] for results in (first, second))
        np.testing.assert_allclose(*both, atol=1e-3)
    assert compared >= 0.995 * TOKENS * len(first)


@pytest.fixture(scope="module")
def alone(smollm2) -> Results:
    """One request after the other, in large pages and chunks."""
    engine = Engine(smollm2, EngineConfig(page_size=64, prefill_chunk=256, max_batch=1, max_context=256))
    return one_by_one(engine, work(smollm2))


@pytest.mark.model
@pytest.mark.slow
def test_law_3b_small_pages_and_chunks_in_company_and_short_of_memory(smollm2, alone):
    config = EngineConfig(page_size=16, prefill_chunk=64, max_batch=8, max_context=256, kv_memory=0.0222)
    engine = Engine(smollm2, config)
    compare(alone, serve(engine, work(smollm2)))
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.counters.hit_tokens > 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("chunk", [64, 256])
def test_law_3b_each_page_and_chunk_alone_and_in_company(smollm2, alone, page: int, chunk: int):
    engine = Engine(smollm2, EngineConfig(page_size=page, prefill_chunk=chunk, max_batch=8, max_context=256))
    for run in (one_by_one, serve):
        compare(alone, run(engine, work(smollm2)))


ROUNDED = {"float32": 1e-3, "int8": 0.1, "fp8": 0.5, "int4": 0.5}
"""How far a log probability may move where what is stored depends on how a row was rounded before it was."""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "drafter"),
    [
        *[("int8", "ngram"), ("int8", "layer_skip"), ("fp8", "ngram"), ("int4", "ngram"), ("int4", "layer_skip")],
        *[("float32", "medusa"), ("int8", "medusa"), ("int4", "medusa"), ("float32", "ngram_medusa")],
        ("fp8", "ngram_medusa"),
    ],
)
def test_laws_1_and_3b_with_drafts_and_each_cache(smollm2, kv_dtype: str, drafter: str):
    """Plain decoding, alone, against drafts, company, hits and giving way: the same format gives the same texts."""
    common = {"kv_dtype": kv_dtype, "page_size": 64, "max_context": 320}
    plain = one_by_one(Engine(smollm2, EngineConfig(max_batch=1, prefix_cache=False, **common)), work(smollm2))
    one = Engine(smollm2, EngineConfig(drafter=drafter, verify="coupled", draft_adaptive=False, max_batch=8, **common))
    arriving = [item._replace(comes=4 * place) for place, item in enumerate(work(smollm2))]
    together = serve(preempt_every_round(one), arriving)
    counters = one.scheduler.counters
    assert counters.preemptions > 0
    assert counters.hit_tokens > 0
    equal = total = 0
    for key, output in plain.items():
        gaps = [abs(float(np.subtract(*list(entry.top.values())[:2]))) for entry in output.logprobs]
        clear = next((i for i, gap in enumerate(gaps) if gap < 2 * ROUNDED[kv_dtype]), len(gaps))
        assert output.token_ids[:clear] == together[key].token_ids[:clear]
        same = [a == b for a, b in zip(output.token_ids, together[key].token_ids, strict=True)]
        equal, total = equal + sum(same), total + len(same)
        both = ([entry.logprob for entry in results[key].logprobs[:clear]] for results in (plain, together))
        np.testing.assert_allclose(*both, atol=ROUNDED[kv_dtype])
    assert equal > 0.6 * total
