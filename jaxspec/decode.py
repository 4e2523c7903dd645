"""The decode loop: propose, forward, verify, commit, in rounds on the device. Knows protocols, no concrete plug-in."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.config import MAX_LOGPROBS, SamplingParams
from jaxspec.kv.pool import Pool, PoolSpec, compact
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward, logits_of
from jaxspec.sampling import log_probabilities, sampling_row
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
    Sequences,
    Verdict,
    View,
)
from jaxspec.verify import verify_coupled
from pallas_kernels import Rows


class Finish(IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NOT_FINITE = 3


Decision = tuple[Verdict, Logprobs, Pool]
"""What a row's tokens came to, and the pool with their keys and values."""

_NEUTRAL = sampling_row(SamplingParams())


@dataclass(frozen=True)
class Program:
    """All that the compiled program depends on besides shapes."""

    model: ModelSpec
    pool: PoolSpec
    drafter: Drafter
    max_rounds: int = 16
    """Rounds that one call may run at most."""

    @property
    def draft_pool(self) -> PoolSpec | None:
        """The pool of the drafter's own model: as many pages, of as many slots."""
        model: ModelSpec | None = self.drafter.model
        if model is None:
            return None
        return replace(self.pool, num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)

    @property
    def max_emitted(self) -> int:
        """Tokens a row emits in one round at most."""
        return self.drafter.tree.max_depth + 1


@partial(jax.jit, static_argnames=("program", "batch", "table_width"))
def init_state(program: Program, batch: int, table_width: int) -> DecodeState:
    """An empty state: no row is active."""
    vocab = program.model.vocab_size
    zeros = partial(jnp.zeros, (batch,), jnp.int32)
    return DecodeState(
        pool=program.pool.allocate(),
        draft_pool=program.draft_pool.allocate() if program.draft_pool else {},
        sequences=Sequences(
            jnp.zeros((1, batch, table_width), jnp.int32),
            jnp.zeros((1, batch), jnp.int32),
            jnp.zeros((1, batch), jnp.int32),
            zeros(),
        ),
        progress=Progress(zeros(), zeros(), jnp.zeros(batch, bool), zeros(), zeros(), zeros(), zeros()),
        sampling=jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *a.shape)).copy(), _NEUTRAL),
        history=History(jnp.zeros((batch, vocab), jnp.int32), jnp.zeros((batch, vocab), bool)),
        drafter=program.drafter.init(batch, table_width * program.pool.page_size),
    )


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def prefill(
    params: Models,
    state: DecodeState,
    rows: Rows,
    tokens: Int[Array, "R T"],
    *,
    program: Program,
) -> DecodeState:
    """Write the keys and values of prompt chunks; the last token of a prompt is left to its first round as the root."""
    positions = rows.start[:, None] + jnp.arange(tokens.shape[1])
    chunk = rows, tokens, positions, None
    _, pool = forward(params.target, program.model, program.pool, *chunk, state.pool, state.sequences)
    draft_pool = state.draft_pool
    if program.draft_pool is not None:
        model = program.drafter.model
        _, draft_pool = forward(params.draft, model, program.draft_pool, *chunk, draft_pool, state.sequences)
    return state._replace(pool=pool, draft_pool=draft_pool)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def admit(
    state: DecodeState,
    row: Int[Array, ""],
    pages: Int[Array, "P"],
    prompt: Int[Array, "S"],
    prompt_length: Int[Array, ""],
    sampling: Sampling,
    *,
    program: Program,
) -> DecodeState:
    """Give a row to a request: its pages, its sampling and an empty history. It becomes active with `activate`.

    `prompt` is padded to any length; the request resumes after all but its last token.
    """
    sequences, progress, vocab = state.sequences, state.progress, program.model.vocab_size
    length = prompt_length - 1
    seen = jnp.where(jnp.arange(prompt.shape[0]) < prompt_length, prompt, vocab)
    in_prompt = jnp.zeros(vocab, bool).at[seen].set(True, mode="drop")
    start = Progress(prompt[length], *jnp.zeros(2, jnp.int32), *jnp.zeros(4, jnp.int32))
    return state._replace(
        sequences=Sequences(
            sequences.page_table.at[:, row].set(pages),
            sequences.length.at[:, row].set(length),
            sequences.dropped.at[:, row].set(0),
            sequences.position.at[row].set(length),
        ),
        progress=Progress(*(old.at[row].set(new.astype(old.dtype)) for old, new in zip(progress, start, strict=True))),
        sampling=jax.tree.map(lambda old, new: old.at[row].set(new), state.sampling, sampling),
        history=History(state.history.counts.at[row].set(0), state.history.in_prompt.at[row].set(in_prompt)),
        drafter=program.drafter.admit(state.drafter, row, prompt, prompt_length),
    )


@partial(jax.jit, donate_argnames="state")
def set_active(state: DecodeState, active: Bool[Array, "B"]) -> DecodeState:
    """Start prefilled rows and stop rows that the host has ended."""
    return state._replace(progress=state.progress._replace(active=active))


