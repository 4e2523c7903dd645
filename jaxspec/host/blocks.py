"""Fixed pages with reference counts, and the page tables of sequences (PagedAttention, Kwon et al. 2023).

The host's books only: what lies in a page is the device's affair. A page may be written by a sequence that alone holds
it; pages with more than one reference are whole and final.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.errors import CapacityError


class PageAllocator:
    """Hands out page numbers and counts who holds them; every operation costs O(pages asked for)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many hold this page; 0 where it is free."""
        return self._references.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. CapacityError when there are not so many."""
        if count > self.free:
            raise CapacityError(f"{count} pages wanted, {self.free} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference on each page. ValueError, and nothing changed, when nobody holds one of them."""
        for page in pages:
            if page not in self._references:
                raise ValueError(f"page {page} is free: it cannot be shared")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """One reference less on each page; returns the pages that are free now.

        ValueError, and nothing changed, when a page would lose more references than it has.
        """
        for done, page in enumerate(pages):
            if not self._references.get(page):
                for taken in pages[:done]:
                    self._references[taken] += 1
                raise ValueError(f"page {page} released once too often")
            self._references[page] -= 1
        freed = [page for page in dict.fromkeys(pages) if not self._references[page]]
        for page in freed:
            del self._references[page]
        self._free.extend(freed)
        return freed


class Kept(NamedTuple):
    """What of a text must stay while it goes on, in tokens."""

    first: int
    """At its beginning."""
    last: int
    """Before the next one to be written."""


class Budget(NamedTuple):
    """What of a text stays where scores decide which of its tokens do (H2O, Zhang et al., 2023)."""

    tokens: int
    """That stay."""
    limit: int
    """Slots that a text must have for all others to go."""
    pages: int
    """That are its own once it goes on so: they do for `limit` slots and the drafts of a round."""
    votes: int
    """Last tokens of a prompt before the root that must be computed, found or not: they score what is before them."""


@dataclass
class PageTable:
    """The pages of one sequence, in order: slot i lies in `pages[i // page_size]`.

    A sequence that starts on a cached prefix starts with its pages: `PageTable(pages, len(pages) * page_size)`.
    """

    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    """Committed ones. Pages beyond those that they need are look-ahead."""
    dropped: int = 0
    """Slots that were given back from the middle: those behind moved up, so that later tokens have slots that many
    before their place in the text. They are those of whole pages, but where scores decide what stays."""

    @property
    def slots(self) -> int:
        """Committed slots."""
        return self.tokens - self.dropped


class Copy(NamedTuple):
    """The device copies the first `slots` slots of a page before anything else writes either of the two."""

    source: int
    target: int
    slots: int


class Waste(NamedTuple):
    """Slots that are reserved and hold no committed token."""

    partial: int
    """In the last page that the committed tokens need: at most page_size - 1."""
    look_ahead: int
    """In the pages beyond."""


class Pages:
    """What can be done to page tables over one allocator. `page_size` is in slots; `kept` None keeps all."""

    def __init__(self, allocator: PageAllocator, page_size: int, kept: Kept | None = None) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.kept = kept

    def count(self, tokens: int) -> int:
        """Pages that `tokens` slots need."""
        return -(-tokens // self.page_size)

    def reserve(self, table: PageTable, tokens: int) -> list[int]:
        """See that the first `tokens` tokens have slots; returns the pages added.

        CapacityError, and nothing changed, when there are not enough.
        """
        added = self.allocator.allocate(max(self.count(tokens - table.dropped) - len(table.pages), 0))
        table.pages += added
        return added

    def commit(self, table: PageTable, tokens: int) -> None:
        """Set the number of committed tokens; a smaller one is a rollback.

        ValueError, and nothing changed, for slots without a page, and for a rollback into a page that someone else
        holds too: the next write would change it under the other's feet.
        """
        slots = tokens - table.dropped
        if not 0 <= slots <= len(table.pages) * self.page_size:
            raise ValueError(f"{slots} slots committed, {len(table.pages)} pages of {self.page_size} reserved")
        reopened = table.pages[slots // self.page_size : self.count(table.slots)] if slots < table.slots else []
        if any(self.allocator.references(page) > 1 for page in reopened):
            raise ValueError(f"rollback from {table.slots} to {slots} slots goes into a shared page")
        table.tokens = tokens

    def trim(self, table: PageTable) -> list[int]:
        """Give back the look-ahead pages; returns those that are free now."""
        needed = self.count(table.slots)
        surplus = table.pages[needed:]
        del table.pages[needed:]
        return self.allocator.release(surplus[::-1])

    def drop(self, table: PageTable) -> list[int]:
        """Give back the pages in the middle that need not stay; returns those that are free now."""
        first, gone = self.first, (self.droppable(table.tokens) - table.dropped) // self.page_size
        pages = table.pages[first : first + gone] if gone > 0 else []
        del table.pages[first : first + len(pages)]
        table.dropped += len(pages) * self.page_size
        return self.allocator.release(pages[::-1])

    @property
    def first(self) -> int:
        """Pages at the beginning of a text that always stay."""
        return 0 if self.kept is None else self.count(self.kept.first)

    def droppable(self, tokens: int) -> int:
        """Slots in the middle of a text of so many tokens that need not stay: those of whole pages."""
        if self.kept is None:
            return 0
        whole = (tokens - self.kept.last) // self.page_size
        return max(whole - self.first, 0) * self.page_size

    def condense(self, table: PageTable, budget: Budget) -> list[int]:
        """Give back all but the last pages, where the tokens that stay are now; returns those that are free."""
        gone = table.pages[: -budget.pages]
        del table.pages[: len(gone)]
        table.dropped = table.tokens - budget.tokens
        return self.allocator.release(gone[::-1])

    def pages_of_text(self, table: PageTable) -> list[int | None]:
        """The pages of a text from its beginning on, None where they were given back."""
        gone: list[int | None] = [None] * (table.dropped // self.page_size)
        return [*table.pages[: self.first], *gone, *table.pages[self.first :]]

    def fork(self, table: PageTable) -> tuple[PageTable, Copy | None]:
        """A second sequence with the same committed slots: whole pages are shared, a partial last one is copied.

        The table stays the owner of the copy's source: it must not be released or rolled back before the copy is
        done. CapacityError, and nothing changed, when there is no page for the copy.
        """
        whole, slots = divmod(table.slots, self.page_size)
        own = self.allocator.allocate(1 if slots else 0)
        self.allocator.share(table.pages[:whole])
        copy = Copy(table.pages[whole], own[0], slots) if slots else None
        return PageTable(table.pages[:whole] + own, table.tokens, table.dropped), copy

    def release(self, table: PageTable) -> list[int]:
        """Give everything back, last page first, and empty the table; returns the pages that are free now."""
        pages, table.pages, table.tokens, table.dropped = table.pages, [], 0, 0
        return self.allocator.release(pages[::-1])

    def waste(self, table: PageTable) -> Waste:
        """The exact count for one table. Summed over tables it stays exact: a page that two of them share is full."""
        needed = self.count(table.slots)
        partial = needed * self.page_size - table.slots
        return Waste(partial, (len(table.pages) - needed) * self.page_size)
