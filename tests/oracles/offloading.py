"""The worlds of `pages` and `scheduling` with tiers: what leaves the simulated device must come back as it was."""

import random
from collections.abc import Sequence

import numpy as np

from jaxspec.host.offload import AT_ONCE, Offload
from jaxspec.host.radix import RadixCache, page_keys
from jaxspec.host.scheduler import Scheduler
from jaxspec.host.tiers import Files, Memory
from tests.oracles import pages, scheduling
from tests.oracles.pages import Pick, World

SLOT = 3
EMPTY, POISON = [-1] * SLOT, [-2] * SLOT


class Copies:
    """The device's side: bytes of pages as they are when the copy begins, whole after a while."""

    def __init__(self, memory, rng: random.Random, failing: float = 0.0) -> None:
        self.memory, self.rng, self.failing = memory, rng, failing

    def read_pages(self, numbers: Sequence[int]) -> list[np.ndarray]:
        assert 0 < len(numbers) <= AT_ONCE
        self._fail()
        return [np.array([_coded(slot) for slot in self.memory[page]], np.int64) for page in numbers]

    def is_read(self, stored: list[np.ndarray]) -> bool:
        return self.rng.random() < 0.3

    def take_pages(self, stored: list[np.ndarray], count: int) -> list[np.ndarray]:
        assert count == len(stored)
        self._fail()
        return [slots.reshape(-1).view(np.uint8) for slots in stored]

    def write_pages(self, numbers: Sequence[int], blocks: Sequence[np.ndarray]) -> None:
        assert 0 < len(numbers) == len(blocks) <= AT_ONCE
        for page, data in zip(numbers, blocks, strict=True):
            self.memory[page] = [_plain(slot) for slot in data.view(np.int64).reshape(-1, SLOT).tolist()]

    def _fail(self) -> None:
        if self.rng.random() < self.failing:
            raise MemoryError("no memory for copies")


def _coded(slot) -> list[int]:
    if slot is None or slot == "poison":
        return EMPTY if slot is None else POISON
    return [slot, 0, 0] if isinstance(slot, int) else list(slot)


def _plain(slot: list[int]):
    if slot in (EMPTY, POISON):
        return None if slot == EMPTY else "poison"
    return slot[0] if slot[1:] == [0, 0] and abs(slot[0]) > 2 else tuple(slot)


class Tiered(World):
    """The world of the books, in which evicted pages go to a tier and come back to whoever begins alike.

    A page that is freed is poisoned at once. `most` pages are kept, or all that ever were.
    """

    def __init__(self, num_pages: int, page_size: int, most: int | None = None, failing: float = 0.0) -> None:
        super().__init__(num_pages, page_size)
        rng = random.Random(num_pages)
        limit = 10**9 if most is None else most * SLOT * 8 * page_size
        self.offload = Offload(Copies(self.memory, rng, failing), page_size, Memory(limit))
        self.cache = RadixCache(self.allocator, page_size, self.offload.keep)
        self.all_is_kept = most is None and not failing
        self.away: set[tuple] = set()
        """The prefixes that were evicted so far."""
        release = self.allocator.release

        def poisoned(numbers):
            freed = release(numbers)
            for page in freed:
                self.memory[page] = ["poison"] * page_size
            return freed

        self.allocator.release = poisoned

    def admit(self, pick: Pick) -> None:
        before = len(self.sequences)
        super().admit(pick)
        if len(self.sequences) > before:
            self._restore(self.sequences[-1])

    def settle(self, pick: Pick) -> None:
        """Time goes by."""
        self.offload.settle()

    def _evict(self, count: int) -> None:
        before = set(self.kept)
        super()._evict(count)
        self.away |= before - self.kept.keys()

    def _restore(self, sequence: pages.Sequence) -> None:
        first = sequence.tokens // self.size
        keys = page_keys(sequence.text, len(sequence.text) - 1, sequence.namespace, self.size)
        if len(keys) == first or not self._reserve(sequence, len(keys) * self.size):
            return
        found = self.offload.restore(keys, sequence.table.pages[first : len(keys)])
        kept = first
        while kept < len(keys) and (sequence.namespace, tuple(sequence.text[: (kept + 1) * self.size])) in self.away:
            kept += 1
        assert found <= kept - first
        assert found == kept - first or not self.all_is_kept
        self._commit(sequence, (first + found) * self.size)
        self.seen["page restored"] += found


OPERATIONS = [getattr(Tiered, operation.__name__) for operation in pages.OPERATIONS] + 4 * [Tiered.settle]


class TieredDevice(scheduling.Device):
    """The device of a scheduler with tiers of `most` pages of memory, and files; at times someone must give way."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, most: int, files: Files | None) -> None:
        super().__init__(scheduler, rng)
        assert scheduler.offload is not None
        scheduler.offload.device = Copies(self.memory, rng)
        scheduler.offload.memory.limit = most * SLOT * 8 * self.size

    def step(self, chunk: int, rounds: int, batch: int) -> None:
        self.read()
        self.flight = 0, {}
        if self.scheduler.rows and self.rng.random() < 0.05:
            _, running = self.scheduler.preempt()
            running.saved = len(running.tokens)
        super().step(chunk, rounds, batch)
        self.scheduler.offload.settle()


def tiers(page: int, files: Files | None = None) -> Offload:
    """For a scheduler, whose device comes later."""
    return Offload(Copies({}, random.Random(0)), page, Memory(0), files)
