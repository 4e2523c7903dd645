"""Tokens a second, from what steps take and what drafts bring."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.config import MAX_NODES
from jaxspec.errors import ConfigError
from jaxspec.plan.roofline import EFFICIENCY, Cost, draft_cost, prefill_costs, verify_cost
from jaxspec.plan.setup import Setup
from jaxspec.plan.slices import Number
from jaxspec.plan.trees import chain_tokens, tree_tokens

ACCEPTANCE = {"ngram": 0.5, "draft_model": 0.7}
"""Assumed where nobody says: that a draft is accepted if all before it are."""


class Luck(NamedTuple):
    """What becomes of drafts."""

    acceptance: float | None = None
    """Of a chain: that a draft is accepted if all before it are."""
    tau: float | None = None
    """Tokens of a round, as measured with the very number of drafts that is planned."""


class Step(NamedTuple):
    """What one round or chunk takes: passes, one after the other."""

    costs: Sequence[Cost]

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)

    @property
    def parts(self) -> Cost:
        """By kind; in a step they overlap."""
        return Cost(*(sum(kind) for kind in zip(*self.costs, strict=True)))


class Round(NamedTuple):
    """A round with so many drafts."""

    drafts: int
    tokens: float
    """That it brings a sequence: τ."""
    step: Step
    batch: int

    @property
    def per_sequence(self) -> float:
        """Tokens a second of each sequence."""
        return self.tokens / self.step.seconds

    @property
    def per_second(self) -> float:
        """Tokens a second of all of them together."""
        return self.batch * self.per_sequence


class Speed(NamedTuple):
    """How fast a setup decodes."""

    efficiency: float
    plain: Round
    speculative: Round | None
    """None where there is no drafter."""
    others: Sequence[Round]
    """With other numbers of drafts, where it is known what they bring."""
    prefill: Step
    """Of a chunk."""
    prompt_seconds: float
    """Of a whole prompt, alone."""

    @property
    def best(self) -> Round:
        """The fastest, plain decoding included."""
        rounds = [self.plain, *self.others]
        if self.speculative is not None:
            rounds.append(self.speculative)
        return max(rounds, key=lambda one: one.per_second)


def check_luck(setup: Setup, luck: Luck) -> Luck:
    """What becomes of a setup's drafts, assumed where it is not said. ConfigError where it cannot be."""
    a, tau = luck
    for ok, what in (
        (luck == Luck() or setup.drafter != "none", "acceptance and tau are of drafts: choose a drafter"),
        (a is None or tau is None, "acceptance and tau say the same twice: give one"),
        (a is None or 0 <= a <= 1, f"acceptance must be 0 to 1, not {a}"),
        (tau is None or 1 <= tau <= setup.drafts + 1, f"tau must be 1 to {setup.drafts + 1} tokens a round, not {tau}"),
        (
            a is None or setup.guesses is None,
            "heads draft trees, of which acceptance does not tell enough: give tau, or medusa_heads with a tree.json",
        ),
    ):
        if not ok:
            raise ConfigError(what)
    return Luck(ACCEPTANCE[setup.drafter]) if luck == Luck() and setup.drafter in ACCEPTANCE else luck


def expected_tokens(setup: Setup, luck: Luck, drafts: int) -> float:
    """Tokens of a round."""
    if luck.tau is not None:
        return luck.tau
    if setup.guesses is not None:
        return tree_tokens(setup.guesses, drafts)
    return chain_tokens(luck.acceptance or 0.0, drafts)


def round_of(
    setup: Setup,
    luck: Luck,
    drafts: int,
    rows: Number | None = None,
    length: Number | None = None,
    efficiency: float = EFFICIENCY,
) -> Round:
    """A round with so many drafts, of a full batch and its mean length where these are not given."""
    rows, length = rows or setup.rows, length or setup.mean_length
    costs = [verify_cost(setup, drafts, rows, length, efficiency)]
    if drafts:
        costs.append(draft_cost(setup, drafts, rows, length, efficiency))
    return Round(drafts, expected_tokens(setup, luck, drafts) if drafts else 1.0, Step(costs), setup.batch)


def speed_of(setup: Setup, luck: Luck, efficiency: float = EFFICIENCY) -> Speed:
    """How fast a setup decodes and reads prompts, if memory gives that share of its bandwidth."""
    if not 0 < efficiency <= 1:
        raise ConfigError(f"efficiency must be above 0 and at most 1, not {efficiency}")
    luck = check_luck(setup, luck)
    prefill = Step(prefill_costs(setup, efficiency))
    chunks = -(-setup.prompt // setup.prefill_chunk)
    known = setup.drafts and luck.tau is None
    most = MAX_NODES if setup.guesses is None else len(setup.guesses.paths)
    return Speed(
        efficiency,
        plain=round_of(setup, luck, 0, efficiency=efficiency),
        speculative=round_of(setup, luck, setup.drafts, efficiency=efficiency) if setup.drafts else None,
        others=[round_of(setup, luck, n, efficiency=efficiency) for n in range(1, most + 1)] if known else [],
        prefill=prefill,
        prompt_seconds=chunks * prefill.seconds,
    )
