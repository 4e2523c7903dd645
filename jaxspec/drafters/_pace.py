"""How many tokens to draft, from what became of a request's own earlier drafts.

The chance that the next drafted token is accepted, given that those before it were, is estimated from recent rounds;
the draft length is the one with the most expected tokens for the time of a round (Leviathan et al., 2023, section 3).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cost import step_cost
from jaxspec.models.spec import ModelSpec
from jaxspec.target import platform

MEMORY = 0.8
"""Weight of a round's evidence after each further round."""
PRIOR_HITS, PRIOR_TRIALS = 1.6, 2.0
"""Evidence that a new request starts with, and that fresh evidence is always mixed with."""


class Pace(NamedTuple):
    """Decaying counts of each row."""

    hits: Float[Array, "B"]
    trials: Float[Array, "B"]


def new_pace(batch: int) -> Pace:
    """No evidence yet."""
    return Pace(jnp.zeros(batch), jnp.zeros(batch))


def restart(pace: Pace, row: Int[Array, ""]) -> Pace:
    """Forget what a row's last request did."""
    return Pace(pace.hits.at[row].set(0), pace.trials.at[row].set(0))


def row_widths(count: int, adaptive: bool) -> tuple[int, ...]:
    """Verify rows for up to `count` drafted tokens: none, all, and a few if the length may adapt. Each is one more
    forward pass to compile, and accelerators take 4 tokens no faster than 8."""
    some = (4, 8) if platform() == "cpu" else (8,)
    return tuple(sorted({1, *(min(few, count + 1) for few in some), count + 1})) if adaptive else (1, count + 1)


def relative_cost(draft: ModelSpec, target: ModelSpec) -> float:
    """Time to draft a token over a plain step, as the ratio of the weights that each must read."""
    return draft.weight_count / target.weight_count


def rate(pace: Pace) -> Float[Array, "B"]:
    """The chance that a drafted token is accepted, given that those before it are."""
    return (pace.hits + PRIOR_HITS) / (pace.trials + PRIOR_TRIALS)


def best_length(pace: Pace, widths: tuple[int, ...], draft_cost: float) -> Int[Array, "B"]:
    """The draft length, of those that fill a width, with the most expected tokens a unit of time, of a lone row."""
    r = rate(pace)
    tokens = [sum(r**i for i in range(width)) for width in widths]
    return best_width(jnp.stack(jnp.broadcast_arrays(*tokens), axis=1), widths, draft_cost) - 1


def best_width(tokens: Float[Array, "B widths"], widths: tuple[int, ...], draft_cost: float = 0.0) -> Int[Array, "B"]:
    """The width that is expected to bring the most tokens a unit of time, of a lone row."""
    costs = jnp.asarray([step_cost(1, width) + draft_cost * (width - 1) for width in widths])
    return jnp.asarray(widths)[jnp.argmax(tokens / costs, axis=1)]


def learn(pace: Pace, drafted: Int[Array, "B"], accepted: Int[Array, "B"]) -> Pace:
    """Count a round: every accepted token is a hit, and a rejection one trial more."""
    trials = jnp.minimum(accepted + 1, drafted)
    # A round without a draft fades the memory too: a request that gave up tries again after a while.
    keep = jnp.where(drafted > 0, MEMORY, 0.97)
    return Pace(pace.hits * keep + jnp.minimum(accepted, drafted), pace.trials * keep + trials)
