"""An engine under stress: poisoned pages, forced preemption, work of all kinds, and what must come of it on the toy."""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.host.request import CompletionOutput
from jaxspec.kv.policy import FULL, Policy
from jaxspec.kv.pool import OF_SEQUENCES
from jaxspec.models.loading import LoadedModel
from tests.oracles import toy_forward
from tests.oracles.heavy import Rule

Results = dict[tuple[str, int], CompletionOutput]


class Work(NamedTuple):
    """One request, and the steps of the engine before which it comes and is called off."""

    name: str
    prompt: list[int]
    params: SamplingParams
    comes: int = 0
    goes: int | None = None


SPOILT = {"float32": (np.nan, 1e30), "uint16": (0x7FFF, 0x7149), "uint8": (0x7F, 0x7E), "int8": (127, 127)}
"""NaN and a large number, for narrow floats as their bits; any codes for integers, whose scales are spoilt."""


@partial(jax.jit, donate_argnums=0)
def spoil(pool: dict[str, jax.Array], pages: jax.Array) -> dict[str, jax.Array]:
    """These pages of every layer: NaN for keys and their scales, large numbers for values: 0 times NaN is NaN."""

    def one(name: str, array: jax.Array) -> jax.Array:
        if name in OF_SEQUENCES:
            return array
        everywhere = jnp.tile(pages, array.shape[0] // pages.shape[0]).reshape(-1, *[1] * (array.ndim - 1))
        nan, large = SPOILT[array.dtype.name]
        fill = {"key_scale": nan, "value_scale": large}.get(name)
        if fill is None:  # keys and values side by side
            fill = jnp.array([nan, large], array.dtype).reshape(-1, *[1] * (array.ndim - 3))
        return jnp.where(everywhere, jnp.asarray(fill, array.dtype), array)

    return {name: one(name, array) for name, array in pool.items()}


def poison(engine: Engine) -> Engine:
    """From now on a page that nobody holds is spoilt on the device, from the start and whenever it is freed."""
    resize, release = engine._resize, engine.scheduler.pages.release

    def write(pages) -> None:
        mask = np.isin(np.arange(engine.program.pool.num_pages), list(pages))
        pools = (spoil(pool, mask) for pool in (engine.device.state.pool, engine.device.state.draft_pool))
        engine.device.state = engine.device.state._replace(**dict(zip(("pool", "draft_pool"), pools, strict=True)))

    def resize_and_spoil() -> None:
        fresh = not engine._batch
        resize()
        if fresh:
            write(range(engine.program.pool.num_pages))

    def release_and_spoil(pages) -> list[int]:
        freed = release(pages)
        if freed:
            write(freed)
        return freed

    engine._resize, engine.scheduler.pages.release = resize_and_spoil, release_and_spoil
    return engine


def preempt_every_round(engine: Engine, everyone: bool = False) -> Engine:
    """After every round the last in line has to give way, or everyone."""
    read = engine._read

    def read_and_preempt():
        news = read()
        for _ in range(len(engine.scheduler.rows) if everyone else 1):
            if news and engine.scheduler.rows:
                row, running = engine.scheduler.preempt()
                running.saved = f"{running.sample.request_id}/{running.sample.index}"
                engine.device.save(row, running.saved)
        return news

    engine._read = read_and_preempt
    return engine


@contextmanager
def short_of_pages(engine: Engine, left: int) -> Iterator[None]:
    """Leaves so many pages, empty ones."""
    scheduler = engine.scheduler
    if scheduler.cache:
        scheduler.cache.clear()
    taken = scheduler.pages.allocate(scheduler.pages.num_pages - left)
    scheduler.pins.most -= len(taken)
    yield
    scheduler.pages.release(taken)
    scheduler.pins.most += len(taken)


def serve(engine: Engine, work: list[Work], pages_left: int | None = None) -> Results:
    """Everything that comes of the work; texts are streamed whole, and in the end nobody holds a page.

    `pages_left` are those of the pool that may be used.
    """
    scheduler = engine.scheduler
    stolen = scheduler.pages.allocate(scheduler.pages.num_pages - pages_left) if pages_left else []
    scheduler.pins.most -= len(stolen)
    results: Results = {}
    texts: dict[tuple[str, int], str] = {}
    gone: set[str] = set()
    step = 0
    while engine.has_work or any(item.comes >= step for item in work):
        for item in work:
            if item.comes == step:
                engine.add(item.name, item.prompt, item.params)
            if item.goes == step:
                engine.abort(item.name)
                gone.add(item.name)
        for news in engine.step():
            assert news.request_id not in gone
            key = news.request_id, news.index
            texts[key] = texts.get(key, "") + news.text
            if news.finished is not None:
                results[key] = news.finished
                assert texts[key] == news.finished.text
        step += 1
        assert step < 20_000, "nothing moves"
    scheduler.pins.tick(math.inf)
    if stolen:
        scheduler.pages.release(stolen)
        scheduler.pins.most += len(stolen)
    kept = scheduler.cache.evictable if scheduler.cache else 0
    assert scheduler.pages.free + kept == scheduler.pages.num_pages
    return results


class Expected(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    text: str
    reason: str


def expected(
    loaded: LoadedModel,
    item: Work,
    index: int,
    policy: Policy = FULL,
    rule: Rule | None = None,
    rounds: Iterable[int] = (),
) -> Expected:
    """What the toy's text is by the oracle; with a `rule`, given how many tokens its rounds emitted."""
    params, tokenizer = item.params, loaded.tokenizer
    stop_ids = (() if params.ignore_eos else tokenizer.eos_ids) + tuple(params.stop_token_ids)
    limit = min(params.max_tokens, toy_forward.CONTEXT - len(item.prompt))
    asked = item.prompt, params, params.seed or 0, index, limit, stop_ids
    tokens, logprobs, stopped = toy_forward.write(*asked, policy, rule, rounds)
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        found = [text.index(stop) for stop in params.stop_strings if stop in text]
        if found:
            return Expected(tokens[:end], logprobs[:end], text[: min(found)], "stop")
    return Expected(tokens, logprobs, tokenizer.decode(tokens), "stop" if stopped else "length")


def compare(
    loaded: LoadedModel, work: list[Work], results: Results, policy: Policy = FULL, rule: Rule | None = None
) -> None:
    """Every text is the oracle's, and there are no more and no fewer than were asked for."""
    for item in work:
        for index, drawn in enumerate(_ranked(loaded, item, policy)[: item.params.n]):
            got = results.pop((item.name, index), None)
            if got is None:
                assert item.goes is not None
                continue
            wanted = expected(loaded, item, drawn, policy, rule, [done.emitted for done in got.rounds])
            assert got.token_ids == wanted.tokens, f"{item.name} sample {index} at {_differ(got, wanted)}"
            assert (got.text, got.finish_reason) == (wanted.text, wanted.reason)
            np.testing.assert_allclose([entry.logprob for entry in got.logprobs], wanted.logprobs, atol=1e-3)
    assert not results


def _ranked(loaded: LoadedModel, item: Work, policy: Policy) -> list[int]:
    """The samples of a request in the order in which they must come: where they compete, by their mean."""
    order = list(range(item.params.samples))
    if item.params.best_of is not None:
        order.sort(key=lambda index: -float(np.mean(expected(loaded, item, index, policy).logprobs)))
    return order


def _differ(got: CompletionOutput, wanted: Expected) -> int:
    pairs = zip(got.token_ids, wanted.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got.token_ids), len(wanted.tokens)))


