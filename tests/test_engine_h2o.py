"""H2O through the engine: what it writes is what a loop over single tokens says that keeps heavy hitters, whatever
drafts, company, chunks and prefixes that were found come in between."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import round as rounds
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError, RequestError
from jaxspec.host.request import CompletionOutput
from jaxspec.kv import scores
from jaxspec.kv.policy import VOTES
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.models.transformer import forward as transformer_forward
from tests.driver import SPEC, VOCAB, write_heads
from tests.oracles import dense, heavy
from tests.oracles.serving import Results, Work, poison, serve, told
from tests.oracles.small import DRAFTS, shrink, transformer_of

PAGE, HEAVY, RECENT, CONTEXT = 8, 9, 11, 400
LIMIT = HEAVY + RECENT + PAGE
CLOSE = {"float32": 1e-3, "int8": 0.05}
"""How far rounding, before it is stored, may move a log probability."""
DRAFTERS = ["none", "ngram", "layer_skip", "draft_model", "medusa", "ngram_medusa"]


@pytest.fixture(scope="module")
def transformer(tiny_model) -> LoadedModel:
    """A small transformer whose text varies with the context."""
    return transformer_of(load_model(str(tiny_model), progress=False).tokenizer, CONTEXT)


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> str:
    return str(write_heads(tmp_path_factory.mktemp("heads"), SPEC, conditioned=16))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, transformer: LoadedModel, heads: str):
    """Makes engines whose pages and rows are small."""
    shrink(monkeypatch, PAGE, transformer)
    monkeypatch.setattr("jaxspec.drafters._model.LAG", 10)

    def make(drafter: str = "none", **options) -> Engine:
        shape = {"medusa_heads": heads, "max_batch": 3, "page_size": PAGE, "prefill_chunk": 24}
        policy = {"kv_policy": "h2o", "kv_heavy": HEAVY, "kv_window": RECENT}
        return Engine(transformer, EngineConfig(drafter=drafter, **DRAFTS | shape | policy | options))

    return make


def some_work(count: int = 5) -> list[Work]:
    """Prompts shorter and longer than the budget, and than all that votes; one is asked for two samples, and two go on
    from another's prompt."""
    rng = random.Random(9)
    text = [rng.randrange(3, VOCAB) for _ in range(130)]
    prompts = [text[:110], text[:9], [*text[:105], 5, 6], text[20:27] * 3, text[:1]]
    kinds = [{}, {"temperature": 0.8, "n": 2}, {}, {"temperature": 0.7, "top_k": 20}, {}]
    return [
        Work(f"{i}", prompt, SamplingParams(max_tokens=70, ignore_eos=True, seed=i, logprobs=2, **kinds[i]), 3 * i)
        for i, prompt in enumerate(prompts[:count])
    ]


def says(
    transformer: LoadedModel, prompt: list[int], output: CompletionOutput, kv_dtype: str = "float32"
) -> np.ndarray:
    """Log probabilities of the emitted tokens by the oracle."""
    emitted, ids = [], list(output.token_ids)
    for done in output.rounds:
        emitted.append(ids[: done.emitted])
        ids = ids[done.emitted :]
    stored = {"int8": dense.in_int8, "float32": lambda x: x}[kv_dtype]
    rule = heavy.Rule(HEAVY, RECENT, LIMIT)
    found = heavy.logprobs(transformer.params, transformer.spec, prompt, emitted, rule, stored)
    return found[np.arange(len(found)), output.token_ids]


def compare(transformer: LoadedModel, work: list[Work], results: Results, kv_dtype: str = "float32") -> None:
    """Every text is the oracle's, given which of its tokens were roots."""
    for item in work:
        for index in range(item.params.n):
            output = results.pop((item.name, index))
            assert len(output.token_ids) == item.params.max_tokens
            expected = says(transformer, item.prompt, output, kv_dtype)
            np.testing.assert_allclose(told(output), expected, atol=CLOSE[kv_dtype])
            if not item.params.temperature:
                assert [next(iter(entry.top)) for entry in output.logprobs or []] == output.token_ids
    assert not results


