"""One round: propose, forward, verify, commit. Every method of speculation is this with another drafter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec import vocabulary
from jaxspec.config import MAX_LOGPROBS
from jaxspec.cost import step_cost
from jaxspec.kv.pool import Pool, compact
from jaxspec.kv.tail import room
from jaxspec.models.transformer import forward, logits_of
from jaxspec.program import NEUTRAL, Finish, Program
from jaxspec.sampling import log_probabilities
from jaxspec.types import (
    DecodeState,
    Drafter,
    History,
    Logprobs,
    Models,
    Output,
    Params,
    Progress,
    Proposal,
    Sampling,
    Verdict,
    View,
)
from jaxspec.verify import verify, verify_typical
from pallas_kernels import Rows

Decision = tuple[Verdict, Logprobs, Array, Pool]
"""What a row's tokens came to, the hidden state of the last one accepted, and the pool with their keys and values."""


def one_round(params: Models, program: Program, state: DecodeState, output: Output) -> tuple[DecodeState, Output]:
    """A round of the rows that are moving; those that stand still are carried along and change nothing."""
    drafter, sequences, moves = program.drafter, state.sequences, moving(program, state)
    progress = state.progress._replace(active=moves)
    seen = sequences._replace(page_table=sequences.page_table[..., : program.pool.round_pages])
    view = View(seen, progress, _of_active(state.sampling, progress.active), state.history)
    proposal, drafter_state, draft_pool = drafter.propose(
        params.draft, state.drafter, state.draft_pool, view, program.draft_pool
    )
    proposal = proposal._replace(valid=proposal.valid & _possible(program, view))
    alone = program.pool.policy.budget is not None
    proposal = proposal._replace(valid=_worthwhile(drafter, progress, proposal, alone))
    choices = [partial(_decide, params.target, program, width, view, proposal) for width in drafter.widths]
    verdict, logprobs, hidden, pool = _run_one(choices, _narrowest(drafter, proposal), state.pool)
    emitted, finish = _ends(verdict, progress, view.sampling)
    progress = _advance(progress, verdict, proposal, emitted, finish)
    drafter_state = drafter.observe(drafter_state, proposal, verdict, emitted, hidden)
    if program.pool.limit is not None:
        # How long others let it wait is not to change what a row drafts then.
        drafter_state = _where(moves, drafter_state, state.drafter)
        progress = progress._replace(active=progress.active | (state.progress.active & ~moves))
    state = DecodeState(
        pool=pool,
        draft_pool=draft_pool,
        sequences=sequences._replace(length=sequences.length + emitted, position=sequences.position + emitted),
        progress=progress,
        sampling=state.sampling,
        history=_remember(state.history, verdict, emitted),
        drafter=drafter_state,
    )
    return state, _emit(output, logprobs, verdict, emitted, progress)


def moving(program: Program, state: DecodeState) -> Bool[Array, "B"]:
    """Rows that rounds carry on: of the active ones those that need not be condensed before."""
    limit = program.pool.limit
    return state.progress.active if limit is None else state.progress.active & (state.sequences.length[0] < limit)


def _where(chosen: Bool[Array, "B"], those: Any, others: Any) -> Any:
    """Trees of arrays by row: the chosen rows of one, the other rows of another."""
    return jax.tree.map(lambda a, b: jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b), those, others)


def _possible(program: Program, view: View) -> Bool[Array, "B N"]:
    """Nodes that rows may draft at all: none where they stand still, none past the end of the root's group of slots."""
    depths = jnp.asarray(program.drafter.tree.depths[1:], jnp.int32)
    drafts = room(program.pool.format, view.sequences.length[0])
    within = depths <= drafts[:, None] if drafts is not None else jnp.ones_like(depths, bool)
    return view.progress.active[:, None] & within


