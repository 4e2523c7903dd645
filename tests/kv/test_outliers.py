"""Why int4 scales keys by channel: with a few large channels, as real keys have, a scale by token drowns the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats import get_format

FORM = get_format("int4")
GROUPS, HEADS, DIM, QUERIES = 4, 2, 64, 32
TOKENS = GROUPS * FORM.group
LARGE = {3: 30.0, 17: -30.0, 40: 30.0}
"""Channels that are large in every token of every head, and by how much, in deviations of the others."""


def random_kv(outliers: bool) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[tokens, heads, dim]`."""
    k, v = np.random.default_rng(0).normal(size=(2, TOKENS, HEADS, DIM))
    for channel, size in LARGE.items() if outliers else ():
        k[..., channel] = size * (1 + 0.1 * k[..., channel])
    return k, v


def by_channel(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As the format stores them."""
    arrays = {name: jnp.zeros(a.shape, a.dtype) for name, a in FORM.arrays(GROUPS, FORM.group, HEADS, DIM).items()}
    whole = (jnp.asarray(a.reshape(GROUPS, FORM.group, HEADS, DIM), jnp.float32) for a in (k, v))
    arrays = jax.jit(FORM.write)(arrays, jnp.arange(GROUPS), jnp.zeros(GROUPS, jnp.int32), *whole)
    read = jax.jit(FORM.read, static_argnums=2)
    stored = (np.asarray(read(arrays, jnp.arange(GROUPS), which), np.float64) for which in (0, 1))
    keys, values = (np.moveaxis(a, 1, 2).reshape(TOKENS, HEADS, DIM) for a in stored)
    return keys, values


def by_token(k: np.ndarray) -> np.ndarray:
    """In 16 levels between the least and the largest channel of a token's head, and no rounding of scales."""
    least, most = k.min(-1, keepdims=True), k.max(-1, keepdims=True)
    step = (most - least) / 15
    return least + step * np.round((k - least) / step)


def attended(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of some queries over all tokens, in float64."""
    q = np.random.default_rng(1).normal(size=(QUERIES, HEADS, DIM))
    score = np.einsum("qhd,thd->hqt", q, k) * DIM**-0.5
    weight = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hqt,thd->qhd", weight / weight.sum(-1, keepdims=True), v)


def errors(outliers: bool) -> tuple[float, float]:
    """Of attention with keys scaled by channel and by token, as shares of the right result; values are the same."""
    k, v = random_kv(outliers)
    keys, values = by_channel(k, v)
    right = attended(k, values)
    return tuple(
        float(np.linalg.norm(attended(stored, values) - right) / np.linalg.norm(right))
        for stored in (keys, by_token(k))
    )


def test_scales_by_channel_hold_where_scales_by_token_break() -> None:
    channel, token = errors(outliers=True)
    assert channel < 0.2
    assert token > 10 * channel


def test_without_large_channels_both_hold() -> None:
    channel, token = errors(outliers=False)
    assert max(channel, token) < 0.2
    assert token == pytest.approx(channel, rel=0.4)
