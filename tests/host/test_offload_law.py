"""Law 5 with tiers: what was evicted comes back to its own text as it was, and a request that gave way to its own."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxspec.host import offload
from jaxspec.host.blocks import Kept
from jaxspec.host.offload import Offload
from jaxspec.host.radix import Leaving, RadixCache
from jaxspec.host.scheduler import Scheduler
from jaxspec.host.tiers import Files, Memory
from tests.oracles.offloading import OPERATIONS, Copies, Tiered, TieredDevice, tiers
from tests.oracles.pages import Pick
from tests.oracles.scheduling import add, books, empty, make

EACH = 2_000


def drive(world: Tiered, seed: int, operations: int = EACH) -> None:
    rng = random.Random(seed)
    while world.done.total() < operations:
        rng.choice(OPERATIONS)(world, rng.randrange)
        world.check()


@pytest.mark.parametrize(
    ("num_pages", "page_size", "most", "failing"),
    [(12, 1, None, 0.0), (12, 2, None, 0.0), (8, 4, None, 0.0), (12, 2, 6, 0.0), (12, 2, None, 0.2), (10, 3, 0, 0.0)],
)
def test_the_books_and_the_tier_agree_with_the_oracle(num_pages, page_size, most, failing):
    world = Tiered(num_pages, page_size, most, failing)
    drive(world, seed=num_pages + page_size)
    assert world.seen["page restored"] > 20 or most == 0
    assert world.seen["page evicted"] > 50
    assert (world.offload.lost > 0) == (failing > 0)
    if most is not None:
        assert len(world.offload.memory) <= most
    world.offload.clear()
    assert world.offload.memory.used == 0


class Machine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis."""

    @initialize(num_pages=st.integers(4, 10), page_size=st.integers(1, 4), most=st.sampled_from([None, 0, 3]))
    def start(self, num_pages: int, page_size: int, most: int | None) -> None:
        self.world = Tiered(num_pages, page_size, most)

    @rule(operation=st.sampled_from(OPERATIONS), data=st.data())
    def step(self, operation: Callable[[Tiered, Pick], None], data: st.DataObject) -> None:
        operation(self.world, lambda below: data.draw(st.integers(0, below - 1)))

    @invariant()
    def books_agree(self) -> None:
        self.world.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=20, stateful_step_count=50, deadline=None, derandomize=True)


def work(page: int, seed: int, most: int, files: Files | None = None, kept: Kept | None = None) -> Scheduler:
    """Requests that begin alike and give way often, until all are done; returns the scheduler, which holds nothing."""
    rng = random.Random(seed)
    options = {"publish_output": rng.random() < 0.5, "offload": tiers(page, files)}
    scheduler = make(page=page, max_batch=4, **options, **books(rng, page, kept))
    device, added, steps = TieredDevice(scheduler, rng, most, files), 0, 0
    while added < 25 or scheduler.waiting or scheduler.rows:
        if added < 25 and rng.random() < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            if device.done and rng.random() < 0.6:
                prompt = (rng.choice(device.done).tokens + prompt)[:30]
            add(scheduler, f"{added % 7}", prompt, rng.randint(1, 20), place=added, n=rng.choice([1, 1, 3]))
            added += 1
        if rng.random() < 0.03:
            name = f"{rng.randrange(7)}"
            scheduler.abort(name)
            device.done = [r for r in device.done if r.sample.request_id != name]
        device.step(rng.choice([1, page, 3 * page + 5]), rng.choice([1, 4, 16]), 4)
        steps += 1
        assert steps < 5000, "nothing moves"
    empty(scheduler)
    return scheduler


@pytest.mark.parametrize("page", [1, 3, 8])
@pytest.mark.parametrize(("most", "kept"), [(1000, None), (5, None), (0, None), (1000, Kept(0, 3)), (1000, Kept(4, 9))])
def test_everyone_sees_their_own_text_whatever_was_away(page: int, most: int, kept: Kept | None):
    restored = preemptions = 0
    for seed in range(3):
        scheduler = work(page, seed, most, kept=kept)
        restored += scheduler.counters.restored_tokens
        preemptions += scheduler.counters.preemptions
        own = [key for key in scheduler.offload._root.after if len(key[0]) > 1]
        assert not own, "what was of one request only is gone with it"
    assert preemptions > 5
    assert restored > 50 or most == 0


