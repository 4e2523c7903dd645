"""Law 5 on the host's books: no page leaks, none is freed twice, none is written while another holds it."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxspec.host.blocks import PageAllocator, Pages, PageTable
from jaxspec.host.radix import RadixCache, _Node
from tests.oracles.pages import OPERATIONS, Pick, World

POOLS = [(12, 1), (40, 1), (12, 2), (32, 2), (10, 3), (8, 4), (20, 4), (10, 8)]
"""(pages, slots a page)."""
EACH = 6_250
"""Operations a pool, those with nothing to do not counted: 50,000 in all."""
COMMON = {"hit", "miss", "prefill", "decode", "look-ahead", "trim", "rollback", "rollback refused", "reserve refused"}
COMMON |= {"fork", "publish", "finish", "preempt", "evict", "match", "pin", "unpin", "wait", "clear"}


def drive(world: World, seed: int, operations: int) -> None:
    """Random operations, each checked; then everybody leaves and the cache is cleared."""
    rng = random.Random(seed)
    while world.done.total() < operations:
        rng.choice(OPERATIONS)(world, rng.randrange)
        world.check()
    while world.sequences:
        world.preempt(lambda below: 0)
    world.cache.clear()
    assert world.allocator.free == world.allocator.num_pages


@pytest.mark.parametrize(("num_pages", "page_size"), POOLS)
def test_the_books_agree_with_the_oracle(num_pages: int, page_size: int) -> None:
    world = World(num_pages, page_size)
    drive(world, seed=100 * num_pages + page_size, operations=EACH)
    copies = {"fork with a copy", "fork refused"} if page_size > 1 else set()
    assert world.done.keys() == COMMON | copies | {"pin nothing", "unpin nothing"}
    assert world.seen["page evicted"] > 100
    assert world.seen["duplicate left out"] > 0


class Machine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which finds a short way to a failure."""

    @initialize(num_pages=st.integers(1, 16), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.world = World(num_pages, page_size)

    @rule(operation=st.sampled_from(OPERATIONS), data=st.data())
    def step(self, operation: Callable[[World, Pick], None], data: st.DataObject) -> None:
        operation(self.world, lambda below: data.draw(st.integers(0, below - 1)))

    @invariant()
    def books_agree(self) -> None:
        self.world.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)


# Faults of the kinds seen in public trackers. Each must be found.


def release_forgets_a_page(patch: pytest.MonkeyPatch) -> None:
    real = PageAllocator.release
    patch.setattr(PageAllocator, "release", lambda self, pages: real(self, pages[1:]))


def trim_forgets_the_rejected(patch: pytest.MonkeyPatch) -> None:
    def trim(self: Pages, table: PageTable) -> list[int]:
        del table.pages[self.count(table.tokens) :]
        return []

    patch.setattr(Pages, "trim", trim)


def fork_shares_the_partial_page(patch: pytest.MonkeyPatch) -> None:
    def fork(self: Pages, table: PageTable) -> tuple[PageTable, None]:
        pages = table.pages[: self.count(table.tokens)]
        self.allocator.share(pages)
        return PageTable(pages, table.tokens), None

    patch.setattr(Pages, "fork", fork)


def fork_copies_a_slot_too_few(patch: pytest.MonkeyPatch) -> None:
    real = Pages.fork

    def fork(self: Pages, table: PageTable):
        child, copy = real(self, table)
        return child, copy and copy._replace(slots=copy.slots - 1)

    patch.setattr(Pages, "fork", fork)


def drafts_are_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "verified", lambda self, sequence: max(sequence.drafted, sequence.text, key=len))


def uncomputed_prompt_is_published(patch: pytest.MonkeyPatch) -> None:
    def verified(self: World, sequence) -> list[int]:
        return sequence.text[: len(sequence.table.pages) * self.size]

    patch.setattr(World, "verified", verified)


def match_takes_no_reference(patch: pytest.MonkeyPatch) -> None:
    real = RadixCache.match

    def match(self: RadixCache, tokens, namespace) -> list[int]:
        pages = real(self, tokens, namespace)
        self.allocator.release(pages)
        return pages

    patch.setattr(RadixCache, "match", match)


def match_ignores_the_namespace(patch: pytest.MonkeyPatch) -> None:
    real = RadixCache._keys
    patch.setattr(RadixCache, "_keys", lambda self, tokens, limit, namespace: real(self, tokens, limit, "one"))


def keys_are_lossy(patch: pytest.MonkeyPatch) -> None:
    real = RadixCache._keys

    def keys(self: RadixCache, tokens, limit, namespace):
        return real(self, [0, *tokens[1:]], limit, namespace) if tokens else []

    patch.setattr(RadixCache, "_keys", keys)


def duplicates_replace_the_tree(patch: pytest.MonkeyPatch) -> None:
    real = RadixCache.insert

    def insert(self: RadixCache, tokens, pages, namespace) -> int:
        new = real(self, tokens, pages, namespace)
        node, inside, _ = self._find(self._keys(tokens, len(tokens), namespace))
        if node.parent is self._root:
            node.pages[:inside] = pages[:inside]
        return new

    patch.setattr(RadixCache, "insert", insert)


def eviction_ignores_who_holds_a_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixCache, "_surplus", lambda self: [(node, 0) for node in self._order if node not in self._pins])


def eviction_leaves_orphans(patch: pytest.MonkeyPatch) -> None:
    real = RadixCache._surplus

    def surplus(self: RadixCache):
        return sorted(real(self), key=lambda item: item[0].parent is not self._root)

    patch.setattr(RadixCache, "_surplus", surplus)


def a_split_loses_the_pin(patch: pytest.MonkeyPatch) -> None:
    real = RadixCache._split

    def split(self: RadixCache, node: _Node, at: int) -> _Node:
        upper = real(self, node, at)
        if upper is not node and node in self._pins:
            self._pins[upper] = self._pins.pop(node)
        return upper

    patch.setattr(RadixCache, "_split", split)


def pins_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixCache, "expire", lambda self, now: None)


def what_others_pin_takes_room_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixCache, "_pinned_of", lambda self, keys: 0)


def rollback_reopens_shared_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pages, "commit", lambda self, table, tokens: setattr(table, "tokens", tokens))


FAULTS = [
    release_forgets_a_page,
    trim_forgets_the_rejected,
    fork_shares_the_partial_page,
    fork_copies_a_slot_too_few,
    drafts_are_published,
    uncomputed_prompt_is_published,
    match_takes_no_reference,
    match_ignores_the_namespace,
    keys_are_lossy,
    duplicates_replace_the_tree,
    eviction_ignores_who_holds_a_page,
    eviction_leaves_orphans,
    a_split_loses_the_pin,
    pins_never_end,
    what_others_pin_takes_room_again,
    rollback_reopens_shared_pages,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        drive(World(32, 2), seed=1, operations=EACH)
