"""Prompt lookup: what followed the last few tokens where they stood in prompt or output before (Saxena, 2023)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import DRAFT_TOKENS, EngineConfig
from jaxspec.drafters import _pace
from jaxspec.drafters._text import Text, begin, extend, new_text, read
from jaxspec.kv.pool import Pool, PoolSpec
from jaxspec.models.loading import LoadedModel
from jaxspec.tree import Tree
from jaxspec.types import Drafter, Params, Proposal, Verdict, View

RULES = ("coupled",)


class State(NamedTuple):
    """A request's tokens so far, and how its drafts have done."""

    text: Text
    pace: _pace.Pace


def build(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """Looks up matches of `ngram_max` down to `ngram_min` tokens."""
    count = config.draft_tokens or DRAFT_TOKENS
    return prompt_lookup(count, config.draft_adaptive, config.ngram_max, config.ngram_min), {}


def prompt_lookup(count: int, adaptive: bool, longest: int, shortest: int) -> Drafter:
    """Drafts `count` tokens after the longest match, of equals the most recent; fewer, if adaptive, after bad luck."""
    widths = _pace.row_widths(count, adaptive)

    def propose(
        params: Params, state: State, pool: Pool, view: View, pool_spec: PoolSpec | None
    ) -> tuple[Proposal, State, Pool]:
        tokens, found = look_up(state.text, count, longest, shortest)
        valid = jnp.broadcast_to(found[:, None], tokens.shape)
        chance = _pace.rate(state.pace)[:, None] ** jnp.arange(1, count + 1)
        return Proposal(tokens, valid, chance=chance if adaptive else None), state, pool

    return Drafter(Tree.chain(count), widths, _init, _admit, propose, _observe)


def look_up(text: Text, count: int, longest: int, shortest: int) -> tuple[Int[Array, "B count"], Bool[Array, "B"]]:
    """What followed the longest earlier copy of a row's last tokens, and whether there is one."""
    end, found = _longest_match(text, longest, shortest)
    # A match that reaches the end of the text goes on with its own drafts: text that repeats keeps repeating.
    period = jnp.maximum(text.length - 1 - end, 1)[:, None]
    source = end[:, None] + 1 + jnp.arange(count) % period
    return jnp.take_along_axis(text.tokens, source % text.tokens.shape[1], axis=1), found


def _init(batch: int, context: int) -> State:
    return State(new_text(batch, context), _pace.new_pace(batch))


def _admit(state: State, row: Int[Array, ""], prompt: Int[Array, "S"], length: Int[Array, ""]) -> State:
    return State(begin(state.text, row, prompt, length), _pace.restart(state.pace, row))


def _observe(
    state: State, proposal: Proposal, verdict: Verdict, emitted: Int[Array, "B"], hidden: Float[Array, "B E"]
) -> State:
    pace = _pace.learn(state.pace, jnp.sum(proposal.valid, axis=1), verdict.count - 1)
    return State(extend(state.text, verdict, emitted), pace)


def _longest_match(text: Text, longest: int, shortest: int) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Where an earlier copy of the last tokens ends, and whether there is one of at least `shortest` tokens."""
    size, last = text.tokens.shape[1], text.length[:, None] - 1
    age = (last - jnp.arange(size)) % size
    """Tokens that came after the one at each place."""
    known = jnp.minimum(text.length, size)[:, None]
    agrees = age > 0
    run = jnp.zeros_like(text.tokens)
    for back in range(longest):
        wanted = read(text, text.length - 1 - back, 1)
        agrees &= (age + back < known) & (jnp.roll(text.tokens, back, axis=1) == wanted)
        run += agrees
    score = jnp.where(run >= shortest, (run + 1) * size - age, -1)
    best = jnp.argmax(score, axis=1)[:, None]
    return (last - jnp.take_along_axis(age, best, axis=1))[:, 0], jnp.max(score, axis=1) >= 0
