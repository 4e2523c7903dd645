"""Heads against a plain recomputation in float64, and new ones against the model that they are made for."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.heads import HeadsSpec, head_hidden, head_logits, init_heads, of_base
from jaxspec.models.quantization import dequantize, get_scheme
from jaxspec.models.spec import ModelSpec
from jaxspec.types import Params

VOCAB, E = 40, 16
MODEL = ModelSpec(
    vocab_size=VOCAB,
    valid_vocab=VOCAB,
    num_layers=1,
    embed_dim=E,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=8,
    norm_eps=1e-5,
    inv_freq=(1.0, 0.1, 0.01, 0.001),
    max_context=32,
    tied_embeddings=False,
)
TOKEN_MAP = np.array([7, 0, 39, 12, 20], np.int32)
SPECS = [
    HeadsSpec(3, E, VOCAB),
    HeadsSpec(2, E, VOCAB, layers=3, own_output=True),
    HeadsSpec(3, E, VOCAB, conditioned=24),
    HeadsSpec(2, E, len(TOKEN_MAP), layers=2, conditioned=12),
    HeadsSpec(2, E, len(TOKEN_MAP), own_output=True, conditioned=12),
]

pytestmark = pytest.mark.usefixtures("unoptimised")
_hidden, _logits = (jax.jit(function, static_argnums=0) for function in (head_hidden, head_logits))
_init = jax.jit(init_heads, static_argnums=(0, 3))


@cache
def base() -> Params:
    """What heads use of a model."""
    rng = np.random.default_rng(0)
    return {name: {"weight": jnp.asarray(rng.normal(size=(VOCAB, E)), jnp.float32)} for name in ("embed", "lm_head")}


def new(spec: HeadsSpec, dtype: Any = jnp.float32) -> Params:
    """New heads, with a token map where the spec's vocabulary wants one."""
    output = base()["lm_head"]["weight"]
    if spec.vocab == VOCAB:
        return _init(spec, jax.random.key(1), output, dtype)
    return _init(spec, jax.random.key(1), output[TOKEN_MAP], dtype) | {"token_map": jnp.asarray(TOKEN_MAP)}


def random(spec: HeadsSpec) -> Params:
    """Heads that have learned something: no array of theirs is left as it was."""
    rng = np.random.default_rng(2)
    params = new(spec)
    heads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), params["heads"])
    return params | {"heads": heads}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def by_hand(spec: HeadsSpec, params: Params, head: int, hidden: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Logits of one head for one hidden state and one path, in float64."""
    wide: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["heads"][head])
    embed, lm_head = (np.asarray(base()[name]["weight"], np.float64) for name in ("embed", "lm_head"))
    x = hidden.astype(np.float64)
    for index in range(spec.layers):
        block = wide["blocks"][f"block_{index}"]
        if spec.conditioned and index == 0:
            seen = np.concatenate([unit(x), *(unit(embed[token]) for token in path)])
            x = x + wide["blocks"]["mix"]["weight"] @ silu(block["weight"] @ seen + block["bias"])
        else:
            x = x + silu(block["weight"] @ x + block["bias"])
    if spec.own_output:
        return wide["output"] @ x
    return (lm_head[np.asarray(params["token_map"])] if "token_map" in params else lm_head) @ x


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_logits_are_those_of_the_formula(spec: HeadsSpec) -> None:
    rng = np.random.default_rng(3)
    params = random(spec)
    shared = of_base(spec, params, MODEL, base())
    for head, parameters in enumerate(params["heads"]):
        hidden = rng.normal(size=(2, 3, E)).astype(np.float32)
        path = rng.integers(0, VOCAB, (2, 3, head + 1))
        found = _logits(spec, parameters, shared, jnp.asarray(hidden), jnp.asarray(path))
        assert found.shape == (2, 3, spec.vocab)
        assert found.dtype == jnp.float32
        for place in np.ndindex(2, 3):
            expected = by_hand(spec, params, head, hidden[place], path[place])
            np.testing.assert_allclose(found[place], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_new_head_repeats_the_model(spec: HeadsSpec) -> None:
    hidden = jax.random.normal(jax.random.key(4), (5, E))
    params = new(spec)
    shared = of_base(spec, params, MODEL, base())
    weight = base()["lm_head"]["weight"]
    logits = hidden @ (weight if spec.vocab == VOCAB else weight[TOKEN_MAP]).T
    for head, parameters in enumerate(params["heads"]):
        path = jnp.zeros((5, head + 1), jnp.int32)
        np.testing.assert_array_equal(_hidden(spec, parameters, shared, hidden, path), hidden)
        np.testing.assert_allclose(_logits(spec, parameters, shared, hidden, path), logits, rtol=1e-5, atol=1e-5)


def test_new_heads_of_bfloat16() -> None:
    spec = SPECS[2]
    params = new(spec, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base())
    shared = of_base(spec, params, MODEL, narrow)
    hidden = jax.random.normal(jax.random.key(4), (5, E), jnp.bfloat16)
    path = jnp.zeros((5, 1), jnp.int32)
    assert _hidden(spec, params["heads"][0], shared, hidden, path).dtype == jnp.bfloat16
    assert _logits(spec, params["heads"][0], shared, hidden, path).dtype == jnp.float32


def test_some_tokens_of_a_quantised_projection() -> None:
    spec = SPECS[3]
    weight = jax.tree.map(jnp.asarray, get_scheme("int8").quantize(np.asarray(base()["lm_head"]["weight"])))
    shared = of_base(spec, new(spec), MODEL, base() | {"lm_head": {"weight": weight}})
    expected = np.asarray(dequantize(weight, jnp.float32))[TOKEN_MAP]
    np.testing.assert_array_equal(shared["output"], expected)


def test_a_tied_model_gives_its_embedding() -> None:
    tied = {name: leaf for name, leaf in base().items() if name != "lm_head"}
    shared = of_base(SPECS[0], new(SPECS[0]), replace(MODEL, tied_embeddings=True), tied)
    assert shared.keys() == {"output"}
    np.testing.assert_array_equal(shared["output"], base()["embed"]["weight"])
