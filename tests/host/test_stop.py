"""The stop matcher against a search in the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.host.stop import StopMatcher

PIECES = st.lists(st.tuples(st.text("ab\n", max_size=4), st.booleans()), max_size=8)
STRINGS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4).map(tuple)


def whole_text(pieces: list[tuple[str, bool]], strings: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The law: walk over the ends of the text, and look at each whether a stop string ends there."""
    text = "".join(piece for piece, _ in pieces)
    armed = [flag for piece, flag in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found and armed[end - 1]:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(PIECES, STRINGS, st.booleans())
def test_equals_a_search_in_the_whole_text(
    pieces: list[tuple[str, bool]], strings: tuple[str, ...], include: bool
) -> None:
    matcher = StopMatcher(strings, include)
    shown, matched = "", None
    for text, armed in pieces:
        delta, matched = matcher.push(text, armed)
        shown += delta
    assert (shown + matcher.finish(), matched) == whole_text(pieces, strings, include)


@given(PIECES, STRINGS)
def test_holds_back_no_more_than_a_stop_string_can_need(
    pieces: list[tuple[str, bool]], strings: tuple[str, ...]
) -> None:
    matcher = StopMatcher(strings, include=False)
    text = shown = ""
    for piece, _ in pieces:
        text += piece
        shown += matcher.push(piece, armed=False)[0]
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(string.startswith(held) and held != string for string in strings)


@given(PIECES, STRINGS)
def test_the_piece_that_completes_the_stop_string_reports_it(
    pieces: list[tuple[str, bool]], strings: tuple[str, ...]
) -> None:
    matcher = StopMatcher(strings)
    for number, (text, armed) in enumerate(pieces, start=1):
        _, matched = matcher.push(text, armed)
        assert matched == whole_text(pieces[:number], strings, include=False)[1]


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_a_stop_string_over_several_pieces(include: bool, expected: str) -> None:
    matcher = StopMatcher(("END",), include)
    news = [matcher.push(piece) for piece in ("one E", "N", "D two", "END")]
    assert news == [("one ", None), ("", None), (expected.removeprefix("one "), "END"), ("", "END")]
    assert matcher.finish() == ""


def test_an_unarmed_match_does_not_count_but_may_begin_one() -> None:
    matcher = StopMatcher(("aba",))
    assert matcher.push("aba", armed=False) == ("ab", None)
    assert matcher.push("ba") == ("", "aba")


def test_the_first_complete_string_wins_and_then_the_longest() -> None:
    assert StopMatcher(("abcd", "bc", "c")).push("abcd") == ("a", "bc")


def test_finish_gives_what_was_held_back() -> None:
    matcher = StopMatcher(("\n\n",))
    assert matcher.push("a\n") == ("a", None)
    assert matcher.finish() == "\n"
    assert matcher.finish() == ""
