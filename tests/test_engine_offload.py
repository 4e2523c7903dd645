"""Laws 3 and 5 through the engine with tiers: what was away comes back to the bit, and no text shows that it was."""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, decode, drafters
from jaxspec.config import EngineConfig
from jaxspec.engine import Engine
from jaxspec.errors import CapacityError, ConfigError
from jaxspec.host.offload import AT_ONCE
from jaxspec.host.request import CompletionOutput
from jaxspec.host.scheduler import Scheduler
from jaxspec.models.loading import LoadedModel, load_model
from tests.driver import VOCAB
from tests.oracles import toy_forward
from tests.oracles.serving import Work, compare, poison, preempt_every_round, serve, some_work
from tests.oracles.small import DRAFTS, on_integers, shrink, toy_of, transformer_of

PAGE = 8
MUCH = 0.01


@pytest.fixture(scope="module")
def tiny(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), progress=False)


@pytest.fixture(scope="module")
def toy(tiny) -> LoadedModel:
    return toy_of(tiny.tokenizer)


@pytest.fixture(scope="module")
def transformer(tiny) -> LoadedModel:
    return transformer_of(tiny.tokenizer, 120)


@pytest.fixture
def integers(monkeypatch: pytest.MonkeyPatch, toy: LoadedModel, unoptimised) -> None:
    on_integers(monkeypatch, toy)


@pytest.fixture(scope="module")
def made() -> dict:
    """Drafters by name: engines of the same one share their compiled programs."""
    return {}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, made: dict, transformer: LoadedModel) -> Callable[..., Engine]:
    """Makes engines whose pages, groups and rows are small."""

    def get_drafter(config: EngineConfig, loaded: LoadedModel):
        key = config.drafter, loaded.name
        if key not in made:
            made[key] = drafters.get_drafter(config, loaded)
        return made[key]

    shrink(monkeypatch, PAGE, group=4)
    monkeypatch.setattr("jaxspec.engine.get_drafter", get_drafter)

    def make(loaded: LoadedModel = transformer, **options) -> Engine:
        if loaded is transformer:
            monkeypatch.setattr("jaxspec.drafters.draft_model.load_model", lambda *_, **__: transformer)
        shape = {"draft_model": loaded.name, "max_batch": 4, "page_size": PAGE, "prefill_chunk": 4 * PAGE}
        return Engine(loaded, EngineConfig(**DRAFTS | shape | options))

    return make


def one(engine: Engine, prompt: list[int], **params) -> CompletionOutput:
    """The answer to one request that is alone in an engine."""
    options = {"max_tokens": 24, "ignore_eos": True, "seed": 3, "logprobs": 2} | params
    return serve(engine, [Work("one", prompt, SamplingParams(**options))])["one", 0]


def some_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def leave(engine: Engine) -> None:
    """Everything that is cached has to go, and other things come in its place."""
    engine.scheduler.cache.evict(10**6)
    for start in range(3):
        one(engine, [start + 3] * 90, logprobs=None)
    engine.scheduler.cache.clear()


def pages_of(engine: Engine, numbers: list[int]) -> list[bytes]:
    """What the device has in these pages, of all layers and both pools."""
    found = []
    for number in numbers:
        for pool in (engine.device.state.pool, engine.device.state.draft_pool):
            of_layers = (np.asarray(array) for name, array in pool.items() if name != "tail")
            pages = (a.reshape(-1, engine.program.pool.num_pages, *a.shape[1:])[:, number] for a in of_layers)
            found += [page.tobytes() for page in pages]
    return found


