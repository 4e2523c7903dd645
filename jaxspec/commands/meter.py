"""How far a batch is: a progress bar on a terminal, a line now and then elsewhere. Both on stderr."""

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_A_LINE = 10.0


class Meter:
    """Counts rows and tokens of a run of `total` rows, of which `done` were there before."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.before = total, done, done
        self.tokens = 0
        self.began = self.said = time.perf_counter()
        console = Console(stderr=True)
        self._bar = Progress(
            MofNCompleteColumn(),
            TextColumn("rows"),
            BarColumn(),
            TextColumn("{task.fields[rate]:.1f} tok/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self._console = console
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
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self.done, rate=self.rate)
        elif time.perf_counter() - self.said >= SECONDS_A_LINE:
            self.said = time.perf_counter()
            self._console.print(
                f"{self.done}/{self.total} rows, {self.rate:.1f} tok/s, {self._left()} left", soft_wrap=True
            )

    def _left(self) -> str:
        new = self.done - self.before
        return str(timedelta(seconds=round(self.seconds / new * (self.total - self.done)))) if new else "?"

    def __enter__(self) -> "Meter":
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()
