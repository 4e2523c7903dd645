"""How an engine is doing: times as clients see them, what prompts cost, and what the memory holds."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.host.request import TextDelta
from jaxspec.host.scheduler import Counters, Scheduler

KEPT = 2**18
"""Times that a spread keeps: the latest."""


class Status(NamedTuple):
    """What goes on in an engine, as numbers that add up."""

    running: int
    waiting: int
    pages: int
    used: int
    """Pages of running samples."""
    cached: int
    """Pages that are kept for others."""
    hit_tokens: int
    prompt_tokens: int
    tokens: int
    """Of the samples that have ended; so the next."""
    rounds: int

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that did not have to be computed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tau(self) -> float:
        """Tokens a round; 0 before a sample has ended."""
        return self.tokens / self.rounds if self.rounds else 0.0


class Spread:
    """Median, 99th percentile (both of the latest KEPT times) and maximum, in seconds; None where there is no time."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self._max: float | None = None

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        self._max = max(seconds, self._max or 0.0)

    def take(self, other: "Spread") -> None:
        """Add another's times."""
        self._times.extend(other._times)
        self._max = max((most for most in (self._max, other._max) if most is not None), default=None)

    def as_dict(self) -> dict[str, float | None]:
        ordered = sorted(self._times)
        p50, p99 = (ordered[math.ceil(p * len(ordered)) - 1] if ordered else None for p in (0.5, 0.99))
        return {"p50": p50, "p99": p99, "max": self._max}


class Share:
    """A part of a whole as it changes: `mean` of all that was added together, and the `peak` of one addition."""

    def __init__(self) -> None:
        self._part = self._whole = 0
        self.peak = 0.0

    def add(self, part: int, whole: int) -> None:
        self._part += part
        self._whole += whole
        self.peak = max(self.peak, part / whole if whole else 0.0)

    def take(self, other: "Share") -> None:
        """Add all that another was given."""
        self._part += other._part
        self._whole += other._whole
        self.peak = max(self.peak, other.peak)

    @property
    def mean(self) -> float:
        return self._part / self._whole if self._whole else 0.0


class Metrics:
    """Figures since this was made; `counters` are the scheduler's, counted since then too."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.requests = self.tokens = 0
        self.seconds = 0.0
        """In which there was work, from the arrival of a request on."""
        self._ended = (0, 0)
        self._ttft, self._inter_token = Spread(), Spread()
        self._waste, self._look_ahead = Share(), Share()
        self._clock: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tau(self) -> float:
        """Tokens a round, of the samples that have ended; 0 before the first has."""
        tokens, rounds = self._ended
        return tokens / rounds if rounds else 0.0

    @staticmethod
    def of_all(parts: Sequence["Metrics"]) -> "Metrics":
        """The figures of engines that work side by side."""
        counts = zip(*(dataclasses.astuple(part.counters) for part in parts), strict=True)
        whole = Metrics(Counters(*(sum(count) for count in counts)))
        whole.seconds = max(part.seconds for part in parts)
        whole.requests, whole.tokens = (sum(n) for n in zip(*((p.requests, p.tokens) for p in parts), strict=True))
        whole._ended = sum(part._ended[0] for part in parts), sum(part._ended[1] for part in parts)
        for part in parts:
            whole._ttft.take(part._ttft)
            whole._inter_token.take(part._inter_token)
            whole._waste.take(part._waste)
            whole._look_ahead.take(part._look_ahead)
        return whole

    def status(self, scheduler: Scheduler) -> Status:
        """What goes on now."""
        pages = scheduler.pages
        used = len({page for running in scheduler.rows.values() for page in running.table.pages})
        return Status(
            len(scheduler.rows),
            len(scheduler.waiting),
            pages.num_pages,
            used,
            pages.num_pages - pages.free - used,
            self.counters.hit_tokens,
            self.counters.prompt_tokens,
            *self._ended,
        )

    def take(self, news: list[TextDelta], scheduler: Scheduler) -> None:
        """Count what a step of the engine brought, and look at the pages as it leaves them."""
        self._tick(scheduler)
        self._look(scheduler)
        for delta in news:
            self.tokens += delta.tokens
            if delta.gap is not None:
                self._inter_token.add(delta.gap)
            if delta.finished is not None:
                stats = delta.finished.stats
                self.requests += delta.index == 0
                self._ended = self._ended[0] + stats.tokens, self._ended[1] + stats.steps
                if stats.tokens:
                    self._ttft.add(stats.time_to_first_token)

    def as_dict(self) -> dict[str, Any]:
        """All figures, times in seconds.

        `ttft` is the time from a request's arrival to its first token. `inter_token` are the waits between the reads
        that brought a sample new tokens: the tokens of one read, of several rounds or drafts, arrive at once and are
        one arrival. `waste` is over the slots that hold a token, each counted once however many samples share it:
        `mean` and `peak` of the unfilled slots in last pages, and apart from them those of `look_ahead`, the pages that
        the rounds in flight may write to. All are as of the ends of steps; means are weighted by slots.
        `restored_tokens` came back from host memory or disk; those of prompts are among `hit_tokens`. `computed_tokens`
        are those that prefill wrote, again for samples that gave way.
        """
        counters = self.counters
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tau": self.tau,
            "ttft": self._ttft.as_dict(),
            "inter_token": self._inter_token.as_dict(),
            "prompt_tokens": counters.prompt_tokens,
            "hit_tokens": counters.hit_tokens,
            "restored_tokens": counters.restored_tokens,
            "computed_tokens": counters.computed_tokens,
            "waste": {
                "mean": self._waste.mean,
                "peak": self._waste.peak,
                "look_ahead": {"mean": self._look_ahead.mean, "peak": self._look_ahead.peak},
            },
            "peak_concurrency": counters.peak_running,
            "preemptions": counters.preemptions,
        }

    def _tick(self, scheduler: Scheduler) -> None:
        """Let the clock run while there is work: an idle engine is not a slow one."""
        now, samples = time.perf_counter(), [*scheduler.rows.values(), *scheduler.waiting]
        if self._clock is None:
            self._clock = min((running.sample.arrival for running in samples), default=now)
        self.seconds += now - self._clock
        self._clock = now if samples else None

    def _look(self, scheduler: Scheduler) -> None:
        tables = [running.table for running in scheduler.rows.values()]
        held = {page for table in tables for page in table.pages[: scheduler.tables.count(table.slots)]}
        waste = scheduler.waste
        filled = len(held) * scheduler.tables.page_size - waste.partial
        self._waste.add(waste.partial, filled)
        self._look_ahead.add(waste.look_ahead, filled)