def until_a_near_tie(output: CompletionOutput) -> int:
    """Tokens before the first that rounding may change, as its two likeliest are this close."""
    gaps = [abs(float(np.subtract(*list(entry.top.values())[:2]))) for entry in output.logprobs or []]
    return next((i for i, gap in enumerate(gaps) if gap <= 2e-3), len(gaps))


def some_work(
    loaded: LoadedModel,
    rng: random.Random,
    page: int,
    count: int = 10,
    aborts: float = 0.0,
    rush: bool = False,
    policy: Policy = FULL,
) -> list[Work]:
    """Requests of all kinds at any time; many begin like an earlier one, or go on from its answer.

    In a rush they come all at once, with short prompts that get long answers.
    """
    forked = SamplingParams(temperature=0.8, n=3, max_tokens=20, seed=rng.randrange(2**63), logprobs=0)
    work = [Work("0", some_ids(rng, rng.randrange(2, 12)), forked)]
    for number in range(1, count):
        prompt = some_ids(rng, rng.choice([1, page, page + 1, rng.randint(1, 40)]))
        if rng.random() < 0.6:
            before = rng.choice(work)
            answer = expected(loaded, before, 0, policy).tokens if rng.random() < 0.6 else []
            prompt = (before.prompt + answer)[: rng.choice([99, 99, rng.randint(1, 99)])] + prompt[: rng.randint(0, 5)]
        prompt = prompt[: 12 if rush else 90]
        params = some_params(loaded, prompt, rng, rng.choice([rng.randint(3, 24), 24, 30]) if not rush else 45, policy)
        comes = 0 if rush else rng.choice([0, rng.randrange(30)])
        goes = comes + rng.randrange(20) if rng.random() < aborts else None
        work.append(Work(f"{number}", prompt, params, comes, goes))
    return work


def some_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, toy_forward.KNOWN) for _ in range(length)]


def some_params(
    loaded: LoadedModel, prompt: list[int], rng: random.Random, most: int, policy: Policy = FULL
) -> SamplingParams:
    kinds = [
        {},
        {"stop_token_ids": [rng.randrange(3, 120)]},
        {"temperature": rng.choice([0.4, 0.8]), "n": rng.choice([1, 2, 3])},
        {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1, "n": 2},
        {"temperature": 0.6, "frequency_penalty": 0.1, "min_tokens": 3},
        {"max_tokens": 1},
    ]
    params = {"max_tokens": most, "seed": rng.randrange(2**63), "logprobs": 0, "priority": rng.choice([0, 0, 1])}
    params |= rng.choice(kinds)
    if rng.random() < 0.3 and "min_tokens" not in params:
        text = expected(loaded, Work("", prompt, SamplingParams(**params)), 0, policy).text
        at = rng.randrange(max(len(text) - 2, 1))
        params["stop"] = [text[at : at + 2], "never"] if text[at : at + 2].isascii() and text[at:] else ["never"]
    return SamplingParams(**params)


def told(output: CompletionOutput) -> list[float]:
    """The log probabilities of an answer's tokens."""
    return [entry.logprob for entry in output.logprobs or []]
