"""Tokens a second, and how many drafts are best."""

from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.plan.setup import Setup, set_up
from jaxspec.plan.speed import Luck, Round, Step, check_luck, round_of, speed_of


def setup(**options: Any) -> Setup:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "topology": "v5e:2x2", "context": 4096}
    return set_up(**given | options)


def test_rounds() -> None:
    plain = speed_of(setup(batch=8), Luck()).plain
    assert plain.tokens == 1
    assert plain.per_sequence == 1 / plain.step.seconds
    assert plain.per_second == 8 * plain.per_sequence
    assert plain.step.seconds == pytest.approx(sum(plain.step.parts[:3]))


def test_without_a_drafter() -> None:
    speed = speed_of(setup(), Luck())
    assert speed.speculative is None
    assert speed.others == []
    assert speed.best == speed.plain


def test_tokens_of_a_round() -> None:
    drafting = setup(drafter="ngram", draft_tokens=4)
    found = speed_of(drafting, Luck(acceptance=0.6)).speculative
    assert found is not None
    assert found.tokens == pytest.approx((1 - 0.6**5) / 0.4)
    assert found.per_second == pytest.approx(found.tokens / found.step.seconds)
    measured = speed_of(drafting, Luck(tau=2.5))
    assert measured.speculative is not None
    assert measured.speculative.tokens == 2.5
    assert measured.others == []  # what other numbers of drafts bring is not known


def test_the_best_number_is_the_fastest_of_all() -> None:
    speed = speed_of(setup(drafter="draft_model:llama-3.2-1b"), Luck(acceptance=0.8))
    assert len(speed.others) == 63
    assert speed.best.per_second == max(one.per_second for one in (speed.plain, *speed.others))
    assert 2 <= speed.best.drafts <= 12
    assert speed_of(setup(drafter="ngram"), Luck(acceptance=0.0)).best.drafts == 0


def test_drafts_are_worth_less_in_a_large_batch() -> None:
    best = [speed_of(setup(batch=batch, drafter="ngram"), Luck(acceptance=0.7)).best.drafts for batch in (1, 16, 256)]
    assert best[0] > best[1] > best[2]


def test_replicas_share_the_batch() -> None:
    one, two = (speed_of(setup(batch=8, replicas=n), Luck()) for n in (1, 2))
    assert one.plain.per_sequence > two.plain.per_sequence  # each replica reads all weights
    assert two.plain.per_second == pytest.approx(8 / two.plain.step.seconds)


def test_prompts_are_read_in_chunks() -> None:
    speed = speed_of(setup(prompt=1000, prefill_chunk=256), Luck())
    assert speed.prompt_seconds == pytest.approx(4 * speed.prefill.seconds)


def test_luck_that_is_assumed() -> None:
    assert check_luck(setup(drafter="ngram"), Luck()) == Luck(0.5)
    assert check_luck(setup(drafter="draft_model:llama-3.2-1b"), Luck()) == Luck(0.7)
    assert check_luck(setup(drafter="medusa"), Luck()) == Luck()
    assert check_luck(setup(), Luck()) == Luck()


@pytest.mark.parametrize(
    ("drafter", "luck", "message"),
    [
        ("none", Luck(acceptance=0.5), "choose a drafter"),
        ("ngram", Luck(0.5, 2.0), "give one"),
        ("ngram", Luck(acceptance=1.5), "acceptance must be 0 to 1, not 1.5"),
        ("ngram", Luck(tau=0.5), "tau must be 1 to 8 tokens a round, not 0.5"),
        ("ngram", Luck(tau=8.5), "tau must be 1 to 8"),
        ("medusa", Luck(acceptance=0.5), "give tau, or medusa_heads"),
    ],
)
def test_luck_that_cannot_be(drafter: str, luck: Luck, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speed_of(setup(drafter=drafter), luck)


@pytest.mark.parametrize("efficiency", [0.0, 1.1, float("nan")])
def test_efficiency_is_a_share(efficiency: float) -> None:
    with pytest.raises(ConfigError, match="efficiency must be above 0 and at most 1"):
        speed_of(setup(), Luck(), efficiency)


def test_a_round_of_fewer_rows() -> None:
    drafting = setup(batch=8, drafter="ngram")
    few = round_of(drafting, Luck(0.5), 3, 2, 100)
    assert isinstance(few, Round)
    assert isinstance(few.step, Step)
    assert few.step.seconds < round_of(drafting, Luck(0.5), 3).step.seconds