FEW = [("none", "float32"), ("ngram", "int8")]
ALL = [(drafter, kv_dtype) for drafter in DRAFTERS for kv_dtype in ("float32", "int8")]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW)]


@pytest.mark.parametrize(("drafter", "kv_dtype"), CASES)
def test_the_text_is_that_of_single_tokens(unoptimised, build, transformer, drafter: str, kv_dtype: str):
    engine, work = poison(build(drafter, kv_dtype=kv_dtype)), some_work()
    results = serve(engine, work)
    assert engine.scheduler.counters.hit_tokens > 20
    if drafter != "none":
        assert sum(done.accepted for output in results.values() for done in output.rounds) > 20
    compare(transformer, work, results, kv_dtype)


def alike(one: CompletionOutput, other: CompletionOutput, kv_dtype: str) -> None:
    assert one.token_ids == other.token_ids
    assert [done.emitted for done in one.rounds] == [done.emitted for done in other.rounds]
    np.testing.assert_allclose(told(one), told(other), atol=CLOSE[kv_dtype])


def all_alike(some: Results, others: Results, kv_dtype: str = "float32") -> None:
    assert some.keys() == others.keys()
    for key, output in some.items():
        alike(output, others[key], kv_dtype)


def alone_and_together(build, drafter: str, **options) -> tuple[Results, Results]:
    """What comes of requests each by itself, and of all of them at once."""
    options |= {"draft_adaptive": True, "prefix_cache": False}
    work, engine, alone = some_work(), build(drafter, **options), {}
    for item in work:
        alone |= serve(engine, [item._replace(comes=0)])
    return alone, serve(poison(build(drafter, **options)), work)


@pytest.mark.parametrize(
    ("drafter", "kv_dtype"),
    [pytest.param(*case, marks=[] if case == ("ngram", "float32") else pytest.mark.slow) for case in ALL],
)
def test_law_3_company_changes_nothing(unoptimised, build, drafter: str, kv_dtype: str):
    """Neither what others draft, nor how many rounds a call has, nor how long a row must wait to be condensed."""
    all_alike(*alone_and_together(build, drafter, kv_dtype=kv_dtype), kv_dtype)


def batch_minded(drafter, progress, proposal, alone, worthwhile=rounds._worthwhile):
    return worthwhile(drafter, progress, proposal)


COMPANY = {
    "drafts are kept by what they bring the batch": ("jaxspec.round._worthwhile", batch_minded),
    "rows that wait forget meanwhile": ("jaxspec.round._where", lambda chosen, those, others: those),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", COMPANY)
def test_law_3_finds_company(unoptimised, build, monkeypatch, fault: str):
    monkeypatch.setattr(*COMPANY[fault])
    alone, together = alone_and_together(build, "ngram")
    with pytest.raises(AssertionError):
        all_alike(alone, together)


@pytest.mark.parametrize("chunk", [24, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 8, 200))])
def test_second_visits_and_chunks_of_any_size_change_nothing(unoptimised, build, transformer, chunk: int):
    engine, [item] = poison(build(prefill_chunk=chunk)), some_work(1)
    whole = (len(item.prompt) - 1 - VOTES) // PAGE * PAGE
    for cached in (0, whole):
        results = serve(engine, [item])
        assert results["0", 0].stats.cached_tokens == cached
        compare(transformer, [item], results)


