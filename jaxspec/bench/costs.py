"""What rounds cost: verify steps of each width and drafting, over a plain step. Timed on the engine's own programs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxspec import decode
from jaxspec.config import SamplingParams
from jaxspec.decode import Program
from jaxspec.engine import Engine
from jaxspec.sampling import sampling_row
from jaxspec.tree import Tree
from jaxspec.types import DecodeState, Drafter, Models, Proposal, Verdict, View

ROUNDS = 8
"""Rounds of one timing."""


class Costs(NamedTuple):
    """Costs of a drafter, in plain steps of the same batch."""

    draft: float
    """Proposing and observing, once."""
    verify: dict[int, float]
    """Forward, verification and commit of a row of so many tokens."""
    nodes: int
    """Tokens that a round drafts at most."""

    def width(self, drafted: int) -> int:
        """Tokens of the verify row of a round with so many drafts."""
        return next(width for width in sorted(self.verify) if width > drafted)


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
    timers: dict[Tree | str, Callable[[], float]] = {
        tree: _timer(engine, _fixed(tree), batch, context, params, _verify_rounds) for tree in trees
    }
    timers |= {
        name: _timer(e, e.program.drafter, batch, context, params, _draft_rounds)
        for name, e in engines.items()
        if e.program.drafter.tree.size
    }
    for timer in timers.values():
        timer()
    ratios: dict[Tree | str, list[float]] = {what: [] for what in timers}
    for _ in range(repeats):
        seconds = {what: timer() for what, timer in timers.items()}
        for what, listed in ratios.items():
            listed.append(seconds[what] / seconds[Tree()])
    cost = {what: statistics.median(listed) for what, listed in ratios.items()}
    return {name: _costs_of(name, e.program.drafter, cost) for name, e in engines.items()}


def _costs_of(name: str, drafter: Drafter, cost: dict[Tree | str, float]) -> Costs:
    return Costs(cost.get(name, 0.0), {w: cost[drafter.tree.prefix(w)] for w in drafter.widths}, drafter.tree.size)


def _fixed(tree: Tree) -> Drafter:
    """Drafts token 0 at every node, whatever the text."""

    def propose(params, state: tuple, pool: dict, view: View) -> tuple[Proposal, tuple, dict]:
        shape = (view.progress.token.shape[0], tree.size)
        return Proposal(jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)), state, pool

    return Drafter(
        tree=tree,
        widths=(tree.width,),
        init=lambda batch, context: (),
        admit=lambda state, row, prompt, length: state,
        propose=propose,
        observe=lambda state, proposal, verdict, emitted: state,
    )


def _timer(
    engine: Engine,
    drafter: Drafter,
    batch: int,
    context: int,
    params: SamplingParams,
    rounds: Callable[[Program, Models, DecodeState], DecodeState],
) -> Callable[[], float]:
    """A function that sets up `batch` rows of `context` tokens and returns the seconds that ROUNDS rounds take."""
    page = engine.program.pool.page_size
    row_pages = -(-(context + (ROUNDS + 1) * drafter.tree.width) // page)
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

    def set_up() -> DecodeState:
        state = decode.init_state(program, batch, table_width)
        for row in range(batch):
            pages = np.pad(np.arange(row_pages, dtype=np.int32) + row * row_pages, (0, table_width - row_pages))
            state = decode.admit(state, np.int32(row), pages, prompt, np.int32(context), sampling, program=program)
        return jax.block_until_ready(decode.set_active(state, np.ones(batch, bool)))

    def seconds() -> float:
        state = set_up()
        start = time.perf_counter()
        jax.block_until_ready(rounds(program, engine.params, state))
        return time.perf_counter() - start

    return seconds


def _verify_rounds(program: Program, params: Models, state: DecodeState) -> DecodeState:
    return decode.run(params, state, np.int32(ROUNDS), np.int32(1), program=program)[0]


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def _draft_rounds(program: Program, params: Models, state: DecodeState) -> DecodeState:
    """Rounds without the target. Each emits a token that is made of all drafts, so that none is optimised away."""
    drafter, path = program.drafter, program.max_emitted
    one = jnp.ones_like(state.progress.token)

    def body(_, state: DecodeState) -> DecodeState:
        view = View(state.sequences, state.progress, state.sampling, state.history)
        proposal, drafter_state, draft_pool = drafter.propose(params.draft, state.drafter, state.draft_pool, view)
        token = jnp.sum(proposal.tokens, axis=1, keepdims=True) % program.model.valid_vocab
        tokens = jnp.broadcast_to(token, (one.shape[0], path))
        verdict = Verdict(tokens, jnp.zeros_like(tokens), one, one > 0)
        return state._replace(drafter=drafter.observe(drafter_state, proposal, verdict, one), draft_pool=draft_pool)

    return jax.lax.fori_loop(0, ROUNDS, body, state)
