"""A language model in exact integers behind the interface of `forward`, and its texts without any cache.

Each layer writes a token's state and position into the pool, and its next state is a hash of all (state, position)
that it may see there, the sum modulo a prime. So every logit depends on every slot of the context, to the bit, and on
the right slots of the layer below having been seen when those were written.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import noise
from jaxspec.config import SamplingParams
from jaxspec.kv.policy import FULL, Policy
from jaxspec.kv.pool import append
from jaxspec.kv.scores import vote
from jaxspec.models.spec import ModelSpec
from pallas_kernels import visible_slots
from tests.oracles.heavy import Rule
from tests.oracles.numpy_sampler import adjusted, kept

PRIME = 4093
VOCAB, KNOWN, CONTEXT = 320, 306, 120
CYCLE = 6
"""Tokens that a text goes round in until its hash throws it out: something for drafters to find."""
FIRST = 66
SPEC = ModelSpec(
    vocab_size=VOCAB,
    valid_vocab=KNOWN,
    num_layers=2,
    embed_dim=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    mlp_dim=1,
    norm_eps=0.125,  # of no other model: compiled programs are kept by it
    inv_freq=(),
    max_context=CONTEXT,
    tied_embeddings=True,
)


def _mixed(layer: int, state, position):
    """What one slot adds to the hash: its state weighted by a number of its position. Below 2^25."""
    return (state + 7 + layer) * (31 * position + 11 + layer) % PRIME


def _look(mixed, state):
    """How much a token in this state looks at a slot, a number that many slots have in common."""
    return (mixed + 5 * state) % 7


def forward(
    params, spec, pool_spec, rows, tokens, positions, ancestors, pool, sequences, packing=None, *, distinct=False
):
    """In place of `jaxspec.models.transformer.forward`; hidden states are (hash, token)."""
    if packing is not None:
        tokens, positions = tokens[0][packing.token], positions[0][packing.token]
    table, page = sequences.page_table[0], pool_spec.page_size
    slots = jnp.arange(table.shape[1] * page)
    variant, left_out = pool_spec.policy.variant, pool_spec.policy.left_out(positions)
    visible = visible_slots(rows, slots, tokens.shape[1], ancestors, variant)
    times = 1 if left_out is None else 1 + left_out[..., None] * (slots < variant.sinks)
    state = tokens
    for layer in range(spec.num_layers):
        k, v = (a.astype(jnp.float32)[..., None, None] for a in (state, positions))
        pool = append(pool_spec, pool, layer, rows, table, k, v, distinct)
        pages = (table[rows.sequence] + layer * pool_spec.num_pages).reshape(-1)
        states, places = (
            pool_spec.format.read(pool, pages, which).reshape(rows.start.shape[0], -1).astype(jnp.int32)
            for which in (0, 1)
        )
        mixed = _mixed(layer, states, places)
        if variant.mass:
            mass = jnp.where(visible[:, 0], _look(mixed, state[:, :1]), 0).astype(jnp.float32)
            pool = vote(pool, layer, rows, mass[:, None])
        added = jnp.where(visible, mixed[:, None] * times, 0)
        state = jnp.sum(added, axis=-1) % PRIME
    hidden = jnp.stack([state, tokens], axis=-1).astype(jnp.float32)
    return (hidden if packing is None else hidden[packing.row, packing.column][None]), pool


def logits_of(params, spec, hidden):
    """In place of `jaxspec.models.transformer.logits_of`: multiples of 1/64."""
    return _logits(*(hidden[..., i].astype(jnp.int32) for i in (0, 1)), jnp)


def _logits(state, token, xp):
    ids = xp.arange(VOCAB)
    spread = (state[..., None] * (7 * ids + 3) % 257).astype(xp.float32) / 64
    usual = (ids == FIRST + (token[..., None] + 1) % CYCLE) & (state[..., None] % 3 != 0)
    return xp.where(ids < KNOWN, spread + 8 * usual, -xp.inf).astype(xp.float32)


class Text(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    """By one of the stop ids, or else at its length."""


def write(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample: int,
    limit: int,
    stop_ids: tuple[int, ...],
    policy: Policy = FULL,
    rule: Rule | None = None,
    rounds: Iterable[int] = (),
) -> Text:
    """What the engine must emit, one token after the other; with a `rule`, given how many tokens rounds emitted: one
    where that is not said.
    """
    gumbel = _noise(seed, sample, limit) if params.temperature else None
    output, logprobs = [], []
    advance = partial(_advance, [[0] for _ in range(SPEC.num_layers)], policy=policy)
    if rule is not None:
        roots = {len(prompt) - 1 + tokens for tokens in accumulate((*rounds, *[1] * limit), initial=0)}
        voters = roots | set(range(len(prompt) - 1 - rule.votes, len(prompt) - 1))
        advance = partial(_advance_among_the_heavy, [{} for _ in range(SPEC.num_layers)], rule, roots, voters, count())
    for token in prompt:
        hashed = advance(token)
    while True:
        logits = _logits(np.array(hashed), np.array(token), np)
        token = _pick(logits, params, prompt, output, stop_ids, None if gumbel is None else gumbel[len(output)])
        output.append(token)
        logprobs.append(float(logits[token] - np.log(np.exp(logits.astype(np.float64)).sum())))
        if token in stop_ids or len(output) == limit:
            return Text(output, logprobs, token in stop_ids)
        hashed = advance(token)


def _advance(sums: list[list[int]], state: int, *, policy: Policy) -> int:
    """The hash after one more token; `sums` are those of each layer, of all tokens before each."""
    window, sinks = policy.variant.window, policy.variant.sinks
    for layer, running in enumerate(sums):
        position = len(running) - 1
        running.append(running[-1] + _mixed(layer, state, position))
        begin = 0 if window is None else max(position + 1 - window, 0)
        left_out = max(begin - sinks, 0) if policy.by_cache else 0
        state = (running[-1] - running[begin] + running[min(sinks, begin)]) % PRIME
        state = (state + left_out * running[min(sinks, position + 1)]) % PRIME
    return state


def _advance_among_the_heavy(
    slots: list[dict[int, list[int]]], rule: Rule, roots: set[int], voters: set[int], places: Iterator[int], state: int
) -> int:
    """The hash after one more token; `slots` are what each layer has, by place: what it adds, and its score."""
    position = next(places)
    for layer, there in enumerate(slots):
        if position in roots and len(there) >= rule.limit:
            old = list(there)[: -rule.recent]
            for place in sorted(old, key=lambda place: (-there[place][1], place))[rule.heavy :]:
                del there[place]
        there[position] = [_mixed(layer, state, position), 0]
        if position in voters:
            for slot in there.values():
                slot[1] += _look(slot[0], state)
        state = sum(mixed for mixed, _ in there.values()) % PRIME
    return state


def _pick(logits, params: SamplingParams, prompt, output, stop_ids, gumbel) -> int:
    wanted = adjusted(logits, params, prompt, output, stop_ids)
    if gumbel is None:
        return int(np.argmax(wanted))
    scaled = wanted / params.temperature
    return int(np.argmax(np.where(kept(scaled, params), scaled + gumbel, -np.inf)))


def _noise(seed: int, sample: int, limit: int) -> np.ndarray:
    """Gumbel noise `[ordinals, V]` of the target's draws."""
    words = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    return np.asarray(_gumbel(words, np.int32([sample]), np.arange(CONTEXT, dtype=np.int32)[None]))[0, :limit]


@jax.jit
def _gumbel(words, sample, ordinals):
    return noise.gumbel(noise.noise_keys(words, sample, ordinals, noise.TARGET), jnp.arange(VOCAB))
