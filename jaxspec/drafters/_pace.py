"""How many tokens to draft, from what became of a request's own earlier drafts.

The chance that the next drafted token is accepted, given that those before it were, is estimated from recent rounds;
the draft length is the one with the most expected tokens for the time of a round (Leviathan et al., 2023, section 3).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.spec import ModelSpec

MEMORY = 0.8
"""Weight of a round's evidence after each further round."""
PRIOR_HITS, PRIOR_TRIALS = 1.6, 2.0
"""Evidence that a new request starts with, and that fresh evidence is always mixed with."""
STEP_COST = {"cpu": {2: 1.38, 4: 1.42, 8: 1.66, 16: 2.2}}
"""Time of a verify step of so many tokens over a plain step: rounded readings on SmolLM2-135M at batch 1, which vary by
a tenth. Other backends are assumed to verify almost for free; nobody has measured that yet."""


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


def step_cost(width: int) -> float:
    """Time of a round of that width over a plain one, on this backend."""
    table = STEP_COST.get(jax.default_backend(), {})
    return next((cost for tokens, cost in sorted(table.items()) if tokens >= width), 1.0 + 0.1 * width / 8)


def row_widths(count: int, adaptive: bool) -> tuple[int, ...]:
    """Verify rows for up to `count` drafted tokens: none, all, and a few if the length may adapt."""
    return tuple(sorted({1, *(min(few, count + 1) for few in (4, 8)), count + 1})) if adaptive else (1, count + 1)


def relative_cost(draft: ModelSpec, target: ModelSpec) -> float:
    """Time to draft a token over a plain step, as the ratio of the weights that each must read."""
    return draft.weight_count / target.weight_count


def best_length(pace: Pace, widths: tuple[int, ...], draft_cost: float = 0.0) -> Int[Array, "B"]:
    """The draft length, of those that fill a width, with the most expected tokens a unit of time."""
    rate = (pace.hits + PRIOR_HITS) / (pace.trials + PRIOR_TRIALS)
    costs = [step_cost(width) + draft_cost * (width - 1) if width > 1 else 1.0 for width in widths]
    gains = [sum(rate**i for i in range(width)) / cost for width, cost in zip(widths, costs, strict=True)]
    return jnp.asarray(widths)[jnp.argmax(jnp.stack(jnp.broadcast_arrays(*gains)), axis=0)] - 1


def learn(pace: Pace, drafted: Int[Array, "B"], accepted: Int[Array, "B"]) -> Pace:
    """Count a round: every accepted token is a hit, and a rejection one trial more."""
    trials = jnp.minimum(accepted + 1, drafted)
    # A round without a draft fades the memory too: a request that gave up tries again after a while.
    keep = jnp.where(drafted > 0, MEMORY, 0.97)
    return Pace(pace.hits * keep + jnp.minimum(accepted, drafted), pace.trials * keep + trials)
