"""Heads on the target's own hidden state draft a static tree (Medusa: Cai et al., 2024; Hydra: Ankner et al., 2024)."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import EngineConfig
from jaxspec.cost import step_cost
from jaxspec.drafters import _heads, _pace
from jaxspec.kv.pool import Pool, PoolSpec
from jaxspec.models.loading import LoadedModel
from jaxspec.types import Drafter, Params, Proposal, Verdict, View

RULES = ("coupled", "rejection", "typical")
MEMORY = 0.95
"""Weight of a round's outcome after each further round with drafts."""
DOUBT = 4.0
"""Expected tokens that a new request is thought to have got."""
SELDOM, TURN = 0.12, 8
"""Heads whose guesses were checked in less than this share of the rounds are asked only when a row's tokens are a
multiple of TURN: asking costs time, too."""


class State(NamedTuple):
    """What the heads look at, and how they have done."""

    hidden: Float[Array, "B E"]
    """The target's hidden state of the token before the root."""
    known: Bool[Array, "B"]
    """Whether it is there: a request's first round has none, for what came before it may have been in the cache."""
    pace: _pace.Pace
    """Tokens that were accepted, and that the heads expected to be."""
    use: _pace.Pace
    """Rounds whose guesses were checked, and rounds that made some."""


def build(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """Drafts `draft_tokens` nodes of the tree that lies beside the heads; fewer, if adaptive, where the heads doubt."""
    heads, params = _heads.load(config, target)
    return medusa_drafter(heads, config, target.params["norm"]["weight"].dtype), params


def medusa_drafter(heads: _heads.Heads, config: EngineConfig, dtype: Any) -> Drafter:
    """The drafter of heads; `dtype` is that of hidden states."""
    widths = _pace.row_widths(heads.tree.size, config.draft_adaptive)

    def propose(
        params: Params, state: State, pool: Pool, view: View, pool_spec: PoolSpec | None
    ) -> tuple[Proposal, State, Pool]:
        if config.verify == "rejection":
            proposal = _heads.draw(heads, params, state.hidden, view, config.draft_temperature)
            proposal = proposal._replace(valid=proposal.valid & (view.progress.active & state.known)[:, None])
        else:
            proposal = picked(heads, config, params, state, view)
        if config.draft_adaptive and config.verify in ("rejection", "typical"):
            proposal = _by_itself(heads, widths, state, proposal)
        return proposal, state, pool

    learn = partial(observe, np.asarray(heads.chances, np.float32))
    typical = config.verify == "typical"
    return Drafter(heads.tree, widths, partial(init, heads, dtype), admit, propose, learn, typical=typical)


def init(heads: _heads.Heads, dtype: Any, batch: int, context: int) -> State:
    """Nothing is known of any row."""
    empty = _pace.new_pace(batch)
    return State(jnp.zeros((batch, heads.spec.embed_dim), dtype), jnp.zeros(batch, bool), empty, empty)


def picked(
    heads: _heads.Heads,
    config: EngineConfig,
    params: Params,
    state: State,
    view: View,
    wanted: Bool[Array, "B"] | bool = True,
) -> Proposal:
    """The heads' likeliest tokens, in rows that want some."""
    ready, floor = view.progress.active & state.known & wanted, 0.0
    if config.draft_adaptive:
        ready &= ((state.use.hits + 1) / (state.use.trials + 1) > SELDOM) | (view.progress.ordinal % TURN == 0)
        # What is under a node brings at most what it brings itself: no round would pay for both.
        floor = (step_cost(1, _pace.row_widths(heads.tree.size, adaptive=True)[1]) - 1) / 2
    tokens, chance = _heads.guess(heads, params, state.hidden, view.progress.token, ready, floor)
    valid = ready[:, None] & (chance > 0)
    return Proposal(tokens, valid, chance=chance * trust(state.pace)[:, None] if config.draft_adaptive else None)


def _by_itself(heads: _heads.Heads, widths: tuple[int, ...], state: State, proposal: Proposal) -> Proposal:
    """As many nodes as pay by a row's own history: where drafts have a say in the text, its company must have none, nor
    which tokens were drawn."""
    brings = jnp.asarray(np.cumsum([0.0, *heads.chances])[np.array(widths) - 1])
    wanted = _pace.best_width(1.0 + brings * trust(state.pace)[:, None], widths)
    within = jnp.arange(1, heads.tree.width) < wanted[:, None]
    return proposal._replace(valid=proposal.valid & within, chance=None)


def trust(pace: _pace.Pace) -> Float[Array, "B"]:
    """Tokens accepted for each that was expected to be."""
    return (pace.hits + DOUBT) / (pace.trials + DOUBT)


def admit(state: State, row: Int[Array, ""], prompt: Int[Array, "S"], length: Int[Array, ""]) -> State:
    """A request takes the row."""
    known = state.known.at[row].set(False)
    return State(state.hidden.at[row].set(0), known, *(_pace.restart(pace, row) for pace in (state.pace, state.use)))


def observe(
    usual: Float[np.ndarray, "N"],
    state: State,
    proposal: Proposal,
    verdict: Verdict,
    emitted: Int[Array, "B"],
    hidden: Float[Array, "B E"],
) -> State:
    """Keep the hidden state that the next round's heads look at, and what became of this round's guesses."""
    if proposal.chance is None:
        chance = jnp.broadcast_to(usual, proposal.valid.shape)
    else:
        chance = proposal.chance / trust(state.pace)[:, None]
    expected = jnp.sum(jnp.where(proposal.valid, chance, 0), axis=1)
    keep = jnp.where(expected > 0, MEMORY, 1.0)
    accepted = jnp.where(expected > 0, verdict.count - 1, 0)
    pace = _pace.Pace(state.pace.hits * keep + accepted, state.pace.trials * keep + expected)
    guessed, checked = jnp.any(chance > 0, axis=1), jnp.any(proposal.valid, axis=1)
    keep = jnp.where(guessed, MEMORY, 1.0)
    use = _pace.Pace(state.use.hits * keep + checked, state.use.trials * keep + guessed)
    moved = emitted > 0
    return State(jnp.where(moved[:, None], hidden, state.hidden), state.known | moved, pace, use)
