"""What heads are trained on: which token each of them must guess at a place of a text, and how far off it is."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.heads import HeadsSpec, head_hidden, of_base, output_of
from jaxspec.models.linear import linear
from jaxspec.models.spec import ModelSpec
from jaxspec.types import Params

TOP = (1, 3, 5)
"""Guesses that the label may be among, for the accuracies that are counted."""
RANKS = 16
"""Guesses that are counted one by one, for the choice of a tree."""


class Batch(NamedTuple):
    """Rows of packed texts, N rows of S tokens."""

    tokens: Int[Array, "N S"]
    segment: Int[Array, "N S"]
    """Which text of its row a token belongs to; 0 is padding."""
    position: Int[Array, "N S"]
    """Index of a token in its text."""
    target: Bool[Array, "N S"]
    """Tokens to be learned: the answers."""
    hidden: Float[Array, "N S E"] | None = None
    """The model's normalised hidden states, where they were computed once and kept."""


class Tally(NamedTuple):
    """Sums over the labels of each head, K heads."""

    labels: Float[Array, "K"]
    loss: Float[Array, "K"]
    """Cross entropy in nats, of the labels that the head can guess."""
    guessable: Float[Array, "K"]
    hits: Float[Array, "K top"]
    """Labels among the head's TOP likeliest guesses."""
    ranks: Float[Array, "K ranks"]
    """Labels that are the head's i-th guess."""


def after(a: Array, count: int) -> Array:
    """`[N, S]` moved so that place t has what place t + count had; what is past the end is 0."""
    return jnp.pad(a[:, count:], ((0, 0), (0, min(count, a.shape[1]))))


def labels_of(batch: Batch, head: int) -> tuple[Int[Array, "N S"], Bool[Array, "N S"]]:
    """The token that a head must guess at each place, k + 2 places on, and whether it counts: it is of the same text
    and to be learned."""
    counts = after(batch.target, head + 2) & (after(batch.segment, head + 2) == batch.segment) & (batch.segment > 0)
    return after(batch.tokens, head + 2), counts


def paths_of(batch: Batch, head: int) -> Int[Array, "N S P"]:
    """The tokens between a place and what a head guesses there: those of the next k + 1 places."""
    return jnp.stack([after(batch.tokens, step) for step in range(1, head + 2)], axis=-1)


def in_chunks(arrays, chunk: int):
    """Arrays `[N, S, ..]` as `[chunks, about chunk, ..]`, zeros where there is no place. A chunk has as many places of
    every row, so that rows on several devices stay there."""
    rows, places = jax.tree.leaves(arrays)[0].shape[:2]
    columns = min(max(chunk // rows, 1), places)
    count = -(-places // columns)

    def cut(a: Array) -> Array:
        rest = a.shape[2:]
        whole = jnp.pad(a, ((0, 0), (0, count * columns - places), *[(0, 0)] * len(rest)))
        return jnp.moveaxis(whole.reshape(rows, count, columns, *rest), 1, 0).reshape(count, rows * columns, *rest)

    return jax.tree.map(cut, arrays)


class Shared(NamedTuple):
    """What all heads use and none of them changes."""

    base: Params
    """`heads.of_base`."""
    place: Int[Array, "V"]
    """Where each token id of the model is among those that heads guess; -1 for the others."""
    teacher: Float[Array, "vocab E"]
    """The model's own projection to the tokens that heads guess."""


def shared_of(spec: HeadsSpec, params: Params, model: ModelSpec, base: Params) -> Shared:
    """What heads use of the model with parameters `base`."""
    teacher = of_base(replace(spec, own_output=False), params, model, base)["output"]
    guessed = params.get("token_map", jnp.arange(spec.vocab))
    place = jnp.full(model.vocab_size, -1).at[guessed].set(jnp.arange(spec.vocab))
    return Shared(of_base(spec, params, model, base), place, teacher)


def heads_loss(
    spec: HeadsSpec,
    heads: tuple[Params, ...],
    shared: Shared,
    batch: Batch,
    hidden: Float[Array, "N S E"],
    *,
    decay: float,
    soft: float,
    chunk: int,
) -> tuple[Float[Array, ""], Tally]:
    """Σ decay^k · (mean cross entropy of head k), and what it is made of (Cai et al., 2024, section 2.2).

    The mean is over the labels that the head can guess. `soft` mixes the model's own distribution of the label, given
    all before it, into the label: 0 is the label alone, 1 the distribution. The logits of `chunk` places are held at
    once, in both directions.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    tallies = []
    for k, head in enumerate(heads):
        ids, counts = labels_of(batch, k)
        x = head_hidden(spec, head, shared.base, flat, paths_of(batch, k).reshape(len(flat), -1))
        # The model guesses the label from the hidden state one place before it.
        sight = jax.vmap(partial(after, count=k + 1), -1, -1)(hidden) if soft else hidden[..., :0]
        data = x.reshape(hidden.shape), jax.lax.stop_gradient(sight), shared.place[ids], counts
        tallies.append(_tally(output_of(spec, head, shared.base), shared.teacher, data, soft, chunk))
    tally = Tally(*(jnp.stack(parts) for parts in zip(*tallies, strict=True)))
    mean = tally.loss / jnp.maximum(tally.guessable, 1)
    return jnp.sum(mean * decay ** jnp.arange(spec.num_heads)), tally


def _tally(output, teacher, data, soft: float, chunk: int) -> Tally:
    """The sums over all places, `chunk` of them at a time."""

    @jax.checkpoint
    def add(tally: Tally, part) -> tuple[Tally, None]:
        x, sight, label, counts = part
        known = counts & (label >= 0)
        logits = linear(x, output).astype(jnp.float32)
        own = jnp.take_along_axis(logits, jnp.maximum(label, 0)[:, None], axis=1)
        total = jax.nn.logsumexp(logits, axis=-1)
        loss = total - own[:, 0]
        if soft:
            wanted = jax.nn.softmax(linear(sight, teacher).astype(jnp.float32), axis=-1)
            loss = (1 - soft) * loss + soft * (total - jnp.sum(wanted * logits, axis=-1))
        rank = jnp.sum(logits > own, axis=-1)
        hits = [jnp.sum(known & (rank < top)) for top in TOP]
        ranks = jnp.sum((rank[:, None] == jnp.arange(RANKS)) & known[:, None], axis=0)
        sums = jnp.sum(counts), jnp.sum(jnp.where(known, loss, 0)), jnp.sum(known), jnp.stack(hits), ranks
        return Tally(*(old + new for old, new in zip(tally, sums, strict=True))), None

    none = jnp.zeros(())
    zero = Tally(none, none, none, jnp.zeros(len(TOP)), jnp.zeros(RANKS))
    return jax.lax.scan(add, zero, in_chunks(data, chunk))[0]
