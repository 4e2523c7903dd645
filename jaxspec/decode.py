"""The decode loop on the device: prompts in, rounds, and the state they carry. Knows protocols, no concrete plug-in."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jaxspec import parallel, vocabulary
from jaxspec.kv import scores
from jaxspec.kv.pool import OF_SEQUENCES, Pool, condense, duplicate, partition, put_pages, take_pages
from jaxspec.kv.tail import TAIL
from jaxspec.models.transformer import forward
from jaxspec.program import NEUTRAL, Program
from jaxspec.round import empty_output, moving, one_round
from jaxspec.types import DecodeState, History, Models, Output, Progress, Sampling, Sequences
from pallas_kernels import Rows, pack


def _on_each_device(specs: Callable[[DecodeState], Any] = lambda state: state) -> Callable[[Callable], Callable]:
    """Of a function of a state and more, given one by one and apart from what is static: runs it on what each device
    has of them. `specs` tells how its result is shared, by how the state is."""

    def decorate(fn: Callable) -> Callable:
        @wraps(fn)
        def whole(*arguments, **static):
            state = next(argument for argument in arguments if isinstance(argument, DecodeState))
            return parallel.on_each(partial(fn, **static), specs(parallel.specs_of(state)), *arguments)

        return whole

    return decorate


@partial(jax.jit, static_argnames=("program", "batch", "table_width", "mesh"))
def init_state(program: Program, batch: int, table_width: int, mesh: Mesh | None = None) -> DecodeState:
    """An empty state: no row is active. It is on the devices of a mesh, or on the default one."""
    words: Any = P(None, parallel.MODEL)
    all_of_it: Any = P()
    pool, draft_pool = partitions_of(program)
    specs = DecodeState(
        pool=pool,
        draft_pool=draft_pool,
        sequences=all_of_it,
        progress=all_of_it,
        sampling=all_of_it,
        history=words,
        drafter=all_of_it,
    )
    return parallel.on_each(partial(_empty_state, program, batch, table_width), specs, mesh=mesh)


def partitions_of(program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the devices of a mesh share the arrays of the pool, and of the draft's."""
    draft = program.draft_pool
    return partition(program.pool), partition(draft, program.drafter.model.share > 1) if draft else {}


def _empty_state(program: Program, batch: int, table_width: int) -> DecodeState:
    vocab = vocabulary.columns(program.model.vocab_size)
    zeros = partial(jnp.zeros, (batch,), jnp.int32)
    return DecodeState(
        pool=program.pool.allocate(batch),
        draft_pool=program.draft_pool.allocate(batch) if program.draft_pool else {},
        sequences=Sequences(
            jnp.zeros((1, batch, table_width), jnp.int32),
            jnp.zeros((1, batch), jnp.int32),
            jnp.zeros((1, batch), jnp.int32),
            zeros(),
        ),
        progress=Progress(zeros(), zeros(), jnp.zeros(batch, bool), zeros(), zeros(), zeros(), zeros()),
        sampling=jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *a.shape)).copy(), NEUTRAL),
        history=History(jnp.zeros((batch, vocab), jnp.int32), jnp.zeros((batch, vocab), bool)),
        drafter=program.drafter.init(batch, table_width * program.pool.page_size),
    )


@partial(jax.jit, static_argnames=("program", "width", "votes"), donate_argnames="state")
@_on_each_device()
def prefill(
    params: Models,
    state: DecodeState,
    rows: Rows,
    tokens: Int[Array, "N"],
    *,
    program: Program,
    width: int,
    votes: bool = False,
) -> DecodeState:
    """Write the keys and values of prompt chunks; the last token of a prompt is left to its first round as the root.

    `tokens` holds the rows' tokens one row after the other; no row has more than `width`. With `votes` the first token
    of each row tells what it looks at, for policies that want to know.
    """
    packing = pack(rows, tokens.shape[0], width)
    positions = (rows.start + state.sequences.dropped[0, rows.sequence])[packing.row] + packing.column
    chunk = rows, tokens[None], positions[None], None
    pool_spec = program.pool if votes else program.pool.silent
    _, pool = forward(params.target, program.model, pool_spec, *chunk, state.pool, state.sequences, packing)
    draft_pool = state.draft_pool
    if program.draft_pool is not None:
        model = program.drafter.model
        _, draft_pool = forward(params.draft, model, program.draft_pool, *chunk, draft_pool, state.sequences, packing)
    return state._replace(pool=pool, draft_pool=draft_pool)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
