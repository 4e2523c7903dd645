"""Pages that had to leave the device, until someone needs them again: in host memory, then in files.

A page's key is all text up to its end, exactly, as in the prefix cache. Its copy begins before the page can be
another's: devices do what they are told in order. Nobody is given a copy before it is whole, nor one that has changed
since.
"""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxspec.host.radix import Key, Leaving, page_keys
from jaxspec.host.tiers import Block, Files, Memory, Text

log = logging.getLogger(__name__)
AT_ONCE = 8
"""Pages that are copied at once at most."""
MOST_FLIGHTS = 8
"""Copies that are under way at most: each takes room on the device."""


@runtime_checkable
class Device(Protocol):
    """What holds the pages: see `jaxspec.worker.Worker`."""

    def read_pages(self, pages: Sequence[int]) -> Any: ...
    def is_read(self, stored: Any) -> bool: ...
    def take_pages(self, stored: Any, count: int) -> list[np.ndarray]: ...
    def write_pages(self, pages: Sequence[int], blocks: Sequence[np.ndarray]) -> None: ...


@dataclass(eq=False)
class _Page:
    """A page of a text by its place in the tree of all texts, whether it is kept or only some after it."""

    before: "_Page | None" = None
    key: Key = ()
    after: dict[Key, "_Page"] = field(default_factory=dict)
    flight: "_Flight | None" = None
    """What copies it now."""
    file: str | None = None
    lasting: bool = True
    """Whether a restart may find it."""

    @property
    def text(self) -> Text:
        keys, page = [], self
        while page.before is not None:
            keys.append(page.key)
            page = page.before
        (namespace, *first), *rest = reversed(keys)
        return Text(namespace, [*first, *chain.from_iterable(rest)])


@dataclass(eq=False)
class _Flight:
    """A copy that was begun."""

    stored: Any
    pages: list[_Page]


_COMING = _Flight(None, [])
"""Of a page whose copy is about to begin."""


