"""A mixed batch of requests in the middle of their texts, for the device and for the numpy sampler alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import noise
from jaxspec import sampling as sampling_module
from jaxspec.config import SamplingParams
from jaxspec.sampling import sampling_row
from jaxspec.types import History, Sampling

BIAS, STOPS = 4, 4
"""Entries kept of the padded vectors of a row: 1,024 of them would be most of a small test's work."""


@dataclass(frozen=True)
class Request:
    """One row: what was asked for and the tokens so far."""

    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    sample: int = 0


def random_requests(params: Sequence[SamplingParams], vocab: int, seed: int = 0) -> list[Request]:
    """A request for each of `params`, each with a random prompt, output, stop ids and seed."""
    rng = np.random.default_rng(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(vocab, size=rng.integers(least, most + 1)))

    # One token of every output comes three times: frequency is not presence.
    return [Request(p, some(1, 4), some(1, 1) * 3 + some(0, 4), some(1, 2), int(rng.integers(2**63))) for p in params]


def sampling_of(requests: Sequence[Request]) -> Sampling:
    """The device's arrays of these requests."""
    rows = [sampling_row(r.params, seed=r.seed, sample=r.sample, eos_ids=r.stop_ids, max_tokens=99) for r in requests]
    rows = [
        row._replace(bias_ids=row.bias_ids[:BIAS], bias_values=row.bias_values[:BIAS], stop_ids=row.stop_ids[:STOPS])
        for row in rows
    ]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)


def history_of(requests: Sequence[Request], vocab: int) -> History:
    """Counts of the outputs and marks of the prompts."""
    counts = np.zeros((len(requests), vocab), np.int32)
    in_prompt = np.zeros((len(requests), vocab), bool)
    for row, request in enumerate(requests):
        np.add.at(counts[row], list(request.output), 1)
        in_prompt[row, list(request.prompt)] = True
    return History(jnp.asarray(counts), jnp.asarray(in_prompt))


def draw(logits: jax.Array, sampling: Sampling, history: History, ordinal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens and usability `[B, W]` where every node of a row has the same logits `[B, V]`, whatever its ordinal."""
    keys = noise.noise_keys(sampling.seed, sampling.sample, ordinal, noise.TARGET)
    wide = jnp.broadcast_to(logits[:, None], (*ordinal.shape, logits.shape[-1]))
    return sampling_module.draw(wide, sampling, history, None, ordinal, keys)


def draw_rows(
    run: Callable, logits: np.ndarray, requests: Sequence[Request], width: int, first: int = 0
) -> tuple[np.ndarray, ...]:
    """What `run`, a jitted `draw` or a spoilt one, gives for `width` ordinals from `first` on."""
    ordinal = jnp.broadcast_to(jnp.arange(first, first + width, dtype=jnp.int32), (len(requests), width))
    history = history_of(requests, logits.shape[1])
    return tuple(np.asarray(x) for x in run(jnp.asarray(logits), sampling_of(requests), history, ordinal))


TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.7)
_FILTERS: list[dict] = [
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 2**40},
    {"top_p": 0.8},
    {"top_p": 1e-4},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 5, "min_p": 0.3},
]
_PENALTIES: list[dict] = [
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.5},
    {"presence_penalty": 1.1},
    {"logit_bias": {0: 1.5, 3: -2.0}},
    {"min_tokens": 2**31 - 1, "max_tokens": 2**31 - 1},
]
_ALL = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.6,
    "logit_bias": {1: 1.0, 2: -0.5, 5: 0.7},
    "min_tokens": 2**31 - 1,
    "max_tokens": 2**31 - 1,
    "top_k": 7,
    "top_p": 0.93,
    "min_p": 0.05,
}
BATTERY = [
    *(SamplingParams(temperature=t) for t in TEMPERATURES),
    *(SamplingParams(temperature=1.0, **options) for options in [*_FILTERS, *_PENALTIES]),
    *(SamplingParams(temperature=1.7, **options) for options in _FILTERS[3:7]),
    *(SamplingParams(temperature=0.0, **options) for options in _PENALTIES[:2]),
    *(SamplingParams(temperature=t, **_ALL) for t in TEMPERATURES),
]
"""Every option alone and all together, greedy and hot rows side by side."""