def test_pages_go_back_while_a_text_goes_on_in_flat_memory(unoptimised, build, transformer):
    """So a second request finds room beside the first, which had needed most of the pool."""
    engine, params = poison(build(prefix_cache=False)), SamplingParams(max_tokens=250, ignore_eos=True, logprobs=2)
    work = [some_work(1)[0]._replace(name=name, params=params) for name in ("0", "1")]
    prompt, own = (len(work[0].prompt) - 1) // PAGE, -(-LIMIT // PAGE)
    held, send = [], engine._send_pages

    def send_and_count() -> None:
        held.append([len(running.table.pages) for running in engine.scheduler.rows.values()])
        send()

    engine._send_pages = send_and_count
    results = serve(engine, work, prompt + 2 * own + 1)
    assert held[0] == [prompt + own]
    assert held[-1] == [own, own]
    assert {pages for now in held for pages in now} == {prompt + own, own}
    assert engine.scheduler.counters.peak_running == 2
    compare(transformer, work, results)


def test_of_texts_that_do_not_outgrow_the_budget_every_token_sees_all(unoptimised, build, transformer):
    [item] = some_work(1)
    output = serve(build(kv_heavy=CONTEXT), [item])["0", 0]
    text, at = item.prompt + output.token_ids, np.arange(len(output.token_ids))
    found = dense.logprobs(transformer.params, transformer.spec, text)[len(item.prompt) - 1 : -1]
    np.testing.assert_allclose(told(output), found[at, output.token_ids], atol=CLOSE["float32"])


def silently(params, spec, pool_spec, *rest, run=transformer_forward, **options):
    return run(params, spec, pool_spec.silent, *rest, **options)


def unmoved(found, length, heavy, recent, heaviest=scores.heaviest):
    return heaviest(found, length, heavy, recent)[0], found


def in_common(found, length, heavy, recent, heaviest=scores.heaviest):
    return heaviest(jnp.broadcast_to(found.sum(1, keepdims=True), found.shape), length, heavy, recent)


def inherited(found, length, heavy, recent, heaviest=scores.heaviest):
    stay, left = heaviest(found, length, heavy, recent)
    return stay, jnp.where(jnp.arange(found.shape[-1]) < heavy + recent, left, found)


FAULTS = {
    "all chunks vote": ("jaxspec.kv.pool.PoolSpec.silent", property(lambda self: self)),
    "prompts do not vote": ("jaxspec.decode.forward", silently),
    "roots do not vote": ("jaxspec.round.forward", silently),
    "scores stay where they were": ("jaxspec.kv.scores.heaviest", unmoved),
    "new tokens inherit scores": ("jaxspec.kv.scores.heaviest", inherited),
    "heads decide together": ("jaxspec.kv.scores.heaviest", in_common),
    "rows keep the scores of those before": ("jaxspec.kv.scores.clear", lambda pool, row: pool),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_finds_faults(unoptimised, build, transformer, monkeypatch, fault: str):
    monkeypatch.setattr(*FAULTS[fault])
    # A program of its own, or compiled ones are used that have no fault.
    engine, work = build(max_context=CONTEXT - PAGE * (1 + list(FAULTS).index(fault))), some_work(1)
    results = [serve(engine, work) for _ in range(2)]
    with pytest.raises(AssertionError):
        compare(transformer, work, results[-1])


def test_what_cannot_be_is_refused(build):
    for options, message in (
        ({"kv_dtype": "int4", "page_size": 64}, "kv_policy h2o moves single tokens, and kv_dtype int4"),
        ({"kv_heavy": 0}, "kv_heavy must be 1 or more, not 0"),
        (
            {"drafter": "layer_skip", "kv_heavy": 2},
            r"kv_heavy \+ kv_window are 13 tokens: a draft model needs 14 or more",
        ),
        ({"max_context": 1000}, "max_context 1000 is more than the 400 tokens the model was trained for: lower it"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(**options)
    engine = build(kv_memory=16 * 2 * 2 * 2 * PAGE * 8 * 4 / 2**30)
    with pytest.raises(
        RequestError, match=r"needs 17 pages of 8 slots, the pool has .*: lower max_tokens or kv_window"
    ):
        engine.add("0", [5] * 110, SamplingParams(max_tokens=50))
