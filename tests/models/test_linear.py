"""The one product of weights and activations, in both orders that the CPU uses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.linear import linear


def operands(tokens: int, dtype: Any = jnp.float32, inputs: int = 48) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens)
    return jnp.asarray(rng.normal(size=(tokens, inputs)), dtype), jnp.asarray(rng.normal(size=(80, inputs)), dtype)


@pytest.mark.parametrize("inputs", [48, 112])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65])
def test_equals_a_float64_product(tokens: int, inputs: int) -> None:
    x, weight = operands(tokens, inputs=inputs)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(jax.jit(linear)(x, weight), expected, rtol=0, atol=1e-4)


def test_keeps_the_leading_dimensions() -> None:
    x, weight = operands(6)
    y = linear(x.reshape(2, 3, 48), weight)
    assert y.shape == (2, 3, 80)
    np.testing.assert_array_equal(y.reshape(6, 80), linear(x, weight))


@pytest.mark.parametrize("tokens", [3, 65])
def test_keeps_bfloat16(tokens: int) -> None:
    x, weight = operands(tokens, jnp.bfloat16)
    y = linear(x, weight)
    assert y.dtype == jnp.bfloat16
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-7, atol=0.1)