CASES = [
    ("int4", "layer_skip"),
    pytest.param("float32", "none", marks=pytest.mark.slow),
    pytest.param("int8", "ngram", marks=pytest.mark.slow),
    pytest.param("fp8", "draft_model", marks=pytest.mark.slow),
    pytest.param("int4", "draft_model", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kv_dtype", "drafter"), CASES)
def test_law_3a_to_the_bit_after_a_round_trip(unoptimised, build, kv_dtype: str, drafter: str):
    prompt = some_tokens(1, 9 * PAGE + 5)
    engine = poison(build(kv_dtype=kv_dtype, drafter=drafter, offload_memory=MUCH))
    never = one(engine, prompt, temperature=0.9)
    numbers = engine.scheduler.cache.match(prompt, ("",))
    engine.scheduler.pages.release(numbers)
    before = pages_of(engine, numbers)
    hit = one(engine, prompt, temperature=0.9)
    leave(engine)
    restored = one(engine, prompt, temperature=0.9)
    assert len(numbers) == 9 > AT_ONCE
    again = engine.scheduler.cache.match(prompt, ("",))
    engine.scheduler.pages.release(again)
    assert pages_of(engine, again) == before
    assert restored.stats.cached_tokens == hit.stats.cached_tokens == 9 * PAGE
    assert (restored.token_ids, restored.logprobs) == (hit.token_ids, hit.logprobs)
    # It gives way after every round, and nothing shows it: not even what was drafted.
    counters = engine.scheduler.counters
    computed = counters.computed_tokens
    often = one(preempt_every_round(engine), prompt, temperature=0.9, cache_salt="other")
    assert counters.preemptions > 0
    assert counters.computed_tokens - computed == len(prompt) - 1, "nothing is computed again"
    assert (often.token_ids, often.logprobs, often.rounds) == (never.token_ids, never.logprobs, never.rounds)
    assert engine.figures()["offload"]["lost_pages"] == 0


LITTLE = {"offload_memory": 6 * 2 * 2 * 2 * 16 * 4 / 2**30}
"""Few of the toy's pages."""


TIERS = [
    (3, "none", {"offload_disk": MUCH} | LITTLE),
    pytest.param(3, "none", LITTLE, marks=pytest.mark.slow),
    pytest.param(3, "draft_model", {"offload_disk": MUCH}, marks=pytest.mark.slow),
    pytest.param(16, "ngram", {"offload_memory": MUCH}, marks=pytest.mark.slow),
    pytest.param(1, "none", {"offload_disk": MUCH, "offload_memory": 1e-7}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("page", "drafter", "options"), TIERS)
def test_law_3c_no_text_shows_what_was_away(integers, toy, build, tmp_path, page: int, drafter: str, options: dict):
    rng = random.Random(f"{page} {drafter}")
    on_disk = "offload_disk" in options
    folder = {"offload_folder": str(tmp_path)} if on_disk else {}
    restored = found = 0
    for hook in (None, preempt_every_round):
        engine = poison(build(toy, page_size=page, drafter=drafter, prefill_chunk=3 * page + 5, **options, **folder))
        found += len(engine.scheduler.offload._named)
        work = some_work(toy, rng, page, count=10, aborts=0.1, rush=True)
        work += [item._replace(name=f"{item.name} again", comes=40 + 3 * i, goes=None) for i, item in enumerate(work)]
        least = -(-(toy_forward.CONTEXT + DRAFTS["draft_tokens"]) // page)
        compare(toy, work, serve(hook(engine) if hook else engine, work, least + least // 8))
        restored += engine.scheduler.counters.restored_tokens
        engine.scheduler.offload.flush()
        assert engine.scheduler.offload.lost == 0
    assert restored > 50
    assert (found > 0) == on_disk, "the second engine finds what the first one left"


def unread(state, pages, *, program, read=decode.read_pages):
    return read(state, pages[::-1], program=program)


def partly(state, pages, stored, *, program, write=decode.write_pages):
    pool = jax.tree.map(lambda a: jnp.asarray(a).at[:, -1].set(0), stored.pool)
    return write(state, pages, stored._replace(pool=pool), program=program)


def behind(self: Scheduler, running, restore=Scheduler._restore) -> None:
    """Says that a page more has come back."""
    restore(self, running)
    if self.counters.restored_tokens and not running.prefilled:
        more = min(running.table.tokens + self.tables.page_size, len(running.tokens) - 1)
        self.tables.commit(running.table, more)


FAULTS = {
    "pages are read in another order": ("jaxspec.decode.read_pages", unread),
    "the last layer does not come back": ("jaxspec.decode.write_pages", partly),
    "a page that was not restored counts as such": ("jaxspec.host.scheduler.Scheduler._restore", behind),
    "nothing is written": ("jaxspec.decode.write_pages", lambda state, *_, **__: state),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_law_3c_finds_faults(integers, toy, build, monkeypatch, fault: str | None):
    work = some_work(toy, random.Random(8), 3, count=8, rush=True)
    work += [item._replace(name=f"{item.name} again", comes=40) for item in work]
    engine = preempt_every_round(poison(build(toy, page_size=3, prefill_chunk=14, offload_memory=MUCH)))
    if fault is None:
        compare(toy, work, serve(engine, work, 48))
        assert engine.scheduler.counters.restored_tokens > 50
        return
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        compare(toy, work, serve(engine, work, 48))


def test_conversations_of_five_times_the_budget_get_on(unoptimised, build):
    """Each has two turns; at the second all of the first is restored, and none of it is computed again."""
    rng = random.Random(4)
    chats, left, turns = 24, 40, 5
    first = [[rng.randrange(3, VOCAB) for _ in range(60)] for _ in range(chats)]
    engine = poison(build(offload_memory=MUCH))
    plain = build(prefix_cache=False)
    params = SamplingParams(max_tokens=turns, ignore_eos=True)
    whole = (60 + turns - 1) // PAGE
    assert chats * (whole + 1) >= 5 * left

    def turn(served: Engine, prompts: list[list[int]], pages: int | None) -> list[list[int]]:
        results = serve(served, [Work(str(i), ids, params) for i, ids in enumerate(prompts)], pages)
        return [results[str(i), 0].token_ids for i in range(len(prompts))]

    answers = turn(engine, first, left)
    assert answers == turn(plain, first, None)
    second = [[*ids, *said, 5, 6, 7] for ids, said in zip(first, answers, strict=True)]
    engine.scheduler.offload.flush()
    before = engine.scheduler.counters.hit_tokens
    assert turn(engine, second, left) == turn(plain, second, None)
    assert engine.scheduler.counters.hit_tokens - before == chats * whole * PAGE
    assert engine.scheduler.counters.restored_tokens > (chats - 6) * whole * PAGE


@pytest.mark.parametrize("positions", ["cache", pytest.param("text", marks=pytest.mark.slow)])
def test_a_second_turn_under_sinks_is_restored(unoptimised, build, tmp_path, positions: str):
    """By another engine, whose tables have no room for the whole text at once."""
    sinks = {"kv_policy": "sinks", "kv_window": 13, "kv_sinks": 4, "kv_positions": positions, "max_context": 1000}
    tiers = {"offload_memory": MUCH, "offload_disk": MUCH, "offload_folder": str(tmp_path)}
    options = {"max_batch": 1, "prefill_chunk": PAGE}
    params = {"temperature": 0.9, "max_tokens": 60}
    engine = poison(build(**options, **sinks, **tiers))
    first = some_tokens(5, 31 * PAGE + 3)
    said = one(engine, first, **params).token_ids
    second = [*first, *said, *some_tokens(6, 5)]
    hit = one(engine, second, **params)
    leave(engine)
    assert engine.scheduler.offload.memory.used > 0
    restored = one(engine, second, **params)
    engine.scheduler.offload.flush()
    other = poison(build(**options, **sinks, **tiers))
    found = one(other, second, **params)
    plain = one(build(prefix_cache=False, **options, **sinks), second, **params)
    whole = (len(first) + len(said) - 1) // PAGE * PAGE
    assert whole > 2 * other._table_width * PAGE
    assert hit.stats.cached_tokens == whole
    assert other.scheduler.counters.restored_tokens >= whole
    for again in (restored, found):
        assert again.stats.cached_tokens >= whole
        assert again.token_ids == hit.token_ids == plain.token_ids


@pytest.mark.slow
def test_devices_that_share_a_model_share_its_tiers(unoptimised, tiny_model):
    llm = LLM(str(tiny_model), tensor_parallel=2, kv_dtype="int4", page_size=64, max_batch=1, offload_memory=MUCH)
    prompt, params = [list(range(5, 150))], SamplingParams(max_tokens=6, logprobs=0)
    first, hit = (llm.generate(prompt, params)[0] for _ in range(2))
    llm.engine.scheduler.cache.evict(10**6)
    llm.generate([[9] * 150], params)
    again = llm.generate(prompt, params)[0]
    assert again.token_ids == first.token_ids
    assert again.logprobs == hit.logprobs
    assert again.stats.cached_tokens == llm.metrics()["restored_tokens"] == 128


def test_copies_go_through_pinned_memory_where_there_is_such(unoptimised, build, monkeypatch):
    engine = build(offload_memory=MUCH)
    prompt = some_tokens(3, 70)
    first, hit = (one(engine, prompt) for _ in range(2))
    monkeypatch.setattr("jaxspec.worker.platform", lambda: "gpu")
    stored = engine.device.read_pages([0, 1, 2])
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(stored)} == {"pinned_host"}
    leave(engine)
    restored = one(engine, prompt)
    assert restored.stats.cached_tokens == 64
    assert restored.token_ids == first.token_ids
    assert restored.logprobs == hit.logprobs


def test_a_restart_finds_what_is_of_the_same_weights(unoptimised, build, transformer, tmp_path):
    disk = {"offload_disk": MUCH, "offload_folder": str(tmp_path)}
    prompt = some_tokens(3, 70)
    engine = build(**disk)
    first = one(engine, prompt)
    engine.scheduler.cache.evict(10**6)
    engine.scheduler.offload.flush()
    found = one(build(**disk), prompt)
    assert found.stats.cached_tokens == 64
    assert found.token_ids == first.token_ids
    norm = {"weight": transformer.params["norm"]["weight"] * 1.001}
    trained = transformer._replace(params=transformer.params | {"norm": norm})
    others = [
        {"kv_dtype": "int8"},
        {"page_size": 4},
        {"drafter": "draft_model"},
        {"kv_policy": "window", "kv_window": 64},
    ]
    assert not any(build(**other, **disk).scheduler.offload._named for other in others)
    assert not build(trained, **disk).scheduler.offload._named
    assert build(**disk).scheduler.offload._named


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_memory": -1.0}, "offload_memory must be 0 GiB or more"),
        ({"offload_disk": -1.0}, "offload_disk must be 0 GiB or more"),
        ({"offload_folder": "there"}, "offload_folder is for offload_disk"),
        ({"offload_memory": 1.0, "prefix_cache": False}, "prefix cache, which is off"),
        ({"offload_memory": 1.0, "distributed": "auto"}, "need one process"),
        ({"offload_disk": 1.0, "data_parallel": 2}, "needs one replica"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("option", ["offload_memory", "offload_disk"])
def test_room_for_less_than_a_page_is_refused(build, tmp_path, option):
    with pytest.raises(CapacityError, match=f"{option} 1e-09 GiB is less than one page: 8 tokens take"):
        build(**{option: 1e-9})
