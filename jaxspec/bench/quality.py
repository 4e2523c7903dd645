"""What a way to store weights, keys or values, or to let go of them, does to what a model says: perplexity, agreement,
divergence.

Text is teacher-forced in windows, each from an empty cache and in rows as prefill has them: what a token attends to is
what the format has stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import PREFILL_ROW
from jaxspec.errors import LoadError
from jaxspec.kv.pool import Pool, PoolSpec, condense
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward, logits_of
from jaxspec.types import Params, Sequences
from pallas_kernels import Rows

CALL_ROWS = 4
"""Rows of a forward call: more of them would pass over pages that only the last one sees."""
PIECE = 128
"""Tokens whose logits are there at once."""


class Subject(NamedTuple):
    """A model, and how it stores keys and values."""

    params: Params
    spec: ModelSpec
    pool: PoolSpec
    """Of any number of pages."""


class Marks(NamedTuple):
    """What a subject makes of every token of a window but its first, in nats."""

    surprise: Float[Array, "N"]
    """-log p of the token."""
    agrees: Bool[Array, "N"]
    """Whether its likeliest token is the reference's."""
    divergence: Float[Array, "N"]
    """Kullback and Leibler's, of its distribution from the reference's: sum of p log p/q with p the reference's."""


def compare(
    subjects: Sequence[Subject], window: Sequence[int], tell: Callable[[int], None] = lambda tokens: None
) -> list[Marks]:
    """The marks of every subject on one window; the first subject is the reference.

    A window has a multiple of PREFILL_ROW tokens. `tell` hears of its tokens each time a subject has read it.
    LoadError where a model gives logits that are not finite.
    """
    read = []
    for subject in subjects:
        read.append(jax.block_until_ready(read_window(subject, window)))
        tell(len(window))
    marks: list[list[Marks]] = [[] for _ in subjects]
    for start in range(0, len(window) - 1, PIECE):
        piece = slice(start, min(start + PIECE, len(window) - 1))
        targets = jnp.asarray(window[piece.start + 1 : piece.stop + 1], jnp.int32)
        expected = None
        for subject, hidden, own in zip(subjects, read, marks, strict=True):
            found = _predict(subject.params, hidden[piece], spec=subject.spec)
            expected = expected or found
            own.append(_judge(expected, found, targets))
    joined = [Marks(*(jnp.concatenate(part) for part in zip(*own, strict=True))) for own in marks]
    if not all(jnp.all(jnp.isfinite(own.surprise)) for own in joined):
        raise LoadError("the model gave logits that are not finite: check its weights")
    return joined


def read_window(subject: Subject, window: Sequence[int]) -> Float[Array, "N E"]:
    """Normalised hidden states at every token of a window, which has a multiple of PREFILL_ROW tokens."""
    if subject.pool.policy.budget is not None:
        return _read_singly(subject.params, jnp.asarray(window, jnp.int32), spec=subject.spec, pool_spec=subject.pool)
    rows, table = np.asarray(window, np.int32).reshape(-1, PREFILL_ROW), _table(subject.pool, len(window))
    pool_spec = replace(subject.pool, num_pages=int(table.max()) + 1)
    pool, hidden = pool_spec.allocate(1), []
    for first in range(0, len(rows), CALL_ROWS):
        call = jnp.asarray(rows[first : first + CALL_ROWS])
        states, pool = _extend(
            subject.params, call, np.int32(first * PREFILL_ROW), table, pool, spec=subject.spec, pool_spec=pool_spec
        )
        hidden.append(states)
    return jnp.concatenate(hidden)


