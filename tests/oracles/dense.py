"""The transformer without a cache, in float64: what every token of a text says by an eviction policy's own words."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models.spec import ModelSpec
from pallas_kernels.codes import quantise


def logits(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: list[int],
    window: int | None = None,
    sinks: int = 0,
    by_cache: bool = False,
    stored: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Logits [S, V] of a text of S tokens, each of which sees the first `sinks` and the last `window`; `stored` is what
    becomes of key and value vectors."""
    x = wide(params["embed"]["weight"])[tokens]
    for layer in params["layers"]:
        x = x + _attention(layer, spec, normed(x, layer["attention_norm"], spec), window, sinks, by_cache, stored)
        gate, up = np.einsum("se,cfe->csf", normed(x, layer["mlp_norm"], spec), wide(layer["gate_up"]["weight"]))
        x = x + gate / (1 + np.exp(-gate)) * up @ wide(layer["down"]["weight"]).T
    head = params["embed" if spec.tied_embeddings else "lm_head"]["weight"]
    return (normed(x, params["norm"], spec) @ wide(head).T)[:, : spec.valid_vocab]


def logprobs(*args, **options) -> np.ndarray:
    """The same as log probabilities."""
    found = logits(*args, **options)
    found = found - found.max(1, keepdims=True)
    return found - np.log(np.exp(found).sum(1, keepdims=True))


def in_int8(x: np.ndarray) -> np.ndarray:
    """What becomes of vectors that are stored in int8."""
    codes, scale = quantise(jnp.asarray(x, jnp.float32), jnp.dtype(jnp.int8))
    return np.float64(codes) * np.float64(scale)


def _attention(layer, spec: ModelSpec, h, window, sinks: int, by_cache: bool, stored: Callable) -> np.ndarray:
    qkv = np.einsum("se,kgde->skgd", h, wide(layer["qkv"]["weight"]))
    q, k, v = qkv[:, :, : spec.group], qkv[:, :, spec.group], qkv[:, :, spec.group + 1]
    place = np.arange(len(h))
    key, query = place[None, :], place[:, None]
    seen = key <= query
    from_where = place
    if window is not None:
        seen &= (key > query - window) | (key < sinks)
        if by_cache:  # where it would be if the cache held the sinks and the window and nothing else
            from_where = np.minimum(place, sinks + window - 1)
    keys, v = stored(turned(k, place, spec)), stored(v)
    score = np.einsum("skgd,tkd->kgst", turned(q, place, spec), keys)
    to_sinks = np.einsum("skgd,tkd->kgst", turned(q, from_where, spec), keys)
    score = np.where(key < sinks, to_sinks, score) / np.sqrt(spec.head_dim)
    score = np.where(seen, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    mixed = np.einsum("kgst,tkd->skgd", weight, v)
    return mixed.reshape(len(h), -1) @ wide(layer["o"]["weight"]).T


def turned(x: np.ndarray, positions: np.ndarray, spec: ModelSpec) -> np.ndarray:
    angle = positions[:, None] * np.float64(spec.inv_freq)
    angle = angle.reshape(len(angle), *[1] * (x.ndim - 2), -1)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def normed(x: np.ndarray, norm, spec: ModelSpec) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + spec.norm_eps) * wide(norm["weight"])


def wide(array) -> np.ndarray:
    return np.asarray(array, np.float64)
