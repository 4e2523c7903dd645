"""What rounds cost: verify steps of each width and drafting, over a plain step. Timed on the engine's own programs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Int

from jaxspec import decode
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.kv.pool import Pool
from jaxspec.program import Program
from jaxspec.sampling import sampling_row
from jaxspec.tree import Tree
from jaxspec.types import DecodeState, Drafter, Models, Proposal, Verdict, View

ROUNDS = 8
"""Rounds of one timing. As many before it are not timed: a drafter that adapts its length settles in them."""


class Costs(NamedTuple):
    """Costs of a drafter, in plain steps of the same batch."""

    draft: float
    """Proposing and observing, once, where that costs the same whatever it comes to."""
    each: float
    """Every drafted token, where a model drafts one after the other."""
    verify: dict[int, float]
    """Forward, verification and commit of a row of so many tokens."""
    nodes: int
    """Tokens that a round drafts at most."""

    def drafting(self, drafted: int) -> float:
        """Cost of drafting so many tokens."""
        return self.draft + self.each * drafted

    def verifying(self, drafted: int) -> float:
        """Cost of verifying so many tokens, which is that of the least row that holds them."""
        return self.verify[min(width for width in self.verify if width > drafted)]


class Timing(NamedTuple):
    seconds: float
    drafted: int
    """Tokens, over all rounds."""


def measure_costs(
    engines: dict[str, Engine], batch: int, context: int, params: SamplingParams, repeats: int = 5
) -> dict[str, Costs]:
    """Costs of every engine's drafter for `batch` rows of `context` tokens each.

    Verify rows are timed in rounds whose drafts are fixed in advance, so that every row has the width in question;
    drafting is timed on its own. All are timed in turn, `repeats` times; a cost is the median of those within a turn.
    """
    engine = next(iter(engines.values()))
    params = msgspec.structs.replace(params, stop_token_ids=[])
    trees = {Tree(), *(e.program.drafter.tree.prefix(w) for e in engines.values() for w in e.program.drafter.widths)}
    timers: dict[Tree | str, Callable[[], Timing]] = {
        tree: _timer(engine, _fixed(tree), batch, context, params, _verify_rounds) for tree in trees
    }
    timers |= {
        name: _timer(e, e.program.drafter, batch, context, params, _draft_rounds)
        for name, e in engines.items()
        if e.program.drafter.tree.size
    }
    for timer in timers.values():
        timer()
    turns = [{what: timer() for what, timer in timers.items()} for _ in range(repeats)]
    cost = {what: statistics.median(turn[what].seconds / turn[Tree()].seconds for turn in turns) for what in timers}
    drafted = {what: turns[-1][what].drafted / ROUNDS for what in timers}
    return {
        name: _costs(e.program.drafter, cost.get(name, 0.0), drafted.get(name, 0.0), cost)
        for name, e in engines.items()
    }


def _costs(drafter: Drafter, drafting: float, drafted: float, cost: dict[Tree | str, float]) -> Costs:
    verify = {width: cost[drafter.tree.prefix(width)] for width in drafter.widths}
    if drafter.model is None:
        return Costs(drafting, 0.0, verify, drafter.tree.size)
    return Costs(0.0, drafting / max(drafted, 1.0), verify, drafter.tree.size)


def _fixed(tree: Tree) -> Drafter:
    """Drafts token 0 at every node, whatever the text."""

    def propose(params, state: tuple, pool: Pool, view: View, pool_spec) -> tuple[Proposal, tuple, Pool]:
        shape = (view.progress.token.shape[0], tree.size)
        return Proposal(jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)), state, pool

    return Drafter(
        tree=tree,
        widths=(tree.width,),
        init=lambda batch, context: (),
        admit=lambda state, row, prompt, length: state,
        propose=propose,
        observe=lambda state, proposal, verdict, emitted, hidden: state,
    )


def _timer(
    engine: Engine,
    drafter: Drafter,
    batch: int,
    context: int,
    params: SamplingParams,
    rounds: Callable[[Program, Models, DecodeState], tuple[DecodeState, Any]],
) -> Callable[[], Timing]:
    """A function that sets up `batch` rows of `context` tokens and times ROUNDS rounds."""
    page = engine.program.pool.page_size
    row_pages = -(-(context + (2 * ROUNDS + 1) * drafter.tree.width) // page)
    table_width = max(row_pages, -(-(engine.max_context + drafter.tree.size) // page))
    program = replace(
        engine.program,
        pool=replace(engine.program.pool, num_pages=batch * row_pages),
        drafter=drafter,
        max_rounds=ROUNDS,
    )
    tokens = np.arange(context, dtype=np.int32) % engine.spec.valid_vocab
    prompt = np.pad(tokens, (0, table_width * page - context))
    sampling = sampling_row(params, seed=0, max_tokens=2**30, eos_ids=())

    pages = np.arange(batch * row_pages, dtype=np.int32).reshape(batch, row_pages)
    table = np.pad(pages, ((0, 0), (0, table_width - row_pages)))

    def set_up() -> DecodeState:
        state = decode.init_state(program, batch, table_width, engine.device.mesh)
        state = decode.set_pages(state, table, np.zeros(batch, np.int32))
        for row in range(batch):
            state = decode.admit(state, np.int32(row), prompt, np.int32(context), sampling, program=program)
        return jax.block_until_ready(decode.set_active(state, np.ones(batch, bool)))

    def time_rounds() -> Timing:
        state = jax.block_until_ready(rounds(program, engine.device.params, set_up())[0])
        start = time.perf_counter()
        _, drafted = jax.block_until_ready(rounds(program, engine.device.params, state))
        return Timing(time.perf_counter() - start, int(drafted))

    return time_rounds


def _verify_rounds(program: Program, params: Models, state: DecodeState) -> tuple[DecodeState, int]:
    return decode.run(params, state, np.int32(ROUNDS), np.int32(1), program=program)[0], 0


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def _draft_rounds(program: Program, params: Models, state: DecodeState) -> tuple[DecodeState, Int[Array, ""]]:
    """Rounds without the target, in which every draft is accepted; also counts the drafts of the longest row.

    Each emits one token that is made of all the drafts, so that none is optimised away.
    """
    drafter, path = program.drafter, program.max_emitted
    one = jnp.ones_like(state.progress.token)
    hidden = jnp.ones((one.shape[0], program.model.embed_dim), params.target["norm"]["weight"].dtype)

    def body(_, carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, drafted = carry
        view = View(state.sequences, state.progress, state.sampling, state.history)
        proposal, drafter_state, draft_pool = drafter.propose(
            params.draft, state.drafter, state.draft_pool, view, program.draft_pool
        )
        token = jnp.sum(proposal.tokens, axis=1, keepdims=True) % program.model.valid_vocab
        tokens = jnp.broadcast_to(token, (one.shape[0], path))
        count = jnp.sum(proposal.valid, axis=1)
        verdict = Verdict(tokens, jnp.zeros_like(tokens), jnp.minimum(count + 1, path), one > 0)
        drafter_state = drafter.observe(drafter_state, proposal, verdict, one, hidden)
        return state._replace(drafter=drafter_state, draft_pool=draft_pool), drafted + jnp.max(count)

    return jax.lax.fori_loop(0, ROUNDS, body, (state, jnp.int32(0)))
