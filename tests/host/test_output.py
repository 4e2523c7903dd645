"""Rounds and kinds of tokens from the counters that come with them, and the record of a sample."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import SamplingParams
from jaxspec.host.output import Contest, Emitted, Transcript, read_rounds, token_kinds
from jaxspec.host.request import Kind, Piece, Round, Sample, TextDelta, TokenLogprobs

PLAIN, ACCEPTED, CORRECTED, BONUS = Kind.PLAIN, Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS


@pytest.mark.parametrize(
    ("done", "kinds"),
    [
        (Round(drafted=0, accepted=0, emitted=1), [PLAIN]),
        (Round(drafted=3, accepted=0, emitted=1), [CORRECTED]),
        (Round(drafted=3, accepted=2, emitted=3), [ACCEPTED, ACCEPTED, CORRECTED]),
        (Round(drafted=3, accepted=3, emitted=4), [ACCEPTED, ACCEPTED, ACCEPTED, BONUS]),
        # The text ended with an accepted draft.
        (Round(drafted=3, accepted=2, emitted=2), [ACCEPTED, ACCEPTED]),
        (Round(drafted=3, accepted=3, emitted=3), [ACCEPTED, ACCEPTED, ACCEPTED]),
    ],
)
def test_kinds_of_a_round(done, kinds):
    assert token_kinds(done) == kinds


ROUNDS = st.lists(
    st.integers(0, 5).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=8
)


def counters_of(rounds: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The counters of every token, as the device counts: a round emits its accepted drafts and one more."""
    counters, drafted, accepted = [], 0, 0
    for step, (more_drafted, more_accepted) in enumerate(rounds, 1):
        drafted, accepted = drafted + more_drafted, accepted + more_accepted
        counters += [(step, drafted, accepted)] * (more_accepted + 1)
    return counters


@given(ROUNDS, st.data())
def test_rounds_are_read_back_from_counters_in_one_go_or_two(rounds, data):
    counters = counters_of(rounds)
    expected = [Round(drafted, accepted, accepted + 1) for drafted, accepted in rounds]
    assert read_rounds(counters) == expected
    cut = data.draw(st.integers(0, len(rounds)))
    first = counters_of(rounds[:cut])
    before = first[-1] if first else (0, 0, 0)
    assert read_rounds(first) + read_rounds(counters[len(first) :], before) == expected


def test_a_round_whose_end_was_dropped_accepted_what_is_left():
    assert read_rounds([(1, 4, 3)] * 2) == [Round(4, 2, 2)]


