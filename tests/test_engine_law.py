"""Laws 3 and 5 through the engine: whatever happens to a request on its way, its text is that of no cache at all.

Law 3c runs on a model of exact integers, `tests.oracles.toy_forward`, law 3b and law 1 on a tiny transformer. Freed
pages are poisoned.
"""

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxspec import decode, drafters
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.drafters import _model
from jaxspec.engine import PLACES_A_LEVEL, Engine
from jaxspec.host.blocks import Pages
from jaxspec.host.scheduler import Scheduler
from jaxspec.models.loading import LoadedModel, load_model
from tests.driver import SPEC, VOCAB, random_params, write_heads
from tests.oracles import toy_forward
from tests.oracles.heavy import Rule
from tests.oracles.serving import (
    Results,
    Work,
    compare,
    poison,
    preempt_every_round,
    serve,
    some_work,
    until_a_near_tie,
)
from tests.oracles.small import on_integers, toy_of

DRAFTERS = ["none", "ngram", "layer_skip", "draft_model", "medusa", "ngram_medusa"]
DRAFTED = 3


@pytest.fixture(scope="module")
def tiny(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), progress=False)


@pytest.fixture(scope="module")
def toy(tiny) -> LoadedModel:
    return toy_of(tiny.tokenizer)


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[int, str]:
    """Folders of heads for the toy and the small transformer, by the size of their hidden states."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        2: str(write_heads(folder / "toy", toy_forward.SPEC, own_output=True)),
        SPEC.embed_dim: str(write_heads(folder / "small", SPEC, conditioned=16)),
    }


@pytest.fixture
def integers(monkeypatch: pytest.MonkeyPatch, toy: LoadedModel, unoptimised) -> None:
    on_integers(monkeypatch, toy)


@pytest.fixture(scope="module")
def made() -> dict:
    """Drafters by name: engines of the same one share their compiled programs."""
    return {}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, made: dict, heads: dict[int, str]) -> Callable[..., Engine]:
    """Makes an engine that prefills in chunks of any size, with rows of `row` tokens."""

    def get_drafter(config: EngineConfig, loaded: LoadedModel):
        key = config.drafter, loaded.name, config.draft_adaptive, _model.LAG
        if key not in made:
            drafter, params = drafters.get_drafter(config, loaded)
            if drafter.model is not None:  # it always drafts: compiling rows for no draft would be lost time
                drafter = drafter._replace(widths=drafter.widths[-1:])
            made[key] = drafter, params
        return made[key]

    def make(loaded: LoadedModel, *, chunk: int, row: int | None = None, buckets: Sequence[int] = (), **options):
        monkeypatch.setattr("jaxspec.config.PREFILL_ROW", 1)
        monkeypatch.setattr("jaxspec.engine.PREFILL_ROW", row or min(chunk, 64))
        monkeypatch.setattr("jaxspec.engine.BATCH_BUCKETS", buckets)
        monkeypatch.setattr("jaxspec.engine.get_drafter", get_drafter)
        names = {"draft_model": loaded.name, "medusa_heads": heads.get(loaded.spec.embed_dim)}
        options = {"draft_adaptive": False, "ngram_min": 1, "max_batch": 4} | names | options
        config = EngineConfig(verify="coupled", draft_tokens=DRAFTED, prefill_chunk=chunk, **options)
        return Engine(loaded, config)

    return make


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list:
    """Grows by one at each call of that function."""
    calls: list = []
    module, attribute = name.rsplit(".", 1)
    function = getattr(importlib.import_module(module), attribute)
    monkeypatch.setattr(name, lambda *args, **options: calls.append(0) or function(*args, **options))
    return calls


def chunks(page: int) -> list[int]:
    return [1, max(page - 1, 1), page, 3 * page + 5]


CASES = [
    pytest.param(1, "none", "full", marks=pytest.mark.slow),
    (16, "none", "full"),
    (3, "ngram", "full"),
    pytest.param(64, "layer_skip", "full", marks=pytest.mark.slow),
    pytest.param(3, "draft_model", "full", marks=pytest.mark.slow),
    (3, "medusa", "full"),
    (1, "none", "sinks"),
    pytest.param(4, "draft_model", "window", marks=pytest.mark.slow),
    pytest.param(3, "ngram_medusa", "sinks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("page", "drafter", "policy"), CASES)
def test_law_3c_nothing_that_happens_on_the_way_changes_a_text(
    integers, toy, build, monkeypatch, page: int, drafter: str, policy: str
):
    copies = counted(monkeypatch, "jaxspec.decode.copy_page")
    rng = random.Random(f"{page} {drafter}")
    one, less, same, more = chunks(page)
    passes = [
        (one, True, False, None),
        (less, False, True, None),
        (same, True, False, preempt_every_round),
        (more, True, True, None),
        (more, False, False, partial(preempt_every_round, everyone=True)),
    ]
    hits = preemptions = 0
    for chunk, caching, scarce, hook in passes:
        options = {"kv_policy": policy, "kv_window": 17, "kv_sinks": 3}
        engine = poison(build(toy, chunk=chunk, page_size=page, drafter=drafter, prefix_cache=caching, **options))
        engine, seen = hook(engine) if hook else engine, engine.program.pool.policy
        work = some_work(toy, rng, page, aborts=0.1, rush=scarce, policy=seen)
        least = engine.scheduler.table_width
        compare(toy, work, serve(engine, work, least + least // 8 if scarce else None), seen)
        counters = engine.scheduler.counters
        hits, preemptions = hits + counters.hit_tokens, preemptions + (0 if hook else counters.preemptions)
        assert counters.preemptions > 0 or not hook
    assert hits > 100
    assert copies or page == 1
    assert preemptions or page == 64


def test_law_3c_a_draft_model_keeps_in_step(integers, toy, build):
    """The target as its own draft, with the same noise, is always right: its cache holds what the target's does."""
    rng = random.Random(5)
    for hook in (None, preempt_every_round):
        engine = poison(build(toy, chunk=14, page_size=3, drafter="draft_model"))
        work = some_work(toy, rng, 3, count=14)
        drafted = 0
        for output in serve(hook(engine) if hook else engine, work, 60).values():
            for done in output.rounds[:-1]:
                assert done.drafted == done.accepted == DRAFTED
            drafted += output.stats.drafted
        assert drafted > 100
        assert engine.scheduler.counters.hit_tokens > 50
        assert engine.scheduler.counters.preemptions > 0 or hook is None


