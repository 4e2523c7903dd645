"""How many drafts a round checks."""

import jax.numpy as jnp
import numpy as np

from jaxspec.cost import step_cost
from jaxspec.drafters.ngram import prompt_lookup
from jaxspec.round import _worthwhile
from jaxspec.types import Progress, Proposal

DRAFTER = prompt_lookup(7, True, 4, 2)


def checked(chances: list[float]) -> list[int]:
    """Drafts that are checked, of rows that drafted 7 with these chances each."""
    batch = len(chances)
    zeros = jnp.zeros(batch, jnp.int32)
    progress = Progress(zeros, zeros, jnp.ones(batch, bool), zeros, zeros, zeros, zeros)
    chance = jnp.asarray(chances)[:, None] ** jnp.arange(1, 8)
    proposal = Proposal(jnp.zeros((batch, 7), jnp.int32), chance > 0, chance=chance)
    return np.asarray(_worthwhile(DRAFTER, progress, proposal)).sum(axis=1).tolist()


def test_a_row_by_itself_drafts_as_far_as_it_pays():
    assert checked([0.95]) == [7]
    assert checked([0.2]) == [0]
    assert 0 < checked([0.62])[0] < 7


def test_one_row_does_not_make_the_whole_batch_pay():
    assert checked([0.95] + [0.0] * 31) == [0] * 32
    assert checked([0.95] * 32) == [7] * 32
    assert checked([0.95] * 6 + [0.0] * 2) == [3] * 6 + [0] * 2


def test_all_are_checked_where_no_chance_is_given():
    zeros = jnp.zeros(2, jnp.int32)
    progress = Progress(zeros, zeros, zeros == 0, zeros, zeros, zeros, zeros)
    valid = jnp.asarray([[True] * 7, [False] * 7])
    assert np.array_equal(_worthwhile(DRAFTER, progress, Proposal(jnp.zeros((2, 7), jnp.int32), valid)), valid)


def test_a_wider_step_costs_more_and_a_larger_batch_feels_it_sooner():
    assert step_cost(1, 1) == step_cost(32, 1) == 1
    for batch in (1, 8, 32):
        costs = [step_cost(batch, width) for width in (1, 2, 4, 8, 16, 64)]
        assert costs == sorted(costs)
    assert step_cost(32, 8) > step_cost(8, 8) > step_cost(1, 8)
    assert step_cost(9, 4) == step_cost(32, 4) == step_cost(500, 4)
