"""Drafting with a smaller model of the same vocabulary: it writes its keys and values under the target's page ids."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import noise, vocabulary
from jaxspec.config import DRAFT_TOKENS, EngineConfig
from jaxspec.drafters import _pace
from jaxspec.drafters._text import Text, begin, extend, new_text, read
from jaxspec.kv.pool import Pool, PoolSpec
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward, logits_of
from jaxspec.sampling import PathCounts, distribution, draw
from jaxspec.tree import Tree
from jaxspec.types import Drafter, Params, Proposal, Sampling, Verdict, View
from pallas_kernels import Rows

Forward = Callable[..., tuple[Array, Pool]]
"""`transformer.forward` of the draft model."""
CATCH_UP = 16
"""Tokens that one call writes to the draft's cache for rounds that drafted nothing."""
LAG = 128
"""Tokens that the draft's cache may be behind where slots go back: it needs what those tokens saw."""


class State(NamedTuple):
    """A request's tokens so far, what of them the draft's cache holds, and how its drafts have done."""

    text: Text
    written: Int[Array, "B"]
    """Tokens whose key and value are in the cache and right."""
    pace: _pace.Pace


def model_drafter(model: ModelSpec, target: ModelSpec, config: EngineConfig) -> Drafter:
    """Drafts a chain of `draft_tokens` tokens, each drawn as the request asks for but at `draft_temperature`.

    For the rejection rule with noise of its own; for the coupled rule with the target's, so that equal distributions
    draw alike.
    """
    count, adaptive, coupled = config.draft_tokens or DRAFT_TOKENS, config.draft_adaptive, config.verify == "coupled"
    widths = _pace.row_widths(count, adaptive)
    cost = _pace.relative_cost(model, target)
    purpose = noise.TARGET if coupled else noise.DRAFT

    def propose(
        params: Params, state: State, pool: Pool, view: View, pool_spec: PoolSpec
    ) -> tuple[Proposal, State, Pool]:
        batch = view.progress.token.shape[0]
        wanted = _pace.best_length(state.pace, widths, cost) if adaptive else jnp.full(batch, count)
        wanted = jnp.where(view.progress.active, wanted, 0)
        steps, drafts = jnp.max(wanted), wanted > 0
        run = partial(forward, params, model, pool_spec, distinct=True)
        most = LAG - count - 2 if pool_spec.policy.forgets else jnp.iinfo(jnp.int32).max
        written, pool = _catch_up(run, state, view, pool, jnp.where(drafts, 0, most))
        # Rows that want none have none: what is written of a row when is not to depend on the others.
        of_drafts = view.progress._replace(active=drafts)
        view = view._replace(progress=of_drafts, sampling=_tempered(view.sampling, config.draft_temperature))
        previous = read(state.text, jnp.maximum(state.text.length - 2, 0), 1)

        def step(index, carry):
            tokens, q, counts, pool = carry
            hidden, pool = _next_hidden(run, previous, tokens, index, view, pool)
            logits = logits_of(params, model, hidden)
            token = _draw(logits, lambda: counts, index, view, purpose)
            if not coupled:
                q = q.at[:, index].set(_drawn_from(logits, lambda: counts, index, view))
            counts = counts.at[jnp.arange(batch), 0, vocabulary.column(token, width)].add(1, mode="drop")
            return tokens.at[:, index].set(token), q, counts, pool

        width = vocabulary.columns(target.vocab_size)
        q = None if coupled else jnp.zeros((batch, count, width))
        counts = jnp.zeros((batch, 1, width), jnp.int32)
        start = jnp.zeros((batch, count), jnp.int32), q, counts, pool
        tokens, q, _, pool = jax.lax.fori_loop(0, steps, step, start)
        written = jnp.where(drafts, state.text.length - 1 + wanted, written)
        return Proposal(tokens, jnp.arange(count) < wanted[:, None], q), state._replace(written=written), pool

    return Drafter(Tree.chain(count), widths, _init, _admit, propose, _observe, model, lag=LAG)