def test_law_3c_a_draft_model_that_drafts_seldom_keeps_in_step_though_pages_go_back(integers, toy, build, monkeypatch):
    """What rounds without drafts have left out is written before what it saw is gone."""
    monkeypatch.setattr("jaxspec.drafters._model.LAG", 10)
    monkeypatch.setattr("jaxspec.drafters._pace.learn", lambda pace, *_: pace._replace(hits=pace.hits + 1))
    seldom = lambda pace, *_: jnp.where(pace.hits % 18 == 17, DRAFTED, 0)  # noqa: E731
    monkeypatch.setattr("jaxspec.drafters._pace.best_length", seldom)
    options = {"kv_policy": "sinks", "kv_window": 17, "kv_sinks": 3, "draft_adaptive": True, "max_batch": 2}
    engine = poison(build(toy, chunk=14, page_size=3, drafter="draft_model", **options))
    work = some_work(toy, random.Random(5), 3, count=9, rush=True, policy=engine.program.pool.policy)
    results = serve(engine, work, engine.scheduler.table_width * 2)
    rounds = [done for output in results.values() for done in output.rounds[:-1]]
    assert all(done.drafted == done.accepted for done in rounds)
    assert sum(done.drafted for done in rounds) > 20
    compare(toy, work, results, engine.program.pool.policy)


SLOW = [(1, "none"), (4, "draft_model"), (16, "layer_skip"), (5, "medusa"), (3, "ngram_medusa")]


