"""How far a run is: a display that moves on a terminal, a line now and then elsewhere. Both on stderr."""

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_A_LINE = 10.0
SECONDS_A_PICTURE = 0.1


class Meter:
    """Counts rows and tokens of a run of `total` rows, of which `done` were there before.

    `details` is asked for more to tell each time something is shown.
    """

    def __init__(self, total: int, done: int, details: Callable[[], str] = lambda: "") -> None:
        self.total, self.done, self.before = total, done, done
        self.tokens = 0
        self.began = self.said = time.perf_counter()
        self._details = details
        self._console = Console(stderr=True)
        self._bar = _Display(
            MofNCompleteColumn(),
            TextColumn("rows"),
            BarColumn(),
            TextColumn("{task.fields[rate]:.1f} tok/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("rows", total=total, completed=done, rate=0.0)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def rate(self) -> float:
        """Tokens a second, all samples together."""
        return self.tokens / self.seconds

    def add(self, rows: int = 0, tokens: int = 0) -> None:
        """Count, and show."""
        self.done += rows
        self.tokens += tokens
        wait = SECONDS_A_PICTURE if self._console.is_terminal else SECONDS_A_LINE
        if time.perf_counter() - self.said >= wait:
            self.said = time.perf_counter()
            self._show()

    def _show(self) -> None:
        if self._console.is_terminal:
            self._bar.below = self._details()
            self._bar.update(self._task, completed=self.done, rate=self.rate)
            return
        parts = f"{self.done}/{self.total} rows", f"{self.rate:.1f} tok/s", f"{self._left()} left", self._details()
        self._console.print(", ".join(part for part in parts if part), soft_wrap=True)

    def _left(self) -> str:
        new = self.done - self.before
        return str(timedelta(seconds=round(self.seconds / new * (self.total - self.done)))) if new else "?"

    def __enter__(self) -> "Meter":
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._console.is_terminal:
            self._show()
        self._bar.stop()


class _Display(Progress):
    """A progress bar with a line below."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below)