def test_files_do_as_memory_does(tmp_path):
    assert work(3, 1, 0, Files(tmp_path, 10**7, "")).counters.restored_tokens > 50


def test_who_gave_way_computes_nothing_again():
    scheduler = make(12, 4, look_ahead=0, max_batch=2, offload=tiers(4))
    TieredDevice(scheduler, random.Random(0), 1000, None)
    running = add(scheduler, "a", 10)[0]
    scheduler.admit(2)
    scheduler.next_chunks(100)
    scheduler.publish(running)
    scheduler.preempt()
    assert scheduler.pages.free + scheduler.cache.cached == 12
    scheduler.admit(2)
    assert running.prefilled
    assert (running.table.tokens, scheduler.counters.restored_tokens) == (9, 1)
    assert scheduler.counters.computed_tokens == 9


# Faults of the kinds seen in public trackers. Each must be found.


def pages_are_free_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    cut, keep = RadixCache.evict, Offload.keep

    def evict(self: RadixCache, count: int) -> int:
        late: list[Leaving] = []
        self._keep = late.extend
        freed = cut(self, count)
        keep(world_of[self.allocator].offload, late)
        return freed

    patch.setattr(RadixCache, "evict", evict)


def copies_are_read_when_they_are_wanted(patch: pytest.MonkeyPatch) -> None:
    read = Copies.read_pages
    patch.setattr(Copies, "read_pages", lambda self, numbers: list(numbers))
    patch.setattr(
        Copies, "take_pages", lambda self, stored, count: [slots.reshape(-1).view("u1") for slots in read(self, stored)]
    )


def copies_come_in_another_order(patch: pytest.MonkeyPatch) -> None:
    take = Copies.take_pages
    patch.setattr(Copies, "take_pages", lambda self, stored, count: take(self, stored, count)[::-1])


def keys_do_without_what_goes_before(patch: pytest.MonkeyPatch) -> None:
    grow, find = Offload._grow, Offload._find
    patch.setattr(Offload, "_grow", lambda self, page, keys: grow(self, self._root, keys[-1:]) if keys else page)
    patch.setattr(Offload, "_find", lambda self, keys: find(self, ()))


def the_salt_is_ignored(patch: pytest.MonkeyPatch) -> None:
    keep, restore = Offload.keep, Offload.restore

    def bare(keys):
        return [("", *keys[0][1:]), *keys[1:]] if keys else []

    patch.setattr(Offload, "keep", lambda self, all_: keep(self, [one._replace(keys=bare(one.keys)) for one in all_]))
    patch.setattr(Offload, "restore", lambda self, keys, numbers: restore(self, bare(keys), numbers))


def a_failed_store_counts_as_kept(patch: pytest.MonkeyPatch) -> None:
    take = Copies.take_pages

    def taken(self: Copies, stored, count: int):
        try:
            return take(self, stored, count)
        except MemoryError:
            return [slots.reshape(-1).view("u1") * 0 for slots in stored]

    patch.setattr(Copies, "take_pages", taken)


def restored_pages_are_said_to_be_more(patch: pytest.MonkeyPatch) -> None:
    restore = Offload.restore

    def more(self: Offload, keys, numbers) -> int:
        found = restore(self, keys, numbers)
        return min(found + 1, len(numbers)) if found else 0

    patch.setattr(Offload, "restore", more)


def tiers_forget_without_need(patch: pytest.MonkeyPatch) -> None:
    put = Memory.put
    patch.setattr(Memory, "put", lambda self, key, block: [key] if len(self) % 3 == 2 else put(self, key, block))


FAULTS = [
    pages_are_free_before_they_are_read,
    copies_are_read_when_they_are_wanted,
    copies_come_in_another_order,
    keys_do_without_what_goes_before,
    the_salt_is_ignored,
    a_failed_store_counts_as_kept,
    restored_pages_are_said_to_be_more,
    tiers_forget_without_need,
]
world_of: dict = {}
"""By their allocators."""


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert offload.AT_ONCE > 1
    plant(monkeypatch)
    world = Tiered(12, 2, failing=0.2 if plant is a_failed_store_counts_as_kept else 0.0)
    monkeypatch.setitem(world_of, world.allocator, world)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        drive(world, seed=1)
