"""Law 2 for plain sampling: draws have the distribution a float64 sampler computes, and planted faults do not."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from tests.oracles import numpy_sampler as oracle
from tests.oracles.requests import BATTERY, draw, draw_rows, history_of, random_requests, sampling_of

VOCAB, DRAWS = 10, 20_000
FEW = 5_000
"""Draws that are enough to reject a fault."""
REQUESTS = random_requests(BATTERY, VOCAB, seed=3)
LOGITS = np.random.default_rng(4).normal(0, 2, (len(REQUESTS), VOCAB)).astype(np.float32)
HOT = [row for row, params in enumerate(BATTERY) if params.temperature > 0]
DRAW = jax.jit(draw)


def target(logits: np.ndarray, requests: list) -> list[np.ndarray]:
    rows = zip(logits, requests, strict=True)
    adjusted = [oracle.adjusted(z, r.params, r.prompt, r.output, r.stop_ids, ordinal=0) for z, r in rows]
    return [oracle.probabilities(z, r.params) for z, r in zip(adjusted, requests, strict=True)]


def p_values(tokens: np.ndarray) -> np.ndarray:
    """χ² of draws `[B, n]`, one p-value a row of the mixed batch."""
    return np.array([oracle.p_value(row, p) for row, p in zip(tokens, target(LOGITS, REQUESTS), strict=True)])


def few_draws(run: Callable, first: int = 0) -> np.ndarray:
    return draw_rows(run, LOGITS, REQUESTS, FEW, first)[0]


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.concatenate([few_draws(DRAW, first) for first in range(0, DRAWS, FEW)], axis=1)


def test_draws_of_a_mixed_batch_follow_the_target_distribution(tokens: np.ndarray) -> None:
    assert p_values(tokens).min() > 1e-6


def test_draws_of_consecutive_seeds_follow_the_target_distribution() -> None:
    """The seed varies and the ordinal does not: what `n` requests of one prompt would see."""
    settings = [REQUESTS[row] for row in HOT[::4]]
    logits = LOGITS[HOT[::4]]
    count = len(settings)
    seeds = np.arange(FEW * count, dtype=np.uint32)
    words = jnp.asarray(np.stack([seeds, np.zeros_like(seeds)], -1))
    batch = jax.tree.map(lambda a: jnp.tile(a, (FEW, *[1] * (a.ndim - 1))), sampling_of(settings))
    history = jax.tree.map(lambda a: jnp.tile(a, (FEW, 1)), history_of(settings, VOCAB))
    ordinal = jnp.zeros((seeds.size, 1), jnp.int32)
    tokens, _ = DRAW(jnp.tile(logits, (FEW, 1)), batch._replace(seed=words), history, ordinal)
    draws = np.asarray(tokens).reshape(FEW, count).T
    assert min(oracle.p_value(row, p) for row, p in zip(draws, target(logits, settings), strict=True)) > 1e-6


def test_the_distance_to_the_target_shrinks_as_the_square_root_of_the_draws(tokens: np.ndarray) -> None:
    """n·|f - p|² has the expectation 1 - Σp², whatever n is; a bias makes it grow with n."""
    for n in (1_250, 5_000, DRAWS):
        ratios = []
        for row, p in zip(tokens, target(LOGITS, REQUESTS), strict=True):
            if p.max() < 1:
                frequency = np.bincount(row[:n], minlength=VOCAB) / n
                ratios.append(n * np.sum((frequency - p) ** 2) / (1 - np.sum(p**2)))
        assert 0.6 < np.mean(ratios) < 1.6


def _threshold_moved(by: int):
    """The nucleus ends one token too late (1) or too early (-1)."""
    right = sampling.keep_threshold

    def wrong(scaled, batch):
        threshold = right(scaled, batch)
        levels = jnp.sort(scaled, axis=-1)
        index = jnp.sum(levels < threshold[..., None], axis=-1, keepdims=True) - by
        moved = jnp.take_along_axis(levels, jnp.clip(index, 0, levels.shape[-1] - 1), axis=-1)[..., 0]
        return jnp.where((batch.top_p < 1)[:, None], moved, threshold)

    return "keep_threshold", wrong


def _filters_before_temperature():
    right = sampling.keep_threshold

    def wrong(scaled, batch):
        temperature = jnp.maximum(batch.temperature, 1e-3)[:, None]
        return right(scaled * temperature[..., None], batch) / temperature

    return "keep_threshold", wrong


def _repetition_without_sign():
    def wrong(logits, batch, history, path_counts):
        seen = (history.counts > 0) | history.in_prompt
        plain = jnp.where(seen, logits[:, 0] / batch.repetition[:, None], logits[:, 0])
        plain -= batch.frequency[:, None] * history.counts + batch.presence[:, None] * (history.counts > 0)
        return jnp.broadcast_to(plain[:, None], logits.shape)

    return "_penalise", wrong


def _normal_noise():
    right = sampling.gumbel
    return "gumbel", lambda keys, ids: jax.scipy.special.ndtri(jnp.exp(-jnp.exp(-right(keys, ids)))) * 1.28


PATCHES = [
    partial(_threshold_moved, 1),
    _filters_before_temperature,
    pytest.param(partial(_threshold_moved, -1), marks=pytest.mark.slow),
    pytest.param(_repetition_without_sign, marks=pytest.mark.slow),
    pytest.param(_normal_noise, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("patch", PATCHES)
def test_a_wrong_step_is_rejected(patch: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, *patch())
    assert p_values(few_draws(jax.jit(partial(draw)))).min() < 1e-6


SPOILS = {
    "no temperature": lambda s, h: (s._replace(temperature=jnp.where(s.temperature > 0, 1.0, 0.0)), h),
    "greedy rows sampled": lambda s, h: (s._replace(temperature=jnp.maximum(s.temperature, 0.3)), h),
    "no top-k": lambda s, h: (s._replace(top_k=s.top_k * 0), h),
    "no top-p": lambda s, h: (s._replace(top_p=s.top_p * 0 + 1), h),
    "no min-p": lambda s, h: (s._replace(min_p=s.min_p * 0), h),
    "no bias": lambda s, h: (s._replace(bias_values=s.bias_values * 0), h),
    "ends early": lambda s, h: (s._replace(min_tokens=s.min_tokens * 0), h),
    "prompt forgotten": lambda s, h: (s, h._replace(in_prompt=h.in_prompt & False)),
    "output forgotten": lambda s, h: (s, h._replace(counts=h.counts * 0)),
    "frequency as presence": lambda s, h: (s, h._replace(counts=jnp.minimum(h.counts, 1))),
    "prompt counted as output": lambda s, h: (s, h._replace(counts=h.counts + h.in_prompt)),
    "a neighbour's options": lambda s, h: (jax.tree.map(lambda a: jnp.roll(a, 1, 0), s), h),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_wrong_input_is_rejected(name: str) -> None:
    def run(logits, batch, history, ordinal):
        return DRAW(logits, *SPOILS[name](batch, history), ordinal)

    assert p_values(few_draws(run)).min() < 1e-6