def _worthwhile(drafter: Drafter, progress: Progress, proposal: Proposal, alone: bool = False) -> Bool[Array, "B N"]:
    """Nodes to check: those of the width that brings the batch most for its time, where chances are known. Where roots
    have votes, and so drafts a say in the text, what a row alone brings."""
    if proposal.chance is None:
        return proposal.valid
    rows, likely = progress.active[:, None], jnp.where(proposal.valid, proposal.chance, 0)
    if not alone:
        rows, likely = (jnp.sum(a, axis=0, keepdims=True) for a in (rows, likely))
    brings = rows + jnp.pad(jnp.cumsum(likely, axis=1), ((0, 0), (1, 0)))
    batch, widths = 1 if alone else len(progress.active), np.array(drafter.widths)
    costs = np.array([step_cost(batch, width) for width in drafter.widths])
    wanted = jnp.asarray(widths)[jnp.argmax(brings[:, widths - 1] / costs, axis=1)]
    return proposal.valid & (jnp.arange(1, drafter.tree.width) < wanted[:, None])


def _run_one(choices: list[Callable[[Pool], Decision]], wanted: Int[Array, ""], pool: Pool) -> Decision:
    """The result of one of several functions of the pool: `lax.switch`, but with the pool updated where it lies.

    XLA copies a buffer that both branches of a conditional write; a loop that runs once or not at all needs no copy.
    """
    if len(choices) == 1:
        return choices[0](pool)
    *rest, _ = jax.eval_shape(choices[0], pool)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rest)
    carry = jnp.bool_(True), (*empty, pool)
    for index, choice in enumerate(choices):
        carry = jax.lax.while_loop(
            lambda carry, index=index: carry[0] & (wanted == index),
            lambda carry, choice=choice: (jnp.bool_(False), choice(carry[1][-1])),
            carry,
        )
    return carry[1]


def _narrowest(drafter: Drafter, proposal: Proposal) -> Int[Array, ""]:
    """Index of the least width that holds every valid node of the batch."""
    last = jnp.max(jnp.where(proposal.valid, jnp.arange(1, drafter.tree.width), 0), initial=0)
    return jnp.sum(last >= jnp.asarray(drafter.widths))


def _decide(params: Params, program: Program, width: int, view: View, proposal: Proposal, pool: Pool) -> Decision:
    """Forward and verify rows of the first `width` tokens; the verdict is padded to the whole tree's depth."""
    tree, sequences, progress = program.drafter.tree.prefix(width), view.sequences, view.progress
    proposal = jax.tree.map(lambda a: a[:, : width - 1], proposal)
    batch = progress.token.shape[0]
    rows = Rows(jnp.arange(batch), sequences.length[0], jnp.where(progress.active, width, 0))
    tokens = jnp.concatenate([progress.token[:, None], proposal.tokens], axis=1)
    positions = sequences.position[:, None] + jnp.asarray(tree.depths)
    words = tree.ancestor_words
    ancestors = None if words is None else jnp.broadcast_to(jnp.asarray(words), (batch, *words.shape))
    hidden, pool = forward(
        params, program.model, program.pool, rows, tokens, positions, ancestors, pool, sequences, distinct=True
    )
    logits = logits_of(params, program.model, hidden)
    judge = verify_typical if program.drafter.typical else verify
    verdict = judge(tree, logits, proposal, view.sampling, view.history, progress.ordinal)
    if not tree.is_chain:
        accepted = jnp.where(progress.active, verdict.count, 0)
        pool = compact(program.pool, pool, sequences, verdict.path, accepted)
    top = min(MAX_LOGPROBS, program.model.vocab_size)
    logprobs = log_probabilities(logits, verdict.path, verdict.tokens, view.sampling, top)
    last = jnp.take_along_axis(verdict.path, verdict.count[:, None] - 1, axis=1)
    hidden = jnp.take_along_axis(hidden, last[..., None], axis=1)[:, 0]
    missing = program.max_emitted - verdict.tokens.shape[1]

    def pad(a):
        return jnp.pad(a, ((0, 0), (0, missing), *[(0, 0)] * (a.ndim - 2)))

    verdict = verdict._replace(tokens=pad(verdict.tokens), path=pad(verdict.path))
    return verdict, jax.tree.map(pad, logprobs), hidden, pool


