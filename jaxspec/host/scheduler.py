"""Who runs: requests wait in line for a row of the batch and for pages, and give way when pages run out.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023) over shared pages. The
first in line is never overtaken, save by who fits in while a fork waits for its parent's prompt; the last in line gives
way. So whoever came first always gets on.
"""

import sys
from bisect import insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import CapacityError
from jaxspec.host.blocks import Budget, Copy, Kept, PageAllocator, Pages, PageTable, Waste
from jaxspec.host.offload import Offload
from jaxspec.host.output import Transcript
from jaxspec.host.pins import Pins
from jaxspec.host.radix import RadixCache
from jaxspec.host.request import Sample
from jaxspec.host.restoring import Tiers
from jaxspec.host.running import Admission, Chunk, Running


@dataclass
class Counters:
    """What happened since the engine was made."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were found in the prefix cache, came with a fork, or were restored."""
    restored_tokens: int = 0
    """Tokens whose pages came back from host memory or disk."""
    computed_tokens: int = 0
    """Tokens written by prefill; more than the rest of the prompts where some gave way and came back."""
    preemptions: int = 0
    peak_running: int = 0


class Scheduler:
    """The line, the rows of the batch, and the pages.

    `look_ahead` are the slots that drafts take beyond the root, `max_emitted` the tokens of a round at most. Pins leave
    room for a request of `max_context` tokens; None is for no pins. Without `publish_output` the prefix cache keeps
    prompts only, without `share_partial` the samples of a prompt share whole pages only. Of a text what is not `kept`
    goes back while it grows, and it never has more than `table_width` pages: enough for those and what a call writes.
    With a `budget` a text is condensed where it has grown too long, in pages that it has from the beginning on: what is
    gone by then cannot be computed again, so no request may ever have to give way.
    `offload` keeps the pages that the prefix cache gives up.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        look_ahead: int,
        max_emitted: int,
        max_batch: int,
        max_context: int | None = None,
        prefix_cache: bool = True,
        publish_output: bool = True,
        share_partial: bool = True,
        kept: Kept | None = None,
        budget: Budget | None = None,
        table_width: int | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.pages = PageAllocator(num_pages)
        self.tables = Pages(self.pages, page_size, kept)
        self.offload, self.tiers = offload, offload and Tiers(offload, self.tables)
        self.cache = RadixCache(self.pages, page_size, offload and offload.keep) if prefix_cache else None
        self.table_width = table_width or sys.maxsize
        self.budget = budget
        largest = num_pages if max_context is None else self.tables.count(max_context - 1 + look_ahead)
        largest += budget.pages if budget else 0
        self.pins = Pins(self.cache, num_pages - min(largest, self.table_width))
        self.look_ahead, self.max_emitted, self.max_batch = look_ahead, max_emitted, max_batch
        self.publish_output, self.share_partial = publish_output, share_partial
        self.waiting: list[Running] = []
        self.rows: dict[int, Running] = {}
        self.counters = Counters()

    def pages_needed(self, sample: Sample) -> int:
        """Pages for the prompt, all the tokens it may emit, and the drafts past the last one, as far as it has them all
        at once."""
        whole, budget = self.tables.count(self._limit(sample)), self.budget
        if budget is None:
            return min(whole, self.table_width)
        if self._limit(sample) - self.look_ahead <= budget.limit:
            return whole
        # Whole pages of the prompt may be found by others: they are not its own.
        return (len(sample.prompt_ids) - 1) // self.tables.page_size + budget.pages

    @property
    def wanted_rows(self) -> int:
        """Rows there is work for."""
        return min(len(self.rows) + len(self.waiting), self.max_batch)

    @property
    def decoding(self) -> dict[int, Running]:
        """The rows whose prompts are written."""
        return {row: running for row, running in sorted(self.rows.items()) if running.prefilled}

    @property
    def waste(self) -> Waste:
        """Slots that running samples hold and have not filled."""
        counts = [self.tables.waste(running.table) for running in self.rows.values()]
        return Waste(sum(w.partial for w in counts), sum(w.look_ahead for w in counts))

    def add(self, sample: Sample, transcript: Transcript) -> None:
        """Put a sample in line, behind those of its rank."""
        insort(self.waiting, Running(sample, transcript, list(sample.prompt_ids)), key=_place)

    def admit(self, batch: int) -> list[Admission]:
        """Give free rows of a batch to the first in line, for as long as there are pages for the next one."""
        admitted: list[Admission] = []
        free_rows = [row for row in range(batch) if row not in self.rows]
        for running in list(self.waiting):
            if len(admitted) == len(free_rows):
                break
            if (parent := self._parent(running)) and not parent.prefilled:
                continue  # it starts as a fork, soon
            copy = self._take_over(running, parent)
            if not self._fits(running):
                self._release(running)
                break
            running.row = free_rows[len(admitted)]
            self.rows[running.row] = running
            self.waiting.remove(running)
            self._restore(running)
            self._count_admission(running)
            admitted.append(Admission(running, copy))
        return admitted

    def next_chunks(self, budget: int) -> list[Chunk]:
        """The next tokens to prefill, at most `budget`, first come first; from here on they count as written."""
        chunks = []
        for running in sorted((r for r in self.rows.values() if not r.prefilled), key=_place):
            if budget:
                self._look_again(running)
            start, votes, end = running.table.tokens, self._voters(running), len(running.tokens) - 1
            end = min(start + budget, self._room(running), end if start >= votes else votes)
            tokens = running.tokens[start:end]
            if not tokens:
                break
            chunks.append(Chunk(running, running.table.slots, tokens, start >= votes))
            budget -= len(tokens)
            self.counters.computed_tokens += len(tokens)
            self.tables.commit(running.table, start + len(tokens))
        return chunks

    def reserve(self, rounds: int) -> tuple[int, list[tuple[int, Running]]]:
        """Pages for the next rounds of all decoding rows, and the next chunk of all others: how many rounds they do
        for, and who had to give way. What no token to come will see goes back.

        Where pages are short it is fewer rounds, and then the last in line goes back to wait; with it comes the row it
        had, which the device still holds.
        """
        gone = []
        while True:
            try:
                for running in self.rows.values():
                    self._take(running, self._slots(running, rounds if running.prefilled else 1))
            except CapacityError:
                for running in self.decoding.values():
                    self.tables.trim(running.table)
                if rounds > 1:
                    rounds = max(1, rounds // 4)
                else:
                    gone.append(self.preempt())
            else:
                return rounds, gone

    def condense(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Rows whose texts have come to their limit, the pages that hold them, and those for what stays of them.

        The device must have been told of one before the next is asked for: pages go back then.
        """
        for row, running in self.decoding.items():
            table, budget = running.table, self.budget
            if budget is not None and table.slots >= budget.limit:
                yield row, table.pages[: self.tables.count(table.slots)], table.pages[-budget.pages :]
                self.tables.condense(table, budget)

    def preempt(self) -> tuple[int, Running]:
        """Send the last in line back to wait, without its pages; returns the row it had, too."""
        running = max(self.rows.values(), key=_place)
        if self.tiers is not None and self.budget is None:  # with one, it must count votes again
            self.tiers.keep(running)
        row = self._leave(running)
        running.resumed = True
        insort(self.waiting, running, key=_place)
        self.counters.preemptions += 1
        return row, running

    def commit(self, running: Running, emitted: list[int]) -> None:
        """Take emitted tokens to the books, and give back the pages that were reserved for more."""
        running.tokens += emitted
        self.tables.commit(running.table, len(running.tokens) - 1)
        if self.budget is None:
            self.tables.trim(running.table)

    def publish(self, running: Running) -> None:
        """Let others find the whole pages of a sample. Everything committed must be on its way to the device."""
        sample, final = running.sample, running.table.tokens
        prompt = len(sample.prompt_ids)
        if not self.publish_output:
            prompt -= 1
            final = min(final, prompt)
        whole = final // self.tables.page_size
        if self.cache is not None and whole > running.published:
            pages = self.tables.pages_of_text(running.table)
            known = self.cache.insert(running.tokens[:final], pages, sample.namespace) is not None
            # What the cache has let go of, and the sample too, is not to be had again.
            running.published = whole if known else sys.maxsize
            if whole >= prompt // self.tables.page_size:
                self.pins.keep(sample, prompt)

    def finish(self, running: Running) -> None:
        """Free a sample's row and pages, or its place in line."""
        if running.row is not None:
            self._leave(running)
        elif running in self.waiting:
            self.waiting.remove(running)
            if self.tiers is not None:
                self.tiers.discard(running)

    def renumber(self) -> list[int]:
        """Close the gaps between rows: returns the old row of each new one."""
        old = sorted(self.rows)
        self.rows = {new: self.rows[row] for new, row in enumerate(old)}
        for row, running in self.rows.items():
            running.row = row
        return old

    def abort(self, request_id: str) -> list[Any]:
        """Drop every sample of a request, waiting or running; returns what was kept of those that gave way."""
        dropped = [r for r in self.waiting if r.sample.request_id == request_id]
        for running in dropped:
            self.finish(running)
        for running in [r for r in self.rows.values() if r.sample.request_id == request_id]:
            self._leave(running)
        return [running.saved for running in dropped if running.saved is not None]

    def _limit(self, sample: Sample) -> int:
        """Slots it may ever write: the last token of all is emitted and never written."""
        return len(sample.prompt_ids) + sample.max_tokens - 1 + self.look_ahead

    def _voters(self, running: Running) -> int:
        """Where the last tokens before the root begin, of which each must be computed: the root, where none need be."""
        return max(len(running.tokens) - 1 - (self.budget.votes if self.budget else 0), 0)

    def _slots(self, running: Running, rounds: int) -> int:
        """Slots that so many rounds may write."""
        if self.budget is not None:
            whole = self.pages_needed(running.sample) * self.tables.page_size
            return whole if running.row is None else self._room(running)
        length = len(running.tokens) - 1
        return min(length + (rounds - 1) * self.max_emitted + 1 + self.look_ahead, self._limit(running.sample))

    def _parent(self, running: Running) -> Running | None:
        """The first sample of the same prompt, while it runs."""
        if running.sample.index == 0 or running.saved is not None:
            return None
        same = (r for r in self.rows.values() if r.sample.request_id == running.sample.request_id)
        return next((r for r in same if r.sample.index == 0), None)

    def _take_over(self, running: Running, parent: Running | None) -> Copy | None:
        """Start a sample on pages that hold the beginning of its text already."""
        if parent is not None and self.budget is None:
            length = len(running.tokens) - 1
            if not self.share_partial:
                length -= length % self.tables.page_size
            prompt = PageTable(parent.table.pages, length, parent.table.dropped)
            whole = prompt.slots % self.tables.page_size == 0
            if prompt.dropped <= self.tables.droppable(length) and (whole or self._free(1)):
                running.table, copy = self.tables.fork(prompt)
                return copy
        pages = self._match(self.cache, running) if self.cache else []
        running.table = PageTable(pages, len(pages) * self.tables.page_size)
        return None

    def _match(self, cache: RadixCache, running: Running) -> list[int]:
        """Pages of the prefix cache that a sample may begin with."""
        return cache.match(running.tokens[: self._voters(running) + 1], running.sample.namespace)

    def _restore(self, running: Running) -> None:
        """Bring back what the prefix cache had to give up of a text: a copy costs less than computing it again."""
        if self.tiers is None:
            return
        before = running.table.tokens
        with suppress(CapacityError):  # then the rest is computed
            while self.tiers.restore(running, self._voters(running)):
                self.publish(running)
                self._take(running, self._slots(running, 1))
        self.tiers.restore_own(running)
        if (restored := running.table.tokens - before) > 0:
            self.counters.restored_tokens += restored
            self.publish(running)

    def _look_again(self, running: Running) -> None:
        """Take from the prefix cache what others have written since: of those who begin alike one computes."""
        if self.cache is None:
            return
        table, found = running.table, self._match(self.cache, running)
        gained = len(found) * self.tables.page_size - table.tokens
        spare = found
        if gained > 0:
            begin, end = self.tables.first, self.tables.first + table.dropped // self.tables.page_size
            kept = found[:begin] + found[end:]
            spare, table.pages[: len(kept)] = found[begin:end] + table.pages[: len(kept)], kept
            self.tables.commit(table, len(found) * self.tables.page_size)
            self._count_hit(running, gained)
        self.pages.release(spare[::-1])
        if gained > 0:
            with suppress(CapacityError):  # then the next `reserve` finds room for it
                self._take(running, self._slots(running, 1))

    def _fits(self, running: Running) -> bool:
        """Whether it has pages up to its first round now, with one to spare for each that runs already."""
        try:
            self._take(running, self._slots(running, 1))
        except CapacityError:
            return False
        return self._free(len(self.rows))

    def _take(self, running: Running, tokens: int) -> None:
        """See that so many tokens have slots, as far as a table goes; what need not stay goes back first."""
        table = running.table
        self.tables.drop(table)
        tokens = min(tokens, table.dropped + self.table_width * self.tables.page_size)
        self._free(self.tables.count(tokens - table.dropped) - len(table.pages))
        self.tables.reserve(table, tokens)

    def _room(self, running: Running) -> int:
        """Tokens that its pages do for, those that were given back counted as well."""
        return running.table.dropped + len(running.table.pages) * self.tables.page_size

    def _free(self, count: int) -> bool:
        """See that so many pages are free, at the expense of the prefix cache; whether it could be done."""
        if self.cache is not None and count > self.pages.free:
            self.cache.evict(count - self.pages.free)
            if self.tables.kept is not None and count > self.pages.free:
                self.cache.forget(count - self.pages.free)
        return count <= self.pages.free

    def _count_admission(self, running: Running) -> None:
        if not running.resumed:
            self.counters.prompt_tokens += len(running.sample.prompt_ids)
            self._count_hit(running, running.table.tokens)
        self.counters.peak_running = max(self.counters.peak_running, len(self.rows))

    def _count_hit(self, running: Running, tokens: int) -> None:
        # What is found again of a text that gave way was computed before: it is no hit.
        if not running.resumed:
            running.sample.cached_tokens += tokens
            self.counters.hit_tokens += tokens

    def _leave(self, running: Running) -> int:
        row = next(row for row, other in self.rows.items() if other is running)
        del self.rows[row]
        running.row = None
        self._release(running)
        return row

    def _release(self, running: Running) -> None:
        running.published = 0
        self.tables.release(running.table)


def _place(running: Running) -> tuple[int, int]:
    return running.sample.place, running.sample.index
