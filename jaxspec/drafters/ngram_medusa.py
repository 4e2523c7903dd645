"""Prompt lookup where the text repeats itself, heads where it does not: copying is the better guess when it works."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import DRAFT_TOKENS, EngineConfig
from jaxspec.drafters import _heads, _pace, medusa
from jaxspec.drafters._text import Text, begin, extend, new_text
from jaxspec.drafters.ngram import look_up
from jaxspec.kv.pool import Pool, PoolSpec
from jaxspec.models.loading import LoadedModel
from jaxspec.types import Drafter, Params, Proposal, Verdict, View

RULES = ("coupled",)
BEST = 3
"""Nodes of the heads' own tree that come first; after them, the chain of their first guesses goes on for copies."""


class State(NamedTuple):
    """What both look at, and how each has done."""

    text: Text
    copies: _pace.Pace
    copied: Bool[Array, "B"]
    """Whether this round's drafts were looked up."""
    heads: medusa.State


def build(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """Drafts `draft_tokens` nodes, most of them one chain."""
    size, adaptive = config.draft_tokens or DRAFT_TOKENS, config.draft_adaptive
    heads, params = _heads.load(config, target, partial(_with_chain, size))
    chain = np.flatnonzero(heads.tree.is_first_path[1:])
    usual = float(np.sum(heads.chances))

    def propose(
        params: Params, state: State, pool: Pool, view: View, pool_spec: PoolSpec | None
    ) -> tuple[Proposal, State, Pool]:
        tokens, found = look_up(state.text, len(chain), config.ngram_max, config.ngram_min)
        chance = _pace.rate(state.copies)[:, None] ** jnp.arange(1, len(chain) + 1)
        better = jnp.sum(chance, axis=1) > medusa.trust(state.heads.pace) * usual
        copied = found & (better | ~state.heads.known)
        guessed = medusa.picked(heads, config, params, state.heads, view, ~copied)

        def choose(copy: Array, guess: Array) -> Array:
            return jnp.where(copied[:, None], jnp.zeros_like(guess).at[:, chain].set(copy), guess)

        proposal = Proposal(choose(tokens, guessed.tokens), choose(jnp.bool_(True), guessed.valid))
        if guessed.chance is not None:
            proposal = proposal._replace(chance=choose(chance, guessed.chance))
        return proposal, state._replace(copied=copied), pool

    def init(batch: int, context: int) -> State:
        of_heads = medusa.init(heads, target.params["norm"]["weight"].dtype, batch, context)
        return State(new_text(batch, context), _pace.new_pace(batch), jnp.zeros(batch, bool), of_heads)

    widths = _pace.row_widths(heads.tree.size, adaptive)
    observe = partial(_observe, np.asarray(heads.chances, np.float32))
    return Drafter(heads.tree, widths, init, _admit, propose, observe), params


def _with_chain(size: int, chosen: _heads.TreeFile) -> _heads.TreeFile:
    """The best few nodes, then first guesses under first guesses; the heads guess those as far as there are heads."""
    chances = dict(zip(chosen.nodes, chosen.chances, strict=True))
    nodes = list(chosen.nodes[: min(BEST, size)])
    chain = [(0,) * depth for depth in range(1, size + 1)]
    nodes += [node for node in chain if node not in nodes][: size - len(nodes)]
    return _heads.TreeFile(nodes, [chances.get(node, 0.0) for node in nodes])


def _admit(state: State, row: Int[Array, ""], prompt: Int[Array, "S"], length: Int[Array, ""]) -> State:
    return State(
        begin(state.text, row, prompt, length),
        _pace.restart(state.copies, row),
        state.copied.at[row].set(False),
        medusa.admit(state.heads, row, prompt, length),
    )


def _observe(
    usual: Float[np.ndarray, "N"],
    state: State,
    proposal: Proposal,
    verdict: Verdict,
    emitted: Int[Array, "B"],
    hidden: Float[Array, "B E"],
) -> State:
    """Each learns from the rounds that drafted its tokens."""
    drafted = jnp.sum(proposal.valid, axis=1)
    copies = _pace.learn(state.copies, jnp.where(state.copied, drafted, 0), verdict.count - 1)
    other = ~state.copied[:, None]
    chance = None if proposal.chance is None else jnp.where(other, proposal.chance, 0)
    guessed = proposal._replace(valid=proposal.valid & other, chance=chance)
    of_heads = medusa.observe(usual, state.heads, guessed, verdict, emitted, hidden)
    return State(extend(state.text, verdict, emitted), copies, state.copied, of_heads)
