"""Who runs: samples wait in order of arrival for a row of the batch and for all the pages they may ever need."""

from collections import deque
from dataclasses import dataclass

from jaxspec.host.blocks import PageAllocator
from jaxspec.host.output import Transcript
from jaxspec.host.request import Sample


@dataclass
class Running:
    """A sample that holds a row and pages."""

    sample: Sample
    pages: list[int]
    transcript: Transcript


class Scheduler:
    """First come, first served; a sample takes its pages at admission and gives them back when it ends."""

    def __init__(self, num_pages: int, page_size: int, look_ahead: int, max_batch: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.page_size = page_size
        self.look_ahead = look_ahead
        self.max_batch = max_batch
        self.waiting: deque[Sample] = deque()
        self.rows: dict[int, Running] = {}

    def pages_needed(self, sample: Sample) -> int:
        """Pages for the prompt, all the tokens it may emit, and the drafts past the last one."""
        slots = len(sample.prompt_ids) + sample.max_tokens + self.look_ahead
        return -(-slots // self.page_size)

    @property
    def wanted_rows(self) -> int:
        """Rows there is work for."""
        return min(len(self.rows) + len(self.waiting), self.max_batch)

    def admit(self, batch: int, transcript) -> list[int]:
        """Move waiting samples into free rows of a batch while pages last; returns those rows.

        `transcript(sample)` opens the sample's record. The first in line is never overtaken.
        """
        taken = []
        free_rows = [row for row in range(batch) if row not in self.rows]
        while self.waiting and free_rows and self.pages_needed(self.waiting[0]) <= self.pages.free:
            sample, row = self.waiting.popleft(), free_rows.pop(0)
            self.rows[row] = Running(sample, self.pages.allocate(self.pages_needed(sample)), transcript(sample))
            taken.append(row)
        return taken

    def finish(self, row: int) -> None:
        """Free a row and its pages."""
        self.pages.release(self.rows.pop(row).pages)

    def renumber(self) -> list[int]:
        """Close the gaps between running rows: returns the old row of each new one."""
        old = sorted(self.rows)
        self.rows = {new: self.rows[row] for new, row in enumerate(old)}
        return old

    def abort(self, request_id: str) -> None:
        """Drop every sample of a request, waiting or running."""
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        for row in [r for r, running in self.rows.items() if running.sample.request_id == request_id]:
            self.finish(row)