class Letters:
    """Token i is the i-th letter; text comes one token late, as with characters of several tokens."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, ids: list[int]) -> str:
        text, self.held = self.held, "".join(chr(97 + i) for i in ids)
        return text

    def finish(self) -> str:
        return self.held


def transcript(index: int = 0, **params) -> Transcript:
    chosen = SamplingParams(**params)
    return Transcript(Sample("r", index, [1, 2], chosen, chosen.max_tokens, 7, 0.0), Letters())


def emitted(first: int, rounds: list[tuple[int, int]], known: int = 0) -> list[Emitted]:
    """Tokens from number `first` on; the first `known` rounds are told of already."""
    counters = counters_of(rounds)[len(counters_of(rounds[:known])) :]
    return [Emitted(first + i, c, None) for i, c in enumerate(counters)]


def test_news_come_in_pieces_of_one_token_each():
    rounds = [(0, 0), (2, 2), (3, 1)]
    record = transcript()
    first = record.push(emitted(0, rounds[:2]), 0.0)
    assert first.pieces == [Piece("", PLAIN), Piece("a", ACCEPTED), Piece("b", ACCEPTED), Piece("c", BONUS)]
    second = record.push(emitted(4, rounds, known=2), 0.0)
    assert second.pieces == [Piece("d", ACCEPTED), Piece("e", CORRECTED)]
    last = record.finish(second, "length", None)
    assert (last.pieces, last.rest, last.text, last.tokens) == (second.pieces, "f", "def", 2)
    result = last.finished
    assert result is not None
    assert result.text == first.text + last.text == "abcdef"
    assert result.token_ids == [0, 1, 2, 3, 4, 5]
    assert result.rounds == [Round(0, 0, 1), Round(2, 2, 3), Round(3, 1, 2)]
    stats = result.stats
    assert (stats.tokens, stats.steps, stats.drafted, stats.accepted) == (6, 3, 5, 3)
    assert (stats.tau, stats.acceptance_rate) == (2.0, 0.6)


def test_what_a_stop_string_cut_off_is_not_counted():
    record = transcript(stop="bc")
    delta = record.push(emitted(0, [(0, 0), (5, 5)]), 0.0)
    assert record.stop_reason == "bc"
    assert [piece.kind for piece in delta.pieces] == [PLAIN, ACCEPTED, ACCEPTED, ACCEPTED]
    result = record.finish(delta, "stop", "bc").finished
    assert result is not None
    assert (result.text, result.finish_reason, result.stop_reason) == ("a", "stop", "bc")
    assert (result.stats.tokens, result.stats.steps, result.stats.drafted, result.stats.accepted) == (4, 2, 5, 3)


def test_a_sample_that_ends_without_a_token():
    record = transcript()
    result = record.finish(record.push([], 0.0), "error", "no logits").finished
    assert result is not None
    assert (result.text, result.token_ids, result.rounds, result.stats.steps) == ("", [], [], 0)


def contender(index: int, logprobs: list[float], reason: str = "length") -> list[TextDelta]:
    """All news of a sample, one a token; its letters are those from its own on."""
    record = transcript(index, temperature=1.0, logprobs=0)
    news = [
        record.push(
            [Emitted(index + place, (place + 1, 0, 0), TokenLogprobs(index + place, logprob, {}))], float(place)
        )
        for place, logprob in enumerate(logprobs)
    ] or [record.push([], 0.0)]
    return [*news[:-1], record.finish(news[-1], reason, None)]


@pytest.mark.parametrize(("n", "told"), [(1, ["bcde"]), (2, ["bcde", "a"]), (4, ["bcde", "a", "cd", "d"])])
def test_of_samples_that_compete_those_with_the_best_mean_are_told_at_the_end(n: int, told: list[str]):
    """The first two have the same sum; the last has the best mean, and an error."""
    contest = Contest(SamplingParams(temperature=1.0, n=n, best_of=4))
    samples = [
        contender(0, [-2.0]),
        contender(1, [-0.5] * 4),
        contender(2, [-0.1, -9.0]),
        contender(3, [-0.01], "error"),
    ]
    last = samples[1].pop()
    for delta in [delta for sample in samples for delta in sample]:
        assert contest.take(delta) == []
    chosen = contest.take(last)
    assert [delta.text for delta in chosen] == [delta.finished.text for delta in chosen if delta.finished] == told
    assert [delta.index for delta in chosen] == [delta.finished.index for delta in chosen if delta.finished]
    assert [delta.index for delta in chosen] == list(range(n))
    assert [delta.tokens for delta in chosen] == [len(text) for text in told]
    assert all(delta.gap is None and delta.finished and delta.finished.logprobs is None for delta in chosen)


def test_samples_that_compete_show_log_probabilities_where_they_are_asked_for_and_lose_without_a_token():
    contest = Contest(SamplingParams(temperature=1.0, n=2, best_of=2, logprobs=0))
    assert contest.take(contender(0, [])[0]) == []
    best, worst = (delta.finished for delta in contest.take(contender(1, [-3.0])[0]))
    assert best is not None
    assert worst is not None
    assert best.logprobs == [TokenLogprobs(1, -3.0, {})]
    assert (worst.token_ids, worst.logprobs) == ([], [])