def _of_active(sampling: Sampling, active: Bool[Array, "B"]) -> Sampling:
    """Rows that stand still ask for nothing: no filter of theirs may cost the others time."""

    def pick(chosen, neutral):
        return jnp.where(active.reshape(-1, *[1] * neutral.ndim), chosen, neutral)

    return jax.tree.map(pick, sampling, NEUTRAL)


def _ends(verdict: Verdict, progress: Progress, sampling: Sampling) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Tokens each row really emits, cut after a stop id or at max_tokens, and why it stops there (0: it does not)."""
    index = jnp.arange(verdict.tokens.shape[1])
    inside = index < verdict.count[:, None]
    stops = jnp.any(verdict.tokens[..., None] == sampling.stop_ids[:, None], axis=-1) & inside
    full = (progress.ordinal[:, None] + index + 1 >= sampling.max_tokens[:, None]) & inside
    ends = stops | full
    first = jnp.argmax(ends, axis=1)
    ended = jnp.any(ends, axis=1)
    stopped = jnp.take_along_axis(stops, first[:, None], axis=1)[:, 0]
    emitted = jnp.where(ended, first + 1, verdict.count)
    finish = jnp.where(ended, jnp.where(stopped, Finish.STOP, Finish.LENGTH), Finish.RUNNING)
    emitted = jnp.where(verdict.finite, emitted, 0)
    finish = jnp.where(verdict.finite, finish, Finish.NOT_FINITE)
    return jnp.where(progress.active, emitted, 0), jnp.where(progress.active, finish, Finish.RUNNING)


def _advance(progress: Progress, verdict: Verdict, proposal: Proposal, emitted, finish) -> Progress:
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
    drafted = jnp.sum(proposal.valid, axis=1)
    # An accepted draft counts where it was emitted: what an end cut off is neither emitted nor accepted.
    accepted = jnp.minimum(emitted, verdict.count - 1)
    return Progress(
        token=jnp.where(emitted > 0, last, progress.token),
        ordinal=progress.ordinal + emitted,
        active=progress.active & (finish == Finish.RUNNING),
        finish=jnp.where(finish == Finish.RUNNING, progress.finish, finish),
        steps=progress.steps + progress.active,
        drafted=progress.drafted + jnp.where(progress.active, drafted, 0),
        accepted=progress.accepted + accepted,
    )


def _remember(history: History, verdict: Verdict, emitted: Int[Array, "B"]) -> History:
    batch, depth = verdict.tokens.shape
    columns = vocabulary.column(verdict.tokens, history.counts.shape[1])
    tokens = jnp.where(jnp.arange(depth) < emitted[:, None], columns, history.counts.shape[1])
    return history._replace(counts=history.counts.at[jnp.arange(batch)[:, None], tokens].add(1, mode="drop"))


def _emit(output: Output, logprobs: Logprobs, verdict: Verdict, emitted: Int[Array, "B"], progress: Progress) -> Output:
    batch, path = verdict.tokens.shape
    index = jnp.arange(path)
    place = jnp.where(index < emitted[:, None], output.count[:, None] + index, output.tokens.shape[1])
    at = jnp.arange(batch)[:, None], place
    stats = jnp.stack([progress.steps, progress.drafted, progress.accepted], axis=-1)[:, None]
    return Output(
        count=output.count + emitted,
        tokens=output.tokens.at[at].set(verdict.tokens, mode="drop"),
        logprob=output.logprob.at[at].set(logprobs.chosen, mode="drop"),
        top_ids=output.top_ids.at[at].set(logprobs.top_ids, mode="drop"),
        top_logprobs=output.top_logprobs.at[at].set(logprobs.top, mode="drop"),
        stats=output.stats.at[at].set(stats, mode="drop"),
    )


def empty_output(batch: int, program: Program) -> Output:
    capacity = program.max_rounds * program.max_emitted
    top = min(MAX_LOGPROBS, program.model.vocab_size)
    return Output(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, capacity), jnp.int32),
        jnp.zeros((batch, capacity)),
        jnp.zeros((batch, capacity, top), jnp.int32),
        jnp.zeros((batch, capacity, top)),
        jnp.zeros((batch, capacity, 3), jnp.int32),
    )
