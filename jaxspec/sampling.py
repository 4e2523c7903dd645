"""From logits to the distribution a request asked for, and a draw from it.

Order, in float32: penalties and bias, temperature, top-k, top-p, min-p. A filter is a threshold on the logits, found by
bisection over the ordered bits of a float: no sort of the vocabulary, no approximation, and tokens that tie at the
threshold are all kept.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec import parallel, vocabulary
from jaxspec.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from jaxspec.noise import gumbel
from jaxspec.types import History, Logprobs, Sampling

PathCounts = Callable[[], Int[Array, "B W V"]] | None
"""Asked for where a penalty looks at it only: it is as large as the logits. None adds nothing."""


def sampling_row(
    params: SamplingParams, *, seed: int = 0, sample: int = 0, max_tokens: int = 1, eos_ids: tuple[int, ...] = ()
) -> Sampling:
    """One request's choices as the numpy scalars and padded vectors of a `Sampling` row.

    `seed` and `max_tokens` are those the engine settled on; `eos_ids` end the text unless the request ignores them.
    """
    stop_ids = (() if params.ignore_eos else eos_ids) + tuple(params.stop_token_ids)
    row: dict[str, Any] = {
        "temperature": _float32(params.temperature),
        "top_k": _int32(max(params.top_k, 0)),
        "top_p": np.float32(params.top_p),
        "min_p": np.float32(params.min_p),
        "repetition": _float32(params.repetition_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "presence": np.float32(params.presence_penalty),
        "bias_ids": _padded(list(params.logit_bias), MAX_LOGIT_BIAS, -1, np.int32),
        "bias_values": _padded([_float32(b) for b in params.logit_bias.values()], MAX_LOGIT_BIAS, 0, np.float32),
        "stop_ids": _padded(stop_ids, MAX_STOP_IDS, -1, np.int32),
        "min_tokens": _int32(params.min_tokens),
        "max_tokens": _int32(max_tokens),
        "seed": np.array([seed >> shift & 0xFFFFFFFF for shift in (0, 32)], np.uint32),
        "sample": np.int32(sample),
        "logprobs": np.int32(-1 if params.logprobs is None else params.logprobs),
    }
    return Sampling(**row)


def draw(
    logits: Float[Array, "B W V"],
    sampling: Sampling,
    history: History,
    path_counts: PathCounts,
    ordinal: Int[Array, "B W"],
    keys: UInt32[Array, "B W 2"],
) -> tuple[Int[Array, "B W"], Bool[Array, "B W"]]:
    """The target's own token at every node, and whether its logits were usable.

    `path_counts` gives what the drafted tokens on the way to each node add to the history's counts; `ordinal` is the
    index in the output of the token drawn. Rows of temperature 0 take the likeliest token, ties going to the lowest id.
    """
    usable = is_usable(logits)
    logits = _without_nan(logits)
    plain = (sampling.temperature == 0) & ~_penalised(sampling) & (sampling.bias_ids[:, 0] < 0)
    plain = jnp.all(plain & jnp.all(ordinal >= sampling.min_tokens[:, None], axis=1))

    def adjusted():
        return _sample(adjust(logits, sampling, history, path_counts, ordinal), sampling, keys)

    token = jax.lax.cond(plain, lambda: vocabulary.argmax(logits), adjusted)
    return token, usable


def distribution(
    logits: Float[Array, "B W V"],
    sampling: Sampling,
    history: History,
    path_counts: PathCounts,
    ordinal: Int[Array, "B W"],
) -> Float[Array, "B W V"]:
    """The probabilities with which `draw` draws each token; one-hot where it is not left to chance."""
    adjusted = adjust(_without_nan(logits), sampling, history, path_counts, ordinal)
    kept = _kept(adjusted, sampling)
    certain = vocabulary.one_hot(vocabulary.argmax(kept), kept.shape[-1])
    return jnp.where(sampling.temperature[:, None, None] > 0, vocabulary.softmax(kept), certain)


def is_usable(logits: Float[Array, "B W V"]) -> Bool[Array, "B W"]:
    """Where no logit is NaN and the best one is finite."""
    # NaN is asked for by itself: on the CPU the maximum of a long row passes over it.
    return ~vocabulary.any_of(jnp.isnan(logits)) & jnp.isfinite(vocabulary.maximum(logits))


def adjust(
    logits: Float[Array, "B W V"], sampling: Sampling, history: History, path_counts: PathCounts, ordinal
) -> Float[Array, "B W V"]:
    """Logits after penalties, logit bias, and the ban on ending before `min_tokens`."""
    logits = jax.lax.cond(
        jnp.any(_penalised(sampling)), lambda z: _penalise(z, sampling, history, path_counts), lambda z: z, logits
    )
    logits = jax.lax.cond(jnp.any(sampling.bias_ids[:, 0] >= 0), lambda z: _add_bias(z, sampling), lambda z: z, logits)
    early = ordinal < sampling.min_tokens[:, None]
    return jax.lax.cond(jnp.any(early), lambda z: _ban_stops(z, sampling, early), lambda z: z, logits)


def keep_threshold(scaled: Float[Array, "B W V"], sampling: Sampling) -> Float[Array, "B W"]:
    """The least scaled logit that top-k, then top-p, then min-p keep; -inf where no filter is on."""
    top_k, top_p, min_p = (x[:, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    batch = scaled.shape[:2]
    best = vocabulary.maximum(scaled)
    size = scaled.shape[-1] * parallel.share()
    wanted = jnp.broadcast_to(jnp.where(top_k > 0, jnp.minimum(top_k, size), size), batch)
    by_count = jax.lax.cond(
        jnp.any(top_k > 0),
        lambda: _bisect(scaled, lambda keep: vocabulary.total(keep) >= wanted),
        lambda: jnp.full(batch, -jnp.inf),
    )
    by_count = jnp.where(top_k > 0, by_count, -jnp.inf)

    def nucleus():
        weight = jnp.exp(scaled - best[..., None])
        weight = jnp.where(scaled >= by_count[..., None], weight, 0.0)
        # Summed the same way as every trial mass, so that keeping all is always enough.
        goal = top_p * vocabulary.total(weight)
        return _bisect(scaled, lambda keep: vocabulary.total(jnp.where(keep, weight, 0.0)) >= goal)

    by_mass = jax.lax.cond(jnp.any(top_p < 1), nucleus, lambda: jnp.full(batch, -jnp.inf))
    by_mass = jnp.where(top_p < 1, by_mass, -jnp.inf)
    by_ratio = jnp.where(min_p > 0, best + jnp.log(min_p), -jnp.inf)
    return jnp.maximum(jnp.maximum(by_count, by_mass), by_ratio)


def log_probabilities(
    logits: Float[Array, "B W V"], path: Int[Array, "B D"], tokens: Int[Array, "B D"], sampling: Sampling, top: int
) -> Logprobs:
    """Log probabilities of the tokens after a path and of the `top` likeliest, of the model's own distribution.

    Zeros where no row of the batch asked for any: the work is skipped.
    """

    def compute():
        on_path = jnp.take_along_axis(logits, path[..., None], axis=1)
        norm = vocabulary.logsumexp(on_path)[..., None]
        values, ids = vocabulary.top_k(on_path, top)
        chosen = vocabulary.at(on_path, tokens[..., None])
        return Logprobs((chosen - norm)[..., 0], ids, values - norm)

    shape = (*tokens.shape, top)
    nothing = Logprobs(jnp.zeros(tokens.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
    return jax.lax.cond(jnp.any(sampling.logprobs >= 0), compute, lambda: nothing)


def _sample(logits: Float[Array, "B W V"], sampling: Sampling, keys: UInt32[Array, "B W 2"]) -> Int[Array, "B W"]:
    hot = sampling.temperature[:, None, None] > 0

    def perturbed():
        kept = _kept(logits, sampling)
        return jnp.where(hot, kept + gumbel(keys, vocabulary.ids(logits.shape[-1])), kept)

    score = jax.lax.cond(jnp.any(hot), perturbed, lambda: logits)
    return vocabulary.argmax(score)


def _kept(logits: Float[Array, "B W V"], sampling: Sampling) -> Float[Array, "B W V"]:
    """Logits over temperature, -inf where a filter drops the token; those of greedy rows as they are."""
    temperature = sampling.temperature[:, None, None]
    hot = temperature > 0
    # Taken from the best one first: a small temperature then cannot overflow.
    below = logits - vocabulary.maximum(logits)[..., None]
    scaled = jnp.where(hot, below / jnp.where(hot, temperature, 1.0), logits)
    filtered = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    threshold = jax.lax.cond(
        jnp.any(filtered & (sampling.temperature > 0)),
        lambda: keep_threshold(scaled, sampling),
        lambda: jnp.full(scaled.shape[:2], -jnp.inf),
    )
    # Asked this way round, so that a NaN is dropped: minus infinity over a huge temperature may give one.
    return jnp.where(hot & ~(scaled >= threshold[..., None]), -jnp.inf, scaled)


def _without_nan(logits: Float[Array, "B W V"]) -> Float[Array, "B W V"]:
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def _float32(value: float | int) -> np.float32:
    """The nearest finite float32: an infinite temperature would make a token of a padding id."""
    limit = float(np.finfo(np.float32).max)
    return np.float32(min(max(value, -limit), limit))


def _int32(value: int) -> np.int32:
    return np.int32(min(value, np.iinfo(np.int32).max))


def _padded(values, size: int, fill: int, dtype) -> np.ndarray:
    row = np.full(size, fill, dtype)
    row[: len(values)] = values
    return row


def _penalised(sampling: Sampling) -> Bool[Array, "B"]:
    return (sampling.repetition != 1) | (sampling.frequency != 0) | (sampling.presence != 0)


def _penalise(logits, sampling: Sampling, history: History, path_counts):
    repetition, frequency, presence = (
        x[:, None, None] for x in (sampling.repetition, sampling.frequency, sampling.presence)
    )
    counts = history.counts[:, None] if path_counts is None else history.counts[:, None] + path_counts()
    seen = (counts > 0) | history.in_prompt[:, None]
    factor = jnp.where(seen, repetition, 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency * counts - presence * (counts > 0)


def _add_bias(logits, sampling: Sampling):
    batch = jnp.arange(logits.shape[0])[:, None]
    bias = jnp.zeros((logits.shape[0], logits.shape[-1]))
    ids = vocabulary.column(sampling.bias_ids, logits.shape[-1])
    return logits + bias.at[batch, ids].add(sampling.bias_values, mode="drop")[:, None]


def _ban_stops(logits, sampling: Sampling, early: Bool[Array, "B W"]):
    batch = jnp.arange(logits.shape[0])[:, None]
    ids = vocabulary.column(sampling.stop_ids, logits.shape[-1])
    banned = jnp.zeros((logits.shape[0], logits.shape[-1]), bool).at[batch, ids].set(True, mode="drop")
    return jnp.where(early[..., None] & banned[:, None], -jnp.inf, logits)


def _ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the order of the floats: the bits of a float32, with the negative ones turned round."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _bisect(x: Float[Array, "B W V"], enough) -> Float[Array, "B W"]:
    """The largest t for which `enough(x >= t)` holds; it must hold for -inf and get harder as t grows."""
    order = _ordered(x)

    def halve(_, bounds):
        low, high = bounds
        # The mean rounded up, without overflow of low + high.
        middle = (low | high) - ((low ^ high) >> 1)
        good = enough(order >= middle[..., None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    lowest = jnp.broadcast_to(_ordered(jnp.float32(-jnp.inf)), x.shape[:2])
    low, _ = jax.lax.fori_loop(0, 32, halve, (lowest, parallel.greatest(jnp.max(order, axis=-1))))
    bits = jnp.where(low < 0, low ^ jnp.int32(0x7FFFFFFF), low)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
