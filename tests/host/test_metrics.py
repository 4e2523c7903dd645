"""Figures of an engine from made-up news, on a clock that the test turns."""

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.config import SamplingParams as Params
from jaxspec.host import metrics as module
from jaxspec.host.metrics import Metrics, Share, Spread
from jaxspec.host.output import Emitted, Transcript
from jaxspec.host.request import Sample, TextDelta
from jaxspec.host.scheduler import Scheduler


class Silent:
    """Tokens without text."""

    def push(self, ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class World:
    """A scheduler, its metrics, and a clock."""

    def __init__(self, patch: pytest.MonkeyPatch, pages: int = 64, page_size: int = 4) -> None:
        self.now = 100.0
        self.scheduler = Scheduler(pages, page_size, look_ahead=5, max_emitted=6, max_batch=8)
        self.metrics = Metrics(self.scheduler.counters)
        patch.setattr(module.time, "perf_counter", lambda: self.now)

    def add(self, name: str, prompt: list[int], index: int = 0) -> Transcript:
        sample = Sample(name, index, prompt, Params(max_tokens=20), 20, 0, self.now, len(self.scheduler.waiting))
        transcript = Transcript(sample, Silent())
        self.scheduler.add(sample, transcript)
        return transcript

    def step(self, at: float, *news: TextDelta) -> None:
        self.now = at
        self.metrics.take(list(news), self.scheduler)

    @property
    def figures(self) -> dict:
        return self.metrics.as_dict()


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def tokens(count: int, step: int, accepted: int) -> list[Emitted]:
    """The tokens of a round, and how many drafts were accepted up to its end."""
    return [Emitted(1, (step, accepted, accepted), None)] * count


def test_percentiles_are_values_that_occurred():
    spread = Spread()
    assert spread.as_dict() == {"p50": None, "p99": None, "max": None}
    values = np.random.default_rng(0).permutation(200) + 1.0
    for value in values:
        spread.add(float(value))
    expected = [np.percentile(values, p, method="inverted_cdf") for p in (50, 99)]
    assert list(spread.as_dict().values()) == [*expected, 200.0] == [100.0, 198.0, 200.0]


def test_a_spread_forgets_all_but_the_maximum(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    spread = Spread()
    for value in (9.0, 1.0, 2.0, 3.0):
        spread.add(value)
    assert spread.as_dict() == {"p50": 2.0, "p99": 3.0, "max": 9.0}


def test_a_share_is_over_all_together_and_its_peak_of_one():
    share = Share()
    assert (share.mean, share.peak) == (0.0, 0.0)
    for part, whole in ((0, 0), (1, 2), (1, 98)):
        share.add(part, whole)
    assert (share.mean, share.peak) == (2 / 100, 0.5)


def test_waits_are_between_reads_and_an_idle_engine_is_not_slow(world):
    transcript = world.add("a", [1, 2, 3])
    world.scheduler.admit(8)
    world.step(101.0)
    world.step(102.0, transcript.push(tokens(3, 1, 2), 101.5))
    assert world.figures["inter_token"]["max"] is None
    first = transcript.push(tokens(1, 2, 2), 102.0)
    assert first.gap == 0.5
    world.step(103.0, first)
    last = transcript.finish(transcript.push(tokens(4, 3, 5), 103.75), "length", None)
    world.scheduler.finish(world.scheduler.rows[0])
    world.step(104.0, last)
    figures = world.figures
    assert figures["inter_token"] == {"p50": 0.5, "p99": 1.75, "max": 1.75}
    assert figures["ttft"] == {"p50": 1.5, "p99": 1.5, "max": 1.5}
    assert (figures["requests"], figures["tokens"], figures["seconds"], figures["tau"]) == (1, 8, 4.0, 8 / 3)
    world.now = 500.0
    world.add("b", [1])
    world.step(502.0)
    assert world.figures["seconds"] == 6.0
    assert world.figures["tokens_per_second"] == 8 / 6


def test_an_end_without_a_token_is_no_arrival(world):
    transcript = world.add("a", [1])
    nothing = transcript.finish(transcript.push([], 101.0), "error", "not finite")
    world.step(101.0, nothing)
    assert nothing.gap is None
    figures = world.figures
    assert (figures["requests"], figures["ttft"]["max"], figures["inter_token"]["max"], figures["tau"]) == (
        1,
        None,
        None,
        0,
    )


def test_waste_counts_a_shared_slot_once_and_look_ahead_apart(world):
    scheduler = world.scheduler
    world.add("a", [1] * 11)
    world.add("a", [1] * 11, index=1)
    scheduler.admit(8)
    scheduler.next_chunks(99)
    scheduler.admit(8)
    assert len(scheduler.rows) == 2
    scheduler.reserve(1)
    world.step(101.0)
    # Each has 10 of 12 slots filled, 8 of them on the same two pages; a round may write to 10 + 1 + 5 slots.
    assert world.figures["waste"] == {"mean": 4 / 12, "peak": 4 / 12, "look_ahead": {"mean": 8 / 12, "peak": 8 / 12}}
    scheduler.abort("a")
    world.step(102.0)
    assert world.figures["waste"]["mean"] == 4 / 12
    assert world.figures["peak_concurrency"] == 2


def test_what_the_engine_tells(tiny_model):
    llm = LLM(str(tiny_model), max_batch=4, page_size=16)
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=2)
    prompts = [[7] * 40, [9] * 33]
    results = llm.generate(prompts, params)
    figures = llm.metrics()
    assert (figures["requests"], figures["tokens"], figures["tau"]) == (2, 80, 1.0)
    assert figures["prompt_tokens"] == 2 * (40 + 33)
    assert figures["hit_tokens"] == sum(o.stats.cached_tokens for r in results for o in r.outputs) == 39 + 32
    assert figures["computed_tokens"] == 39 + 32
    assert (figures["peak_concurrency"], figures["preemptions"]) == (4, 0)
    assert 0 < figures["waste"]["mean"] <= figures["waste"]["peak"] <= 1
    assert figures["waste"]["look_ahead"]["peak"] > 0
    slowest = max(o.stats.time_to_first_token for r in results for o in r.outputs)
    assert figures["ttft"]["max"] == slowest
    assert 0 < figures["inter_token"]["p50"] <= figures["inter_token"]["max"] < figures["seconds"]
    spec = llm.engine.spec
    assert figures["kv_bytes_per_token"] == 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    assert figures["kv_tail_bytes"] == 0