class Offload:
    """Keeps the pages that the prefix cache gives up. `page_size` is in tokens."""

    def __init__(self, device: Device, page_size: int, memory: Memory, files: Files | None = None) -> None:
        self.device, self.page_size, self.memory, self.files = device, page_size, memory, files
        self.stored = self.restored = self.lost = 0
        self._root = _Page()
        self._flights: list[_Flight] = []
        self._named: dict[str, _Page] = {}
        """By the names of their files."""
        for name, (namespace, tokens) in (files.load() if files is not None else {}).items():
            self._name(self._grow(self._root, page_keys(tokens, len(tokens), namespace, page_size)), name)

    def keep(self, leaving: Sequence[Leaving]) -> None:
        """Begin to copy pages that are not kept yet; they may be written to from then on."""
        wanted: list[tuple[_Page, int]] = []
        for keys, numbers, lasting in leaving:
            first = len(keys) - len(numbers)
            page, found = self._grow(self._root, keys[:first]), []
            for key, number in zip(keys[first:], numbers, strict=True):
                page = self._grow(page, [key])
                if not self._has(page):
                    page.flight, page.lasting = _COMING, lasting
                    found.append((page, number))
            wanted += reversed(found)  # beginnings are the last to go
        for at in range(0, len(wanted), AT_ONCE):
            self._begin(wanted[at : at + AT_ONCE])

    def restore(self, keys: list[Key], numbers: Sequence[int]) -> int:
        """Fill pages of the device, those of the last keys, with what is kept; returns how many, from the first on."""
        page = self._find(keys[: len(keys) - len(numbers)])
        used: list[_Page] = []
        blocks: list[np.ndarray] = []
        for key in keys[len(keys) - len(numbers) :]:
            page = page.after.get(key) if page else None
            block = self._block(page) if page else None
            if page is None or block is None:
                break
            used.append(page)
            blocks.append(block.data)
            if len(blocks) == AT_ONCE:
                self.device.write_pages(numbers[len(used) - AT_ONCE : len(used)], blocks)
                blocks = []
        if blocks:
            self.device.write_pages(numbers[len(used) - len(blocks) : len(used)], blocks)
        for page in reversed(used):  # ends are the first to go
            self.memory.get(page)
            if self.files is not None and page.file is not None:
                self.files.touch(page.file)
        self.restored += len(used)
        return len(used)

    def discard(self, keys: Sequence[Key]) -> None:
        """Forget all pages on the way of these keys."""
        page = self._root
        for key in keys:
            if key not in page.after:
                break
            page = page.after[key]
            if page.flight is not None:
                self._land(page.flight)
            self.memory.drop(page)
            if self.files is not None and page.file is not None:
                self.files.drop(page.file)
        self._forget_files()
        self._prune(page)

    def settle(self) -> None:
        """Take what has been copied since, without waiting."""
        while self._flights and self.device.is_read(self._flights[0].stored):
            self._land(self._flights[0])
        self._forget_files()

    def flush(self) -> None:
        """Wait until all copies are whole and all files written."""
        while self._flights:
            self._land(self._flights[0])
        if self.files is not None:
            self.files.flush()
        self._forget_files()

    def clear(self) -> None:
        """Forget everything."""
        pages = list(self._root.after.values())
        while pages:
            page = pages.pop()
            pages += page.after.values()
            self.memory.drop(page)
            if self.files is not None and page.file is not None:
                self.files.drop(page.file)
        self._root, self._flights = _Page(), []
        self._forget_files()

    def figures(self) -> dict[str, int]:
        """Pages so far that were stored, restored, and lost, which had to be computed again; and what is kept now."""
        kept = {"memory_pages": len(self.memory), "memory_bytes": self.memory.used}
        if self.files is not None:
            kept |= {"disk_pages": len(self.files), "disk_bytes": self.files.used}
            lost = self.lost + self.files.failed + self.files.damaged
        else:
            lost = self.lost
        return {"stored_pages": self.stored, "restored_pages": self.restored, "lost_pages": lost} | kept

    def _begin(self, wanted: list[tuple[_Page, int]]) -> None:
        pages = [page for page, _ in wanted]
        try:
            flight = _Flight(self.device.read_pages([number for _, number in wanted]), pages)
        except (MemoryError, RuntimeError) as error:
            self._lose(pages, error)
            return
        self._flights.append(flight)
        for page in pages:
            page.flight = flight
        if len(self._flights) > MOST_FLIGHTS:
            self._land(self._flights[0])

    def _land(self, flight: _Flight) -> None:
        """Wait for a copy and put it away."""
        self._flights.remove(flight)
        try:
            found = self.device.take_pages(flight.stored, len(flight.pages))
        except (MemoryError, RuntimeError) as error:
            self._lose(flight.pages, error)
            return
        self.stored += len(found)
        for page, data in zip(flight.pages, found, strict=True):
            page.flight = None
            block = Block.of(data)
            if self.files is not None and (name := self.files.put(page.text, block, page.lasting)):
                self._name(page, name)
            self._remember(page, block)
        self._forget_files()

    def _lose(self, pages: list[_Page], error: Exception) -> None:
        if not self.lost:
            log.warning("offload: pages could not be copied from the device: %s", error)
        self.lost += len(pages)
        for page in pages:
            page.flight = None
            self._prune(page)

    def _block(self, page: _Page) -> Block | None:
        if page.flight is not None:
            self._land(page.flight)
        block = self.memory.get(page)
        if block is not None and not block.sound:
            log.warning("offload: a page has changed in memory: is that memory sound?")
            self.lost += 1
            self.memory.drop(page)
            block = None
        if block is None and self.files is not None and page.file is not None:
            block = self.files.get(page.file, page.text)
            if block is not None:
                self._remember(page, block)
        if block is None:
            self._forget_files()
            self._prune(page)
        return block

    def _remember(self, page: _Page, block: Block) -> None:
        for gone in self.memory.put(page, block):
            self._prune(gone)

    def _name(self, page: _Page, name: str) -> None:
        page.file = name
        self._named[name] = page

    def _forget_files(self) -> None:
        for name in self.files.settle() if self.files is not None else ():
            if (page := self._named.pop(name, None)) is not None:
                page.file = None
                self._prune(page)

    def _has(self, page: _Page) -> bool:
        return page.flight is not None or page in self.memory or page.file is not None

    def _find(self, keys: Sequence[Key]) -> _Page | None:
        page: _Page | None = self._root
        for key in keys:
            page = page.after.get(key) if page else None
        return page

    def _grow(self, page: _Page, keys: Sequence[Key]) -> _Page:
        """The page of these keys after that one, made where there is none."""
        for key in keys:
            page = page.after.setdefault(key, _Page(page, key))
        return page

    def _prune(self, page: _Page | Hashable) -> None:
        """Forget a page that is nowhere kept, and those before it that only led there."""
        while isinstance(page, _Page) and page.before is not None and not page.after and not self._has(page):
            page.before.after.pop(page.key, None)
            page = page.before