def select_rows(state: DecodeState, rows: Int[Array, "B2"]) -> DecodeState:
    """The same state for another batch bucket: row i is the old row `rows[i]`. The pool is not touched."""
    return _select(state._replace(pool={}, draft_pool={}), rows)._replace(pool=state.pool, draft_pool=state.draft_pool)


@jax.jit
def _select(state: DecodeState, rows: Int[Array, "B2"]) -> DecodeState:
    take = partial(jax.tree.map, lambda a: a[rows])
    sequences = state.sequences
    return state._replace(
        sequences=Sequences(
            sequences.page_table[:, rows],
            sequences.length[:, rows],
            sequences.dropped[:, rows],
            sequences.position[rows],
        ),
        progress=take(state.progress),
        sampling=take(state.sampling),
        history=take(state.history),
        drafter=take(state.drafter),
    )


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def run(
    params: Models, state: DecodeState, rounds: Int[Array, ""], least_active: Int[Array, ""], *, program: Program
) -> tuple[DecodeState, Output]:
    """Up to `rounds` rounds, for as long as at least `least_active` rows are active. Reads nothing back in between."""

    def going(carry):
        index, state, _ = carry
        return (index < rounds) & (jnp.sum(state.progress.active) >= least_active)

    def body(carry):
        index, state, output = carry
        state, output = one_round(params, program, state, output)
        return index + 1, state, output

    output = _empty_output(state.progress.token.shape[0], program)
    _, state, output = jax.lax.while_loop(going, body, (jnp.int32(0), state, output))
    return state, output


def one_round(params: Models, program: Program, state: DecodeState, output: Output) -> tuple[DecodeState, Output]:
    """Propose, forward on the tree, verify, commit: every method of speculation is this with another drafter."""
    drafter, progress, sequences = program.drafter, state.progress, state.sequences
    view = View(sequences, progress, _of_active(state.sampling, progress.active), state.history)
    proposal, drafter_state, draft_pool = drafter.propose(
        params.draft, state.drafter, state.draft_pool, view, program.draft_pool
    )
    proposal = proposal._replace(valid=proposal.valid & progress.active[:, None])
    choices = [partial(_decide, params.target, program, width, view, proposal) for width in drafter.widths]
    verdict, logprobs, pool = _run_one(choices, _narrowest(drafter, proposal), state.pool)
    emitted, finish = _ends(verdict, progress, view.sampling)
    progress = _advance(progress, verdict, proposal, emitted, finish)
    state = DecodeState(
        pool=pool,
        draft_pool=draft_pool,
        sequences=sequences._replace(length=sequences.length + emitted, position=sequences.position + emitted),
        progress=progress,
        sampling=state.sampling,
        history=_remember(state.history, verdict, emitted),
        drafter=drafter.observe(drafter_state, proposal, verdict, emitted),
    )
    return state, _emit(output, logprobs, verdict, emitted, progress)


def _run_one(choices: list[Callable[[Pool], Decision]], wanted: Int[Array, ""], pool: Pool) -> Decision:
    """The result of one of several functions of the pool: `lax.switch`, but with the pool updated where it lies.

    XLA copies a buffer that both branches of a conditional write; a loop that runs once or not at all needs no copy.
    """
    if len(choices) == 1:
        return choices[0](pool)
    verdict, logprobs, _ = jax.eval_shape(choices[0], pool)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (verdict, logprobs))
    carry = jnp.bool_(True), (*empty, pool)
    for index, choice in enumerate(choices):
        carry = jax.lax.while_loop(
            lambda carry, index=index: carry[0] & (wanted == index),
            lambda carry, choice=choice: (jnp.bool_(False), choice(carry[1][2])),
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
    hidden, pool = forward(params, program.model, program.pool, rows, tokens, positions, ancestors, pool, sequences)
    logits = logits_of(params, program.model, hidden)
    verdict = verify_coupled(tree, logits, proposal, view.sampling, view.history, progress.ordinal)
    if not tree.is_chain:
        accepted = jnp.where(progress.active, verdict.count, 0)
        pool = compact(program.pool, pool, sequences, verdict.path, accepted)
    on_path = jnp.take_along_axis(logits, verdict.path[..., None], axis=1) if width > 1 else logits
    top = min(MAX_LOGPROBS, program.model.vocab_size)
    logprobs = log_probabilities(on_path, verdict.tokens, view.sampling, top)
    missing = program.max_emitted - verdict.tokens.shape[1]

    def pad(a):
        return jnp.pad(a, ((0, 0), (0, missing), *[(0, 0)] * (a.ndim - 2)))

    verdict = verdict._replace(tokens=pad(verdict.tokens), path=pad(verdict.path))
    return verdict, jax.tree.map(pad, logprobs), pool


def _of_active(sampling: Sampling, active: Bool[Array, "B"]) -> Sampling:
    """Rows that stand still ask for nothing: no filter of theirs may cost the others time."""

    def pick(chosen, neutral):
        return jnp.where(active.reshape(-1, *[1] * neutral.ndim), chosen, neutral)

    return jax.tree.map(pick, sampling, _NEUTRAL)


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
    vocab = history.counts.shape[1]
    tokens = jnp.where(jnp.arange(depth) < emitted[:, None], verdict.tokens, vocab)
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


def _empty_output(batch: int, program: Program) -> Output:
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