@_on_each_device()
def admit(
    state: DecodeState,
    row: Int[Array, ""],
    prompt: Int[Array, "S"],
    prompt_length: Int[Array, ""],
    sampling: Sampling,
    *,
    program: Program,
) -> DecodeState:
    """Give a row to a request: its sampling and an empty history. It has pages by `set_pages`, rounds by `set_active`.

    `prompt` is padded to any length; the request resumes after all but its last token.
    """
    sequences, progress, vocab = state.sequences, state.progress, state.history.counts.shape[1]
    length = prompt_length - 1
    seen = jnp.where(jnp.arange(prompt.shape[0]) < prompt_length, vocabulary.column(prompt, vocab), vocab)
    in_prompt = jnp.zeros(vocab, bool).at[seen].set(True, mode="drop")
    start = Progress(prompt[length], *jnp.zeros(2, jnp.int32), *jnp.zeros(4, jnp.int32))
    return state._replace(
        pool=scores.clear(state.pool, row),
        sequences=Sequences(
            sequences.page_table,
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
@_on_each_device()
def set_active(state: DecodeState, active: Bool[Array, "B"]) -> DecodeState:
    """Start prefilled rows and stop rows that the host has ended."""
    return state._replace(progress=state.progress._replace(active=active))


@partial(jax.jit, donate_argnames="state")
@_on_each_device()
def set_pages(state: DecodeState, table: Int[Array, "B P"], dropped: Int[Array, "B"]) -> DecodeState:
    """The pages of all rows, as the host has reserved them, and how many slots it has given back of each."""
    sequences = state.sequences
    length = sequences.length + sequences.dropped - dropped
    return state._replace(sequences=Sequences(table[None], length, dropped[None], sequences.position))


@partial(jax.jit, static_argnames="program", donate_argnames="state")
@_on_each_device()
def copy_page(state: DecodeState, source: Int[Array, ""], target: Int[Array, ""], *, program: Program) -> DecodeState:
    """Copy a page of every layer, the drafter's included: what a fork does with a page that is not full."""
    pool = duplicate(program.pool, state.pool, source, target)
    draft_pool = state.draft_pool
    if program.draft_pool is not None:
        draft_pool = duplicate(program.draft_pool, draft_pool, source, target)
    return state._replace(pool=pool, draft_pool=draft_pool)


class Stored(NamedTuple):
    """Pages as they are stored, `[N, L, ..]` an array: what a tier keeps of them, bit for bit."""

    pool: Pool
    draft_pool: Pool


def specs_of_stored(pool: dict[str, Any], draft_pool: dict[str, Any]) -> Stored:
    """How pages are shared, by how the arrays of the pools are."""

    def pages(of: dict[str, Any]) -> dict[str, Any]:
        return {name: P(None, *spec) for name, spec in of.items() if name not in OF_SEQUENCES}

    return Stored(pages(pool), pages(draft_pool))


def page_of(state: DecodeState, program: Program) -> Stored:
    """Shapes and types of one page `[L, ..]`, over all devices that share it."""

    def one(pool: dict[str, Any]) -> dict[str, Any]:
        pages = {name: array for name, array in pool.items() if name not in OF_SEQUENCES}
        layers = {name: (array.shape[0] // program.pool.num_pages, *array.shape[1:]) for name, array in pages.items()}
        return {name: jax.ShapeDtypeStruct(layers[name], array.dtype) for name, array in pages.items()}

    return Stored(one(state.pool), one(state.draft_pool))


@partial(jax.jit, static_argnames="program")
@_on_each_device(lambda state: specs_of_stored(state.pool, state.draft_pool))
def read_pages(state: DecodeState, pages: Int[Array, "N"], *, program: Program) -> Stored:
    """Copies of pages of every layer, the drafter's included."""
    draft = program.draft_pool
    return Stored(
        take_pages(program.pool, state.pool, pages), take_pages(draft, state.draft_pool, pages) if draft else {}
    )


@partial(jax.jit, static_argnames="program", donate_argnames="state")
@_on_each_device()
def write_pages(state: DecodeState, pages: Int[Array, "N"], stored: Stored, *, program: Program) -> DecodeState:
    """The pages with what `read_pages` found in some; those out of range are padding."""
    pool, draft_pool = put_pages(program.pool, state.pool, pages, stored.pool), state.draft_pool
    if program.draft_pool is not None:
        draft_pool = put_pages(program.draft_pool, draft_pool, pages, stored.draft_pool)
    return state._replace(pool=pool, draft_pool=draft_pool)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
@_on_each_device()
def condense_row(
    state: DecodeState, row: Int[Array, ""], source: Int[Array, "P"], target: Int[Array, "P"], *, program: Program
) -> DecodeState:
    """Move what stays of a row's slots from the pages `source` to `target`, the drafter's included; `set_pages` then
    tells how many are left."""
    length = state.sequences.length[0, row]
    pool = condense(program.pool, state.pool, row, length, source, target)
    draft_pool = state.draft_pool
    if program.draft_pool is not None:
        draft_pool = condense(program.draft_pool, draft_pool, row, length, source, target)
    return state._replace(pool=pool, draft_pool=draft_pool)


class Saved(NamedTuple):
    """All that a row knows besides its pages: a request that gave way goes on from it in any row."""

    progress: Progress
    sampling: Sampling
    history: History
    drafter: Any
    tail: Pool
    """The group that it is in, where the format has such."""


def _of_saved(state: DecodeState) -> Saved:
    words: Any = P(parallel.MODEL)
    all_of_it: Any = P()
    tail: dict[str, Any] = {name: P(*spec[1:]) for name, spec in state.pool.items() if name == TAIL}
    return Saved(all_of_it, all_of_it, words, all_of_it, tail)


def _saved(state: DecodeState) -> Saved:
    """Of all rows."""
    tail = {name: array for name, array in state.pool.items() if name == TAIL}
    return Saved(state.progress, state.sampling, state.history, state.drafter, tail)


@jax.jit
@_on_each_device(_of_saved)
def save_row(state: DecodeState, row: Int[Array, ""]) -> Saved:
    """Of a request that gives way."""
    return jax.tree.map(lambda a: a[row], _saved(state))


@partial(jax.jit, donate_argnames="state")
@_on_each_device()
def restore_row(state: DecodeState, row: Int[Array, ""], length: Int[Array, ""], saved: Saved) -> DecodeState:
    """Give a row to a request that had one before; `length` slots are committed once its tokens are written again."""
    then = jax.tree.map(lambda old, new: old.at[row].set(new), _saved(state), saved)
    sequences = state.sequences._replace(
        length=state.sequences.length.at[:, row].set(length),
        dropped=state.sequences.dropped.at[:, row].set(0),
        position=state.sequences.position.at[row].set(length),
    )
    return state._replace(
        pool=state.pool | then.tail,
        sequences=sequences,
        progress=then.progress,
        sampling=then.sampling,
        history=then.history,
        drafter=then.drafter,
    )


def select_rows(state: DecodeState, rows: Int[Array, "B2"]) -> DecodeState:
    """The same state for another batch bucket: row i is the old row `rows[i]`. Pages are not touched."""
    tails = {name: array for name, array in state.pool.items() if name in OF_SEQUENCES}
    found = _select(state._replace(pool=tails, draft_pool={}), rows)
    return found._replace(pool=state.pool | found.pool, draft_pool=state.draft_pool)


@jax.jit
@_on_each_device()
def _select(state: DecodeState, rows: Int[Array, "B2"]) -> DecodeState:
    take = partial(jax.tree.map, lambda a: a[rows])
    sequences = state.sequences
    return state._replace(
        pool=take(state.pool),
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
@_on_each_device(lambda state: (state, P()))
def run(
    params: Models, state: DecodeState, rounds: Int[Array, ""], least_active: Int[Array, ""], *, program: Program
) -> tuple[DecodeState, Output]:
    """Up to `rounds` rounds, for as long as at least `least_active` rows are moving. Reads nothing back in between."""

    def going(carry):
        index, state, _ = carry
        return (index < rounds) & (jnp.sum(moving(program, state)) >= least_active)

    def body(carry):
        index, state, output = carry
        state, output = one_round(params, program, state, output)
        return index + 1, state, output

    output = empty_output(state.progress.token.shape[0], program)
    _, state, output = jax.lax.while_loop(going, body, (jnp.int32(0), state, output))
    return state, output