@pytest.mark.parametrize(
    ("page", "drafter"), [(3, "ngram"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_law_3c_what_is_looked_at_stays(integers, toy, build, monkeypatch, page: int, drafter: str):
    """Given how many tokens each round emitted, as its first has a vote and no other."""
    monkeypatch.setattr("jaxspec.sizes.VOTES", 9)
    monkeypatch.setattr("jaxspec.drafters._model.LAG", 9)
    rng, rule = random.Random(f"{page} {drafter}"), Rule(heavy=6, recent=7, limit=13 + page, votes=9)
    one, less, same, more = chunks(page)
    hits = condensed = 0
    for chunk, caching, scarce in ((one, True, False), (less, False, True), (same, True, True), (more, True, False)):
        options = {"kv_policy": "h2o", "kv_heavy": rule.heavy, "kv_window": rule.recent}
        engine = poison(build(toy, chunk=chunk, page_size=page, drafter=drafter, prefix_cache=caching, **options))
        calls = counted(monkeypatch, "jaxspec.decode.condense_row")
        work = some_work(toy, rng, page, aborts=0.1, rush=scarce)
        results = serve(engine, work, engine.scheduler.table_width + 4 if scarce else None)
        compare(toy, work, results, engine.program.pool.policy, rule)
        hits, condensed = hits + engine.scheduler.counters.hit_tokens, condensed + len(calls)
    assert hits > 40
    assert condensed > 30


def test_law_3c_company_changes_no_draft_where_drafts_have_a_say(integers, toy, build, monkeypatch):
    """Rows draft now and then, in rounds of their own: what is written of one to the draft's cache, and before or after
    it was condensed, is the same whatever the others do."""
    monkeypatch.setattr("jaxspec.drafters._model.LAG", 10)
    monkeypatch.setattr("jaxspec.drafters._pace.learn", lambda pace, *_: pace._replace(hits=pace.hits + 1))
    seldom = lambda pace, *_: jnp.where(pace.hits % 7 == 6, DRAFTED, 0)  # noqa: E731
    monkeypatch.setattr("jaxspec.drafters._pace.best_length", seldom)
    options = {"kv_policy": "h2o", "kv_heavy": 6, "kv_window": 9, "draft_adaptive": True, "prefix_cache": False}
    engine = poison(build(toy, chunk=14, page_size=3, drafter="draft_model", **options))
    work = some_work(toy, random.Random(5), 3, count=8, rush=True)
    together, alone = serve(engine, work), {}
    for item in work:
        alone |= serve(engine, [item])
    assert sum(done.accepted for output in alone.values() for done in output.rounds) > 20
    for key, output in alone.items():
        assert (output.token_ids, output.rounds) == (together[key].token_ids, together[key].rounds)


def test_law_3c_batches_of_any_size(integers, toy, build):
    """Requests move from row to row as the batch grows and shrinks."""
    rng = random.Random(6)
    engine = poison(build(toy, chunk=15, row=4, page_size=3, drafter="ngram", buckets=(1,)))
    sizes = set()
    resize = engine._resize
    engine._resize = lambda: resize() or sizes.add(engine._batch)
    work = [*some_work(toy, rng, 3, count=15), Work("alone", [5, 6, 7], SamplingParams(max_tokens=9, logprobs=0), 200)]
    compare(toy, work, serve(engine, work))
    assert sizes == {1, 4}


def test_law_3c_pinned_prompts_stay_while_everyone_gives_way_and_samples_compete(integers, toy, build):
    def other(item: Work, **params) -> Work:
        return item._replace(params=msgspec.structs.replace(item.params, **params))

    work = sorted(some_work(toy, random.Random(7), 16, count=16), key=lambda item: len(item.prompt))
    kept = [other(item, n=1, cache_ttl=3600.0)._replace(comes=0) for item in work[-2:]]
    work = [other(item, best_of=item.params.n + 2) if item.params.temperature else item for item in work[:-2]]
    engine = preempt_every_round(poison(build(toy, chunk=53, page_size=16)))
    compare(toy, kept + work, serve(engine, kept + work, 14))
    again = [item._replace(name=f"{item.name} again", comes=0) for item in kept]
    results = serve(engine, again)
    found = [results[item.name, 0].stats.cached_tokens for item in again]
    assert found == [(len(item.prompt) - 1) // 16 * 16 for item in again]
    compare(toy, again, results)


@pytest.fixture(scope="module")
def transformer(tiny) -> LoadedModel:
    """A small transformer whose text varies with the context."""
    return LoadedModel(replace(SPEC, max_context=toy_forward.CONTEXT), random_params().target, tiny.tokenizer, "small")


@pytest.fixture(scope="module")
def plain() -> Results:
    """What plain decoding makes of `transformer_work`; the first test to come this way fills it."""
    return {}


def transformer_work() -> list[Work]:
    rng = random.Random(9)
    text = [rng.randrange(3, VOCAB) for _ in range(70)]
    prompts = [text[:40], text[:9], [*text[:41], 5], text[20:27] * 3, text[:63], text[:1], [*text[:24], 7, 8], text]
    kinds = [
        {},
        {"temperature": 0.8, "n": 3},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.2},
    ]
    return [
        Work(f"{i}", prompt, SamplingParams(max_tokens=22, ignore_eos=True, seed=i, logprobs=2, **kinds[i % 3]), 3 * i)
        for i, prompt in enumerate(prompts * 2)
    ]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_laws_1_3b_and_5_on_a_transformer(unoptimised, transformer, build, monkeypatch, plain: Results, drafter: str):
    """Poison changes no bit, and preemption, hits, forks and drafts change rounding only."""
    monkeypatch.setattr("jaxspec.drafters.draft_model.load_model", lambda *_, **__: transformer)
    make = partial(build, transformer, chunk=32, row=16, page_size=8)
    if not plain:
        plain |= serve(make(prefix_cache=False, max_batch=4), transformer_work())
    clean, engine = (preempt_every_round(wrap(make(drafter=drafter))) for wrap in (lambda engine: engine, poison))
    first, second = (serve(e, transformer_work(), 34) for e in (clean, engine))
    counters = engine.scheduler.counters
    assert min(counters.hit_tokens, counters.preemptions) > 20
    assert first.keys() == second.keys() == plain.keys()
    for key, expected in plain.items():
        assert second[key].token_ids == first[key].token_ids
        assert second[key].logprobs == first[key].logprobs
        assert np.isfinite([entry.logprob for entry in first[key].logprobs]).all()
        same = until_a_near_tie(expected)
        assert first[key].token_ids[:same] == expected.token_ids[:same]
        both = ([entry.logprob for entry in output.logprobs[:same]] for output in (first[key], expected))
        np.testing.assert_allclose(*both, atol=1e-3)
    compared = sum(until_a_near_tie(output) for output in plain.values())
    assert compared > 0.95 * sum(len(output.token_ids) for output in plain.values())


def test_requests_wait_in_the_order_of_their_priority(toy, build):
    engine = build(toy, chunk=16, page_size=16)
    for number in range(200):
        priority = {0: 1, 1: 2, 150: -1}.get(number, 0)
        engine.add(f"{number}", [5], SamplingParams(priority=priority))
    order = [int(running.sample.request_id) for running in engine.scheduler.waiting]
    assert [n for n in order if n not in (0, 1, 150)] == sorted(set(range(200)) - {0, 1, 150})
    for number, levels in ((0, 1), (1, 2)):
        overtaken_by = [n for n in order[: order.index(number)] if n > number]
        assert PLACES_A_LEVEL * levels - 4 <= len(overtaken_by) <= PLACES_A_LEVEL * levels
    assert 60 <= len([n for n in order[order.index(150) :] if n < 150]) <= PLACES_A_LEVEL


def unwritten(self: Scheduler, running) -> None:
    """Publishes the root's slot too, whose key and value are not written."""
    whole = len(running.tokens) // self.tables.page_size
    if whole > running.published and len(running.table.pages) >= whole:
        self.cache.insert(
            running.tokens[: whole * self.tables.page_size], running.table.pages, running.sample.namespace
        )
        running.published = whole


def greedy_trim(self: Pages, table) -> list[int]:
    """Gives back the last committed page where it is not full."""
    needed = table.tokens // self.page_size
    surplus = table.pages[needed:]
    del table.pages[needed:]
    return self.allocator.release(surplus[::-1])


def forgetful(state, row, length, saved, restore=decode.restore_row):
    """Restores a row that starts to count its tokens anew."""
    return restore(state, row, length, saved._replace(progress=saved.progress._replace(ordinal=np.int32(0))))


FAULTS = {
    "a slot that is not written yet is published": ("jaxspec.host.scheduler.Scheduler.publish", unwritten),
    "a fork without the copy of its page": ("jaxspec.decode.copy_page", lambda state, *_, **__: state),
    "a committed page is given back as look-ahead": ("jaxspec.host.blocks.Pages.trim", greedy_trim),
    "a row restored without its ordinal": ("jaxspec.decode.restore_row", forgetful),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_law_3c_finds_faults(integers, toy, build, monkeypatch, fault: str | None):
    work = some_work(toy, random.Random(8), 16, count=14)
    engine = preempt_every_round(poison(build(toy, chunk=53, page_size=16)))
    if fault is None:
        compare(toy, work, serve(engine, work, 20))
        return
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        compare(toy, work, serve(engine, work, 20))
