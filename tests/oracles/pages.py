"""Sequences that share, fork, publish, roll back and die on the host's books, beside a dense oracle of it all.

The oracle knows the text of each sequence and of each cached page, and a memory in which every slot holds what was
written there: token, position and a hash of all before it. Free pages are poisoned. `World.check` sees that each
sequence and each cached page reads back exactly its text, and that the books add up.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from jaxspec.errors import CapacityError
from jaxspec.host.blocks import PageAllocator, Pages, PageTable
from jaxspec.host.radix import RadixCache

Pick = Callable[[int], int]
"""Chooses a number below its argument."""

NAMESPACES = [("model", "a"), ("model", "b")]
MOST_SEQUENCES, LONGEST, FURTHEST = 6, 24, 9


def contents(namespace, text: list[int]) -> list[tuple[int, int, int]]:
    """What each slot of this text must hold."""
    seen, slots = hash(namespace), []
    for position, token in enumerate(text):
        seen = hash((seen, token))
        slots.append((token, position, seen))
    return slots


@dataclass
class Sequence:
    namespace: tuple[str, str]
    text: list[int]
    """Its prompt and what it generated; the first `tokens` of them are committed."""
    tokens: int
    table: PageTable
    drafted: list[int] = field(default_factory=list)
    """Everything it last wrote, rejected drafts included."""


class World:
    """The books under test, the simulated memory and the oracle. Operations take a `Pick` for all their choices."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.now, self.size = 0.0, page_size
        self.allocator = PageAllocator(num_pages)
        self.pages = Pages(self.allocator, page_size)
        self.cache = RadixCache(self.allocator, page_size)
        self.memory: list[list] = [[None] * page_size for _ in range(num_pages)]
        self.sequences: list[Sequence] = []
        self.waiting: list[tuple] = []
        self.done: Counter[str] = Counter()
        """Operations so far, by outcome; those that found nothing to do are not counted."""
        self.seen: Counter[str] = Counter()
        """What else happened on the way."""
        self.kept: dict[tuple, int] = {}
        """The page of each cached prefix, by (namespace, all tokens up to its end)."""
        self.pins: dict[tuple, float] = {}

    # Operations: what a scheduler does.

    def admit(self, pick: Pick) -> None:
        """A new text, or one that was preempted, starts on what is cached of it."""
        if len(self.sequences) == MOST_SEQUENCES:
            return
        if self.waiting and pick(2):
            namespace, text = self.waiting.pop(pick(len(self.waiting)))
        else:
            namespace, text = self._text(pick)
        pages = self.cache.match(text, namespace)
        assert pages == self._cached(namespace, text[:-1])
        tokens = len(pages) * self.size
        self.sequences.append(Sequence(namespace, text, tokens, PageTable(pages, tokens)))
        self.done["hit" if pages else "miss"] += 1

    def prefill(self, pick: Pick) -> None:
        """The next chunk of what a sequence has not computed yet; where there is no page for it, someone must go."""
        if (sequence := self._any(pick)) and sequence.tokens < len(sequence.text):
            end = min(sequence.tokens + 1 + pick(FURTHEST), len(sequence.text))
            if not self._reserve(sequence, end):
                self.preempt(pick)
                return
            self._write(sequence, sequence.text[:end])
            self._commit(sequence, end)
            self.done["prefill"] += 1

    def decode(self, pick: Pick) -> None:
        """A round: drafts are written behind the text, some are accepted, the surplus is kept or given back."""
        sequence = self._any(pick)
        if not sequence or sequence.tokens < len(sequence.text) or sequence.tokens >= LONGEST:
            return
        drafts = [pick(2) for _ in range(1 + pick(FURTHEST))]
        if not self._reserve(sequence, sequence.tokens + len(drafts)):
            self.preempt(pick)
            return
        self._write(sequence, sequence.text + drafts)
        sequence.text = sequence.text + drafts[: pick(len(drafts) + 1)]
        self._commit(sequence, len(sequence.text))
        if pick(2):
            self.pages.trim(sequence.table)
        self.done["decode"] += 1

    def look_ahead(self, pick: Pick) -> None:
        """Pages for several rounds."""
        if (sequence := self._any(pick)) and self._reserve(sequence, sequence.tokens + 1 + pick(2 * FURTHEST)):
            self.done["look-ahead"] += 1

    def trim(self, pick: Pick) -> None:
        if sequence := self._any(pick):
            self.pages.trim(sequence.table)
            assert len(sequence.table.pages) == math.ceil(sequence.tokens / self.size)
            self.done["trim"] += 1

    def rollback(self, pick: Pick) -> None:
        """Allowed exactly where no page that someone else holds would be written again."""
        if (sequence := self._any(pick)) and sequence.tokens:
            tokens = pick(sequence.tokens)
            pages = sequence.table.pages[tokens // self.size : math.ceil(sequence.tokens / self.size)]
            if any(self._holders()[page] > 1 for page in pages):
                with pytest.raises(ValueError, match="shared page"):
                    self.pages.commit(sequence.table, tokens)
                self.done["rollback refused"] += 1
            else:
                self._commit(sequence, tokens)
                self.done["rollback"] += 1

    def fork(self, pick: Pick) -> None:
        if len(self.sequences) < MOST_SEQUENCES and (parent := self._any(pick)):
            if parent.tokens % self.size and not self.allocator.free:
                with pytest.raises(CapacityError):
                    self.pages.fork(parent.table)
                self.done["fork refused"] += 1
                return
            table, copy = self.pages.fork(parent.table)
            if copy:
                self.memory[copy.target][: copy.slots] = self.memory[copy.source][: copy.slots]
            self.sequences.append(Sequence(parent.namespace, list(parent.text), parent.tokens, table))
            self.done["fork with a copy" if copy else "fork"] += 1

    def publish(self, pick: Pick) -> None:
        """Of a sequence that goes on running."""
        if sequence := self._any(pick):
            self._publish(sequence)
            self.done["publish"] += 1

    def finish(self, pick: Pick) -> None:
        if sequence := self._any(pick):
            self._publish(sequence)
            self._leave(sequence)
            self.done["finish"] += 1

    def preempt(self, pick: Pick) -> None:
        """Its pages go, its text waits; what it had computed may stay in the cache."""
        if sequence := self._any(pick):
            if pick(2):
                self._publish(sequence)
            self._leave(sequence)
            self.waiting = [*self.waiting[-3:], (sequence.namespace, sequence.text)]
            self.done["preempt"] += 1

    def evict(self, pick: Pick) -> None:
        self._evict(1 + pick(6))
        self.done["evict"] += 1

    def match(self, pick: Pick) -> None:
        """A look that takes nothing."""
        namespace, text = self._text(pick)
        pages = self.cache.match(text, namespace)
        assert pages == self._cached(namespace, text[:-1])
        self.allocator.release(pages)
        self.done["match"] += 1

    def pin(self, pick: Pick) -> None:
        """For a time, and often with little room."""
        namespace, text = self._text(pick)
        until, room = self.now + 1 + pick(8), [0, 1, LONGEST][pick(3)]
        held = max(
            (_common(text, pinned) // self.size for name, pinned in self._pinned() if name == namespace), default=0
        )
        assert self.cache.unpinned(text, namespace) == len(text) // self.size - held
        found = min(len(self._cached(namespace, text)), held + room) * self.size
        assert self.cache.pin(text, namespace, until, room) == found
        if found:
            key = (namespace, tuple(text[:found]))
            self.pins[key] = max(self.pins.get(key, 0.0), until)
        self.done["pin" if found else "pin nothing"] += 1

    def unpin(self, pick: Pick) -> None:
        namespace, text = self._text(pick)
        length = self.cache.unpin(text, namespace)
        on_the_way = [key for key in self._pinned() if key[0] == namespace and key[1] == tuple(text[: len(key[1])])]
        assert length == max((len(pinned) for _, pinned in on_the_way), default=0)
        if on_the_way:
            del self.pins[max(on_the_way, key=lambda key: len(key[1]))]
        self.done["unpin" if on_the_way else "unpin nothing"] += 1

    def wait(self, pick: Pick) -> None:
        self.now += pick(5)
        self.cache.expire(self.now)
        self.done["wait"] += 1

    def clear(self, pick: Pick) -> None:
        """New weights: rare, or nothing would ever be cached."""
        if pick(8) == 7:
            namespace = [*NAMESPACES, None][pick(3)]
            self.cache.clear(namespace)
            self.kept = {key: page for key, page in self.kept.items() if namespace not in {None, key[0]}}
            self.pins = {key: until for key, until in self.pins.items() if namespace not in {None, key[0]}}
            self.done["clear"] += 1

    # What they are made of.

    def _text(self, pick: Pick) -> tuple[tuple[str, str], list[int]]:
        """Two letters and few beginnings, or what a sequence has, so that texts often agree for a while."""
        if (sequence := self._any(pick)) and pick(2):
            return sequence.namespace, sequence.text[: 1 + pick(len(sequence.text))]
        start = [[0] * LONGEST, [1] * LONGEST, [0, 0, 1] * LONGEST][pick(3)][: pick(LONGEST // 2)]
        return NAMESPACES[pick(2)], start + [pick(2) for _ in range(1 + pick(4))]

    def _any(self, pick: Pick) -> Sequence | None:
        return self.sequences[pick(len(self.sequences))] if self.sequences else None

    def _reserve(self, sequence: Sequence, slots: int) -> bool:
        """Pages for these slots, evicting where needed. Where that is not enough: refused, with nothing changed."""
        missing = max(math.ceil(slots / self.size) - len(sequence.table.pages), 0)
        self._evict(missing - self.allocator.free)
        if missing <= self.allocator.free:
            assert len(self.pages.reserve(sequence.table, slots)) == missing
            return True
        before = list(sequence.table.pages)
        with pytest.raises(CapacityError, match=f"{missing} pages wanted, {self.allocator.free} of"):
            self.pages.reserve(sequence.table, slots)
        assert sequence.table.pages == before
        self.done["reserve refused"] += 1
        return False

    def _write(self, sequence: Sequence, text: list[int]) -> None:
        """All slots of this text behind the committed ones, each in a page that no one else holds."""
        holders, slots = self._holders(), contents(sequence.namespace, text)
        for at in range(sequence.tokens, len(text)):
            page = sequence.table.pages[at // self.size]
            assert holders[page] == 1, f"page {page} is written while {holders[page]} hold it"
            self.memory[page][at % self.size] = slots[at]
        sequence.drafted = text

    def _commit(self, sequence: Sequence, tokens: int) -> None:
        self.pages.commit(sequence.table, tokens)
        sequence.tokens = tokens

    def verified(self, sequence: Sequence) -> list[int]:
        """What of a sequence may be published."""
        return sequence.text[: sequence.tokens]

    def _publish(self, sequence: Sequence) -> None:
        text = self.verified(sequence)
        new = self.cache.insert(text, sequence.table.pages, sequence.namespace)
        before = len(self.kept)
        for index, end in enumerate(range(self.size, len(text) + 1, self.size)):
            page = sequence.table.pages[index]
            if self.kept.setdefault((sequence.namespace, tuple(text[:end])), page) != page:
                self.seen["duplicate left out"] += 1
        assert len(self.kept) - before == new

    def _leave(self, sequence: Sequence) -> None:
        alone = [page for page in sequence.table.pages if self._holders()[page] == 1]
        assert sorted(self.pages.release(sequence.table)) == sorted(alone)
        self.sequences.remove(sequence)

    def _evict(self, count: int) -> None:
        """As many as asked for, or all that can go."""
        may_go = self._evictable()
        freed = self.cache.evict(count)
        gone = {key for key, page in self.kept.items() if not self.allocator.references(page)}
        assert gone <= may_go
        assert freed == len(gone) == min(max(count, 0), len(may_go))
        for key in gone:
            del self.kept[key]
        self.seen["page evicted"] += freed

    # The oracle's own view.

    def _cached(self, namespace, text: list[int]) -> list[int]:
        pages = []
        for end in range(self.size, len(text) + 1, self.size):
            if (namespace, tuple(text[:end])) not in self.kept:
                break
            pages.append(self.kept[namespace, tuple(text[:end])])
        return pages

    def _holders(self) -> Counter:
        held = Counter(page for sequence in self.sequences for page in sequence.table.pages)
        held.update(self.kept.values())
        return held

    def _pinned(self) -> list[tuple]:
        return [key for key, until in self.pins.items() if self.now < until]

    def _beginnings(self, prefixes: list[tuple]) -> set[tuple]:
        """All whole-page beginnings of these, themselves included."""
        return {(name, text[:end]) for name, text in prefixes for end in range(self.size, len(text) + 1, self.size)}

    def _evictable(self) -> set[tuple]:
        """Cached prefixes that no sequence holds, that are not pinned, and that no such prefix begins with."""
        users = {page for sequence in self.sequences for page in sequence.table.pages}
        return self.kept.keys() - self._beginnings(
            [k for k, page in self.kept.items() if page in users] + self._pinned()
        )

    def check(self) -> None:
        """Everything that must be so after any operation."""
        holders = self._holders()
        total = self.allocator.num_pages
        assert self.allocator._references == dict(holders)
        used = holders.keys() - self.kept.values()
        assert self.cache.cached == len(set(self.kept.values())) == len(self.kept)
        assert self.allocator.free + len(used) + self.cache.cached == total
        assert self.cache.evictable == len(self._evictable())
        assert self.cache.pinned == len(self._beginnings(self._pinned()))
        for page in range(total):
            if not holders[page]:
                self.memory[page] = ["poison"] * self.size
        for (namespace, text), page in self.kept.items():
            assert len(text) == self.size or (namespace, text[: -self.size]) in self.kept
            assert self.memory[page] == contents(namespace, list(text))[-self.size :]
        for sequence in self.sequences:
            self._check_sequence(sequence, holders)

    def _check_sequence(self, sequence: Sequence, holders: Counter) -> None:
        table = sequence.table
        assert table.tokens == sequence.tokens
        assert len(set(table.pages)) == len(table.pages)
        slots = [slot for page in table.pages for slot in self.memory[page]]
        assert slots[: table.tokens] == contents(sequence.namespace, sequence.text[: sequence.tokens])
        assert all(holders[page] == 1 for page in table.pages[table.tokens // self.size :])
        partial, look_ahead = self.pages.waste(table)
        assert (table.tokens + partial) % self.size == look_ahead % self.size == 0
        assert 0 <= partial < self.size
        assert partial + look_ahead == len(slots) - table.tokens


def _common(first, second) -> int:
    """How many tokens two texts share at their beginnings."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


_OFTEN = [World.admit, World.prefill, World.decode]
_SOMETIMES = [World.look_ahead, World.rollback, World.fork, World.publish, World.match, World.pin]
_SELDOM = [World.trim, World.finish, World.preempt, World.evict, World.unpin, World.wait, World.clear]
OPERATIONS = 4 * _OFTEN + 2 * _SOMETIMES + _SELDOM
