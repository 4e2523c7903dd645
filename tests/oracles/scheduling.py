"""Schedulers without a device: helpers, and a simulated device on which everyone must find their own text."""

import random
from collections import Counter

from jaxspec.config import SamplingParams
from jaxspec.host.blocks import Budget, Kept
from jaxspec.host.output import Transcript
from jaxspec.host.request import Sample
from jaxspec.host.running import Running
from jaxspec.host.scheduler import Scheduler

LEVEL = 64
"""Places that a level of priority is worth."""
CHUNK = 24


class NoText:
    def push(self, ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def make(pages: int = 64, page: int = 4, **options) -> Scheduler:
    return Scheduler(pages, page, **{"look_ahead": 0, "max_emitted": 1, "max_batch": 8, **options})


def add(
    scheduler: Scheduler,
    name: str,
    prompt: list[int] | int,
    most: int = 8,
    *,
    place: int = 0,
    n: int = 1,
    salt: str = "",
    ttl: float | None = None,
) -> list[Running]:
    """Put a request in line; a prompt given as a number has so many tokens of its own."""
    ids = (
        prompt if isinstance(prompt, list) else [random.Random(f"{name} {i}").randrange(10_007) for i in range(prompt)]
    )
    params = SamplingParams(max_tokens=most, n=n, cache_salt=salt, cache_ttl=ttl)
    for index in range(n):
        sample = Sample(name, index, ids, params, most, 0, 0.0, place)
        scheduler.add(sample, Transcript(sample, NoText()))
    return [r for r in scheduler.waiting if r.sample.request_id == name]


def names(runnings) -> list[str]:
    return [r.sample.request_id for r in runnings]


def admit(scheduler: Scheduler, batch: int = 8) -> list[Running]:
    return [admission.running for admission in scheduler.admit(batch)]


def prefill(scheduler: Scheduler) -> None:
    """Write all admitted prompts, and let them be found."""
    while chunks := scheduler.next_chunks(CHUNK):
        for chunk in chunks:
            scheduler.publish(chunk.running)


def start(scheduler: Scheduler, *args, **options) -> Running:
    """A request that is ready to decode."""
    running = add(scheduler, *args, **options)[0]
    admit(scheduler, scheduler.max_batch)
    prefill(scheduler)
    assert running.prefilled
    return running


def emit(scheduler: Scheduler, running: Running, count: int, rounds: int = 1) -> None:
    scheduler.reserve(rounds)
    scheduler.commit(running, [len(running.tokens) + i for i in range(count)])
    scheduler.publish(running)


def held(scheduler: Scheduler) -> set[int]:
    return {page for running in scheduler.rows.values() for page in running.table.pages}


def check(scheduler: Scheduler) -> None:
    """Every page is free, cached or held, and nobody who waits holds any."""
    cached = scheduler.cache._pages if scheduler.cache else set()
    assert scheduler.pages.free + len(held(scheduler) | cached) == scheduler.pages.num_pages
    for row, running in scheduler.rows.items():
        assert running.row == row
        assert len(running.table.pages) <= scheduler.table_width
        uses = [r for r in scheduler.rows.values() if set(r.table.pages) & set(running.table.pages[-1:])]
        if running.table.tokens % scheduler.tables.page_size:
            assert uses == [running]
    for running in scheduler.waiting:
        assert (running.row, running.table.pages, running.table.tokens) == (None, [], 0)


def books(rng: random.Random, page: int, kept: Kept | int | None) -> dict:
    """Options of a scheduler whose pool is hardly larger than what one request needs; of a text, so many tokens stay
    where `kept` is a number."""
    most, ahead = rng.choice([(1, 0), (4, 3), (3, 7)])
    least = -(-(30 + 20 + ahead) // page)
    options = {"look_ahead": ahead, "max_emitted": most}
    if isinstance(kept, int):
        own = -(-(kept + page + ahead) // page)
        least, options["budget"] = least + own, Budget(kept, kept + page, own, votes=6)
    elif kept is not None:
        options["kept"] = kept
        written = max(15 * most + 1 + ahead, 3 * page + 5)
        options["table_width"] = -(-kept.first // page) + -(-(kept.last + written - 1) // page) + 1
        least = min(least, options["table_width"])
    return options | {"pages": least + rng.randrange(20 // page + 2)}


def empty(scheduler: Scheduler) -> None:
    """After everybody has left: only cached pages are not free, and nobody holds them."""
    assert not scheduler.rows
    assert not scheduler.waiting
    if scheduler.cache is not None:
        assert scheduler.cache.evictable == scheduler.cache.cached
        scheduler.cache.clear()
    assert scheduler.pages.free == scheduler.pages.num_pages


class Device:
    """Runs a scheduler as the engine does. A slot holds a hash of the text up to it; a free page holds nothing."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng, self.size = scheduler, rng, scheduler.tables.page_size
        self.memory = {page: [None] * self.size for page in range(scheduler.pages.num_pages)}
        self.flight: tuple[int, dict[int, Running]] = 0, {}
        self.stays: dict[Running, list[int]] = {}
        """Of texts that were condensed, the places in the text of what stayed."""
        self.voted: Counter[Running] = Counter()
        self.done: list[Running] = []
        release = scheduler.pages.release

        def poisoned(pages):
            freed = release(pages)
            self.memory.update((page, [None] * self.size) for page in freed)
            return freed

        scheduler.pages.release = poisoned

    def step(self, chunk: int, rounds: int, batch: int) -> None:
        self.read()
        for running, copy in self.scheduler.admit(batch):
            if copy is not None:
                self.memory[copy.target][: copy.slots] = self.memory[copy.source][: copy.slots]
            assert running.saved in (None, len(running.tokens))
            running.saved = None
        chunks = self.scheduler.next_chunks(chunk)
        assert sum(len(c.tokens) for c in chunks) <= chunk
        for running, slot, tokens, votes in chunks:
            start = slot + running.table.dropped
            self.see(running, start)
            self.write(running, start, running.tokens[: start + len(tokens)])
            self.voted[running] += votes * len(tokens)
        for running, *_ in chunks:
            self.scheduler.publish(running)
        for row, source, target in self.scheduler.condense():
            self.condense(self.scheduler.rows[row], source, target)
        rounds, gone = self.scheduler.reserve(rounds)
        assert not gone or self.scheduler.budget is None
        for _, running in gone:
            running.saved = len(running.tokens)
        self.flight = rounds, self.scheduler.decoding
        for running in self.flight[1].values():
            assert running.table.tokens == len(running.tokens) - 1
            self.see(running, running.table.tokens)
            self.scribble(running, rounds)
        check(self.scheduler)

    def read(self) -> None:
        rounds, rows = self.flight
        for row, running in rows.items():
            if running.row != row:
                continue
            left = running.sample.max_tokens - (len(running.tokens) - len(running.sample.prompt_ids))
            most = min(left, rounds * self.scheduler.max_emitted)
            if (budget := self.scheduler.budget) is not None:  # it stands still then
                most = min(most, budget.limit - 1 - running.table.slots + self.scheduler.max_emitted)
            emitted = [self.rng.randrange(2) for _ in range(self.rng.randint(1, most))]
            length = running.table.tokens
            self.write(running, length, (running.tokens + emitted)[:-1])
            self.scheduler.commit(running, emitted)
            self.scheduler.publish(running)
            if len(emitted) == left:
                self.scheduler.finish(running)
                self.done.append(running)

    def condense(self, running: Running, source: list[int], target: list[int]) -> None:
        """Any of the text may stay."""
        assert self.scheduler.budget is not None
        places, end = self.places(running, running.table.tokens), running.table.tokens
        stay = sorted(self.rng.sample(range(len(places)), self.scheduler.budget.tokens))
        slots = [self.memory[source[slot // self.size]][slot % self.size] for slot in stay]
        for index, slot in enumerate(slots):
            assert self.scheduler.pages.references(target[index // self.size]) == 1
            self.memory[target[index // self.size]][index % self.size] = slot
        self.stays[running] = [places[slot] for slot in stay]
        assert self.voted[running] == min(len(running.sample.prompt_ids) - 1, self.scheduler.budget.votes)
        assert end - len(running.sample.prompt_ids) < running.sample.max_tokens - 1

    def places(self, running: Running, end: int) -> list[int]:
        """Of what is in the slots of a text that has a budget, up to a place in it."""
        stay = self.stays.get(running, [])
        return [*stay, *range(running.table.dropped + len(stay), end)]

    def where(self, running: Running, place: int) -> tuple[int, int]:
        """Page and offset of a place in the text."""
        tables, table = self.scheduler.tables, running.table
        slot = place if place < tables.first * self.size else place - table.dropped
        return table.pages[slot // self.size], slot % self.size

    def write(self, running: Running, start: int, text: list[int]) -> None:
        for place in range(start, len(text)):
            page, offset = self.where(running, place)
            assert self.scheduler.pages.references(page) == 1, "a page that others hold is final"
            self.memory[page][offset] = hash((running.sample.namespace, *text[: place + 1]))

    def scribble(self, running: Running, rounds: int) -> None:
        """Drafts go to every slot that the rounds may write."""
        most = running.table.tokens + (rounds - 1) * self.scheduler.max_emitted + 1 + self.scheduler.look_ahead
        left = len(running.sample.prompt_ids) + running.sample.max_tokens - 1 + self.scheduler.look_ahead
        if (budget := self.scheduler.budget) is not None:
            left = min(left, running.table.dropped + budget.limit + self.scheduler.look_ahead)
        for place in range(running.table.tokens, min(most, left)):
            page, offset = self.where(running, place)
            assert self.scheduler.pages.references(page) == 1
            self.memory[page][offset] = None

    def see(self, running: Running, end: int) -> None:
        """What the token at `end` sees is there."""
        text, kept, table = running.tokens, self.scheduler.tables.kept, running.table
        if self.scheduler.budget is not None:
            slots = enumerate(self.places(running, end))
            found = [(place, (table.pages[slot // self.size], slot % self.size)) for slot, place in slots]
        else:
            seen = (p for p in range(end) if kept is None or p < kept.first or p >= end - kept.last)
            found = [(place, self.where(running, place)) for place in seen]
        for place, (page, offset) in found:
            assert self.memory[page][offset] == hash((running.sample.namespace, *text[: place + 1]))