def _table(pool: PoolSpec, tokens: int) -> Int[np.ndarray, "P"]:
    """The pages of a text: where a policy lets go of the middle, later tokens are written over what none sees."""
    table, policy, page = np.arange(-(-tokens // pool.page_size), dtype=np.int32), pool.policy, pool.page_size
    if policy.last is None:
        return table
    first = -(-policy.first // page)
    again = -(-(policy.last + CALL_ROWS * PREFILL_ROW - 1) // page) + 1
    return np.where(table < first, table, first + (table - first) % again)


@partial(jax.jit, static_argnames=("spec", "pool_spec"), donate_argnames="pool")
def _extend(
    params: Params,
    tokens: Int[Array, "R T"],
    start: Int[Array, ""],
    table: Int[Array, "P"],
    pool: Pool,
    *,
    spec: ModelSpec,
    pool_spec: PoolSpec,
) -> tuple[Float[Array, "N E"], Pool]:
    """The next rows of the only sequence there is."""
    count, width = tokens.shape
    starts = start + width * jnp.arange(count)
    zero = jnp.zeros(1, jnp.int32)
    sequences = Sequences(table[None, None], zero[None], zero[None], zero)
    rows = Rows(jnp.zeros(count, jnp.int32), starts, jnp.full(count, width))
    positions = starts[:, None] + jnp.arange(width)
    hidden, pool = forward(params, spec, pool_spec, rows, tokens, positions, None, pool, sequences)
    return hidden.reshape(-1, spec.embed_dim), pool


@partial(jax.jit, static_argnames=("spec", "pool_spec"))
def _read_singly(
    params: Params, window: Int[Array, "N"], *, spec: ModelSpec, pool_spec: PoolSpec
) -> Float[Array, "N E"]:
    """The same where tokens have votes: each is a round of its own, as if it had been decoded."""
    pages, limit, budget = pool_spec.round_pages or 0, pool_spec.limit or 0, pool_spec.policy.budget or 0
    pool_spec = replace(pool_spec, num_pages=pages, slots=pages * pool_spec.page_size)
    table, none, one = jnp.arange(pages), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    sequences = Sequences(table[None, None], none[None], none[None], none)

    def step(carry, token):
        pool, length, position = carry
        rows = Rows(none, length[None], one)
        hidden, pool = forward(
            params, spec, pool_spec, rows, token[None, None], position[None, None], None, pool, sequences
        )
        full = length + 1 >= limit
        pool = jax.lax.cond(
            full, lambda pool: condense(pool_spec, pool, none[0], length + 1, table, table), lambda pool: pool, pool
        )
        return (pool, jnp.where(full, budget, length + 1), position + 1), hidden[0, 0]

    return jax.lax.scan(step, (pool_spec.allocate(1), none[0], none[0]), window)[1]


class _Prediction(NamedTuple):
    log_probs: Float[Array, "N V"]
    likeliest: Int[Array, "N"]


@partial(jax.jit, static_argnames="spec")
def _predict(params: Params, hidden: Float[Array, "N E"], *, spec: ModelSpec) -> _Prediction:
    logits = logits_of(params, spec, hidden)
    return _Prediction(jax.nn.log_softmax(logits), jnp.argmax(logits, axis=1))


@jax.jit
def _judge(expected: _Prediction, found: _Prediction, targets: Int[Array, "N"]) -> Marks:
    chance = jnp.exp(expected.log_probs)
    return Marks(
        -jnp.take_along_axis(found.log_probs, targets[:, None], axis=1)[:, 0],
        expected.likeliest == found.likeliest,
        # Padding of the vocabulary has probability 0 in both, and the logarithms' difference is not a number.
        jnp.sum(jnp.where(chance > 0, chance * (expected.log_probs - found.log_probs), 0.0), axis=1),
    )


def figures(own: Sequence[Marks], reference: Sequence[Marks]) -> dict[str, float]:
    """Perplexity, its change against the reference's, share of agreement and mean divergence over some windows."""
    nats, base = (np.mean(np.concatenate([m.surprise for m in marks]), dtype=np.float64) for marks in (own, reference))
    return {
        "perplexity": float(np.exp(nats)),
        "perplexity_change": float(np.expm1(nats - base)),
        "agreement": float(np.mean(np.concatenate([m.agrees for m in own]))),
        "kl": float(np.mean(np.concatenate([m.divergence for m in own]), dtype=np.float64)),
    }
