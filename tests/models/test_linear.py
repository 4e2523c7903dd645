"""The one product of weights and activations, in both orders that the CPU uses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.linear import linear, of_layer
from jaxspec.models.quantization import dequantize, get_scheme, scheme_names
from pallas_kernels.tpu import matmul


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


@pytest.mark.parametrize("tokens", [3, 65])
@pytest.mark.parametrize("name", scheme_names())
def test_a_quantised_weight_is_the_dequantised_one(name: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(2, tokens, 96)), jnp.float32)
    weight = jax.tree.map(jnp.asarray, get_scheme(name).quantize(rng.normal(size=(3, 2, 40, 96)).astype(np.float32)))
    plain = dequantize(weight, np.float32)
    assert plain.shape == (3, 2, 40, 96)
    y = jax.jit(linear)(x, weight)
    assert y.shape == (2, tokens, 3, 2, 40)
    expected = np.einsum("bti,khdi->btkhd", np.asarray(x, np.float64), np.asarray(plain, np.float64))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
    narrow = linear(x.astype(jnp.bfloat16), weight)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(narrow, np.float64), expected, rtol=2**-6, atol=0.3)


@pytest.mark.parametrize("tokens", [3, 65])
def test_leading_features_are_rows(tokens: int) -> None:
    x, weight = operands(tokens)
    y = linear(x, weight.reshape(5, 2, 8, 48))
    np.testing.assert_array_equal(y, linear(x, weight).reshape(tokens, 5, 2, 8))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("scheme", ["int4", pytest.param("int4_symmetric", marks=pytest.mark.slow), "fp8_block"])
def test_on_tpus_kernels_read_a_layer_in_its_stack(monkeypatch: pytest.MonkeyPatch, scheme: str, stacked: bool) -> None:
    """Interpreted, against the products of XLA."""
    rng = np.random.default_rng(0)
    weights = [get_scheme(scheme).quantize(rng.normal(size=(2, 3, 256)).astype(np.float32)) for _ in range(3)]
    stack = {"weight": jax.tree.map(lambda *a: jnp.stack(a), *weights), "bias": jnp.arange(6.0).reshape(3, 2)}
    x = jnp.asarray(rng.normal(size=(4, 256)), jnp.float32)
    expected = linear(x, jax.tree.map(jnp.asarray, weights[1]))
    calls = []
    for name in ("int4_matmul", "block_matmul"):
        kernel = partial(getattr(matmul, name), interpret=True)
        monkeypatch.setattr(matmul, name, lambda *a, kernel=kernel: calls.append(a) or kernel(*a))
    monkeypatch.setattr("jaxspec.models.linear.platform", lambda: "tpu")
    layer = of_layer(stack, jnp.int32(1))
    np.testing.assert_array_equal(layer["bias"], stack["bias"][1])
    weight = layer["weight"] if stacked else jax.tree.map(jnp.asarray, weights[1])
    found = jax.jit(lambda: linear(x, weight))()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == 1
    assert (calls[0][-1] is not None) == stacked  # the layer: its codes are in the stack