def _catch_up(
    run: Forward, state: State, view: View, pool: Pool, most: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Pool]:
    """Write what rounds without drafts have left out where that is more than `most` tokens; all but the last token
    before the root.

    That one is written with the root, as after every round whose drafts were all accepted.
    """
    batch = jnp.arange(state.written.shape[0])
    end = state.text.length - 2
    # Of a row that never had a request the length is 0, and a slot before the first would be another's.
    end = jnp.where(view.progress.active & (end - state.written > most), end, state.written)

    def behind(carry):
        return jnp.any(carry[0] < end)

    def write(carry):
        written, pool = carry
        rows = Rows(batch, written - view.sequences.dropped[0], jnp.clip(end - written, 0, CATCH_UP))
        tokens, positions = read(state.text, written, CATCH_UP), written[:, None] + jnp.arange(CATCH_UP)
        _, pool = run(rows, tokens, positions, None, pool, view.sequences)
        return written + rows.count, pool

    return jax.lax.while_loop(behind, write, (state.written, pool))


def _next_hidden(
    run: Forward, previous: Int[Array, "B 1"], tokens, index, view: View, pool: Pool
) -> tuple[Float[Array, "B 1 E"], Pool]:
    """The draft model's hidden state after the root and `index` drafted tokens.

    Every step runs the last two tokens: when all drafts were accepted, the last of them has no key and value here yet.
    """
    progress, length = view.progress, view.sequences.length[0]
    batch = progress.token.shape[0]
    known = jnp.concatenate([previous, progress.token[:, None], tokens], axis=1)
    pair = jax.lax.dynamic_slice_in_dim(known, index, 2, axis=1)
    # A request of one token has no token before it: its first row starts with the root.
    lonely = (length + index == 0)[:, None]
    pair = jnp.where(lonely, jnp.roll(pair, -1, axis=1), pair)
    start = jnp.maximum(length + index - 1, 0)
    count = jnp.where(progress.active, jnp.where(lonely[:, 0], 1, 2), 0)
    first = jnp.maximum(view.sequences.position + index - 1, 0)
    rows = Rows(jnp.arange(batch), start, count)
    hidden, pool = run(rows, pair, first[:, None] + jnp.arange(2), None, pool, view.sequences)
    return jnp.where(lonely[..., None], hidden[:, :1], hidden[:, 1:]), pool


def _tempered(sampling: Sampling, temperature: float | None) -> Sampling:
    """What requests ask for with another temperature; greedy ones stay greedy."""
    if temperature is None:
        return sampling
    return sampling._replace(temperature=jnp.where(sampling.temperature > 0, temperature, 0.0))


def _draw(logits: Float[Array, "B 1 V"], counts: PathCounts, index, view: View, purpose: int) -> Int[Array, "B"]:
    ordinal = view.progress.ordinal[:, None] + index
    keys = noise.noise_keys(view.sampling.seed, view.sampling.sample, ordinal, purpose)
    return draw(logits, view.sampling, view.history, counts, ordinal, keys)[0][:, 0]


def _drawn_from(logits: Float[Array, "B 1 V"], counts: PathCounts, index, view: View) -> Float[Array, "B V"]:
    """The distribution of `_draw`; zeros for a batch of greedy rows, whose verification does not look at it."""
    ordinal = view.progress.ordinal[:, None] + index
    return jax.lax.cond(
        jnp.any(view.sampling.temperature > 0),
        lambda: distribution(logits, view.sampling, view.history, counts, ordinal)[:, 0],
        lambda: jnp.zeros_like(logits[:, 0]),
    )


def _init(batch: int, context: int) -> State:
    return State(new_text(batch, context), jnp.zeros(batch, jnp.int32), _pace.new_pace(batch))


def _admit(state: State, row: Int[Array, ""], prompt: Int[Array, "S"], length: Int[Array, ""]) -> State:
    text = begin(state.text, row, prompt, length)
    return State(text, state.written.at[row].set(length - 1), _pace.restart(state.pace, row))


def _observe(
    state: State, proposal: Proposal, verdict: Verdict, emitted: Int[Array, "B"], hidden: Float[Array, "B E"]
) -> State:
    text = extend(state.text, verdict, emitted)
    # What was written for drafts that were rejected is wrong.
    written = jnp.minimum(state.written, text.length - 1)
    return State(text, written, _pace.learn(state.pace, jnp.sum(proposal.valid, axis=1), verdict.count - 1))
