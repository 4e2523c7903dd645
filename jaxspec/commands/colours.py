"""Text in the colours of its tokens: what was drafted and accepted, and what the model put in itself."""

import sys
from collections import Counter
from collections.abc import Iterable

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from jaxspec.host.request import Kind, Piece

COLOURS = {
    Kind.ACCEPTED: Style(color="green"),
    Kind.CORRECTED: Style(color="red"),
    Kind.BONUS: Style(color="cyan"),
    Kind.PLAIN: Style(),
}


class Colours:
    """Colours texts for standard output, and counts the kinds of their tokens.

    Whether there are colours is for rich to say: FORCE_COLOR, NO_COLOR and TERM count. Without them a text stays as it
    is, and one line on stderr says so.
    """

    def __init__(self, as_json: bool) -> None:
        console = Console()
        self.on = not as_json and console.is_terminal and console.color_system is not None and not console.no_color
        self.counts: Counter[Kind] = Counter()
        if not self.on:
            why = "not in JSON" if as_json else "on a terminal only (FORCE_COLOR=1 insists)"
            print(f"note: --show-speculation colours the text {why}", file=sys.stderr)

    def paint(self, pieces: Iterable[Piece]) -> str:
        """The text of the pieces, each in its colour."""
        painted = []
        for text, kind in pieces:
            self.counts[kind] += 1
            painted.append(COLOURS[kind].render(text, color_system=ColorSystem.STANDARD if self.on else None))
        return "".join(painted)

    def print_legend(self) -> None:
        """One line on stderr: the kinds in their colours, and how many tokens were of each."""
        parts = [Text(f"{self.counts[kind]} {kind}", style) for kind, style in COLOURS.items()]
        Console(stderr=True).print(Text("tokens: ").append_text(Text(", ").join(parts)), soft_wrap=True)
        if self.counts.total() == self.counts[Kind.PLAIN]:
            print("note: no token was drafted; --drafter ngram drafts some", file=sys.stderr)
