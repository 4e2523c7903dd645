"""The model over packed rows against its forward over pages, text by text; and its gradient."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.loading import LoadedModel
from jaxspec.models.transformer import init_params
from tests.models.test_transformer import SPEC
from train_medusa import base
from train_medusa.base import dense_hidden, identity

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, SPEC.valid_vocab, size) for size in (9, 1, 14, 20, 5)]
PLACED = [TEXTS[:3], TEXTS[3:]]
"""What each row holds."""
WIDTH = 28


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, unoptimised) -> None:
    """Rows are some blocks of attention, the last of them shorter."""
    monkeypatch.setattr(base, "QUERIES", 8)


def random_params():
    """Laid out as by `init_params`, but with norms and biases that show where they are left out."""
    shapes = jax.eval_shape(partial(init_params, SPEC), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(leaf.ndim == 1, 0.2, leaf.shape), leaf.dtype), shapes)


PARAMS = random_params()


def packed() -> list[jax.Array]:
    """Tokens, segments and positions of the rows."""
    arrays = np.zeros((3, len(PLACED), WIDTH), np.int32)
    for row, texts in enumerate(PLACED):
        column = 0
        for number, text in enumerate(texts, 1):
            part = np.s_[row, column : column + len(text)]
            for array, values in zip(arrays, (text, number, np.arange(len(text))), strict=True):
                array[part] = values
            column += len(text)
    return [jnp.asarray(array) for array in arrays]


dense = jax.jit(partial(dense_hidden, spec=SPEC))


def test_packed_texts_have_the_hidden_states_that_each_has_alone(alone) -> None:
    hidden = np.asarray(dense(PARAMS, tokens=packed()[0], segment=packed()[1], position=packed()[2]))
    assert np.all(np.isfinite(hidden))
    for row, texts in enumerate(PLACED):
        column = 0
        for text in texts:
            found = hidden[row, column : column + len(text)]
            np.testing.assert_allclose(found, alone(PARAMS, SPEC, text.tolist()), rtol=0, atol=1e-4)
            column += len(text)


def test_gradient_is_the_slope() -> None:
    """Along a random direction of all parameters, from a small step to both sides."""
    tokens, segment, position = packed()
    weight = jnp.asarray(RNG.normal(0, 1, (*tokens.shape, SPEC.embed_dim)), jnp.float32) * (segment > 0)[..., None]

    @jax.jit
    def value(params):
        hidden = dense_hidden(params, SPEC, tokens, segment, position)
        return jnp.sum(jnp.tanh(hidden) * weight)

    direction = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(0, 1, leaf.shape), leaf.dtype), PARAMS)
    gradient = jax.jit(jax.grad(value))(PARAMS)
    along = sum(jnp.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    step = 1e-3
    ahead, behind = (
        float(value(jax.tree.map(lambda leaf, d, sign=sign: leaf + sign * step * d, PARAMS, direction)))
        for sign in (1, -1)
    )
    assert abs(float(along)) > 1
    np.testing.assert_allclose((ahead - behind) / (2 * step), float(along), rtol=0.02)


def test_no_gradient_crosses_texts() -> None:
    """Every other text, and padding, has nothing to say in the hidden states of one."""
    tokens, segment, position = packed()
    mine = (jnp.arange(2)[:, None] == 0) & (segment == 3)

    def value(embed):
        hidden = dense_hidden(PARAMS | {"embed": {"weight": embed}}, SPEC, tokens, segment, position)
        return jnp.sum(hidden**3 * mine[..., None])

    gradient = np.asarray(jax.jit(jax.grad(value))(PARAMS["embed"]["weight"]))
    used = np.isin(np.arange(SPEC.vocab_size), TEXTS[2])
    assert np.all(np.any(gradient != 0, axis=1) == used)


def test_identity_tells_models_apart(loaded: LoadedModel, tiny_model: Path) -> None:
    first = identity(loaded)
    assert identity(loaded) == first
    assert identity(loaded._replace(name="another")) != first
    embed = {"weight": loaded.params["embed"]["weight"].at[0, 0].add(1e-6)}
    assert identity(loaded._replace(params=loaded.params | {"embed": embed})) != first
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loaded.params)
    assert identity(loaded._replace(params=narrow)) != first


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_hidden_states_have_the_type_of_the_parameters(dtype) -> None:
    tokens, segment, position = packed()
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    found = jax.eval_shape(partial(dense_hidden, spec=SPEC), params, tokens=tokens, segment=segment, position=position)
    assert (found.shape, found.dtype) == ((2, WIDTH, SPEC.embed_dim), dtype)
