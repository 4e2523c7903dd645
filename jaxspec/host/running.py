"""A sample, what the host knows of it while it waits or runs, and what the devices are to do for it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxspec.host.blocks import Copy, PageTable
from jaxspec.host.output import Transcript
from jaxspec.host.request import Sample


@dataclass(eq=False)
class Running:
    """A sample from its arrival to its end."""

    sample: Sample
    transcript: Transcript
    tokens: list[int]
    """Prompt and output. The key and value of the last one are not written yet: it is the root of the next round."""
    table: PageTable = field(default_factory=PageTable)
    row: int | None = None
    """Of the batch; None while it waits."""
    saved: Any = None
    """How to find what the devices knew of it when it had to give way."""
    resumed: bool = False
    """Whether it had to give way before."""
    published: int = 0
    """Whole pages that the prefix cache knows."""
    written: int = 0
    """Tokens that were written when it had to give way; of what the cache did not know a copy is kept for it alone."""

    @property
    def prefilled(self) -> bool:
        """Whether everything but the root is written."""
        return self.row is not None and self.table.tokens == len(self.tokens) - 1


class Admission(NamedTuple):
    """A sample that got a row, and the page that the device must copy first, where it starts as a fork."""

    running: Running
    copy: Copy | None


class Chunk(NamedTuple):
    """Consecutive tokens of one sample to be written next."""

    running: Running
    start: int
    """Slot of the first one."""
    tokens: list[int]
    votes: bool = False
    """Whether they score what is before them, each for itself."""
