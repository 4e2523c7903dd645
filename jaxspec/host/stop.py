"""Stop strings: where the text of one sample ends. Plain Python."""


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and holds back what may become one.

    First is where a stop string is first complete, as generation would end there; of those complete at the same
    character the longest counts. So the result depends on the text alone, not on how it was cut into pieces.

    Args:
        strings: the stop strings, none of them empty; with no strings every text passes through at once.
        include: keep the stop string at the end of the text.
    """

    def __init__(self, strings: tuple[str, ...], include: bool = False) -> None:
        self._strings = strings
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Takes the next piece of text, such as that of one token.

        Args:
            text: the piece.
            armed: whether a stop string may be completed in this piece. It may begin in an earlier one in any case.

        Returns the text that is now safe to show, and the stop string once one is complete; nothing is shown
        after that.
        """
        if self._matched is not None:
            return "", self._matched
        new_from = len(self._held)
        text = self._held + text
        if armed and (found := self._first(text, new_from)):
            end, self._matched = found
            self._held = ""
            return text[: end if self._include else end - len(self._matched)], self._matched
        safe = len(text) - max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """What was held back, now that the text has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, new_from: int) -> tuple[int, str] | None:
        """End and string of the first match that ends behind `new_from`."""
        matches = []
        for string in self._strings:
            start = text.find(string, max(0, new_from - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), string))
        return min(matches, key=lambda match: (match[0], -len(match[1])), default=None)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a beginning of `string`, but not all of it."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
