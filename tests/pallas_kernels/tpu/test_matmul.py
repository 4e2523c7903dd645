"""Products with quantised weights: the TPU kernels against `linear`, and what the TPU compiler makes of both."""

import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.linear import linear
from jaxspec.models.quantization import Quantized, dequantize, get_scheme, row_scales
from jaxspec.plan.topology import compile_for
from pallas_kernels.tpu import matmul

MATRICES = {"Llama-8B, down": (4096, 14336), "Llama-70B, an eighth of down": (8192, 3584)}
"""Outputs and inputs."""
CHIPS = ["v5e:2x4", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"]


def product(x, weight: Quantized, layer=None, interpret=False):
    """The kernel for a weight, or for a layer where its values are a stack."""
    if weight.steps is None:
        return matmul.block_matmul(x, weight.values, row_scales(weight).T, layer, interpret=interpret)
    return matmul.int4_matmul(x, *weight, layer, interpret=interpret)


def quantised(scheme: str, outputs: int, inputs: int, seed: int = 0) -> Quantized:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(outputs, inputs)) * rng.uniform(0.1, 9, (outputs, 1)) + rng.normal(size=(outputs, 1))
    weight[0] = 0
    return jax.tree.map(jnp.asarray, get_scheme(scheme).quantize(weight.astype(np.float32)))


def errors(found: jax.Array, x: jax.Array, weight: Quantized) -> np.ndarray:
    """Of a product, in parts of the sum of its terms' sizes."""
    x, numbers = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, dequantize(weight, jnp.float32)))
    return np.abs(np.asarray(found, np.float64) - x @ numbers.T) / (np.abs(x) @ np.abs(numbers).T + 1e-9)


@pytest.mark.parametrize(
    ("scheme", "tokens", "outputs", "inputs", "dtype"),
    [
        ("int4", 3, 200, 4352, jnp.float32),  # two chunks of groups, the second not full; two tiles of outputs
        pytest.param("int4", 8, 40, 512, jnp.bfloat16, marks=pytest.mark.slow),
        ("int4_symmetric", 8, 130, 512, jnp.bfloat16),
        pytest.param("fp8_block", 3, 200, 384, jnp.float32, marks=pytest.mark.slow),
        ("fp8_block", 8, 130, 256, jnp.bfloat16),
    ],
)
def test_products_are_those_of_the_numbers_that_weights_stand_for(
    scheme: str, tokens: int, outputs: int, inputs: int, dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "TILE_BYTES", 1)
    weight = quantised(scheme, outputs, inputs)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, inputs)), dtype)
    found = jax.jit(lambda: product(x, weight, interpret=True))()
    assert found.shape == (tokens, outputs)
    assert found.dtype == dtype
    mine, theirs = errors(found, x, weight), errors(linear(x, weight), x, weight)
    assert mine.max() < (1e-6 if dtype == jnp.float32 else 4e-3)
    assert mine.mean() < max(1.5 * theirs.mean(), 3e-8)


@pytest.mark.parametrize("scheme", ["int4", pytest.param("fp8_block", marks=pytest.mark.slow)])
def test_a_layer_of_a_stack_and_more_tokens_than_a_tile(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "TOKENS", 16)
    weight = quantised(scheme, 40, 256)
    other = jax.tree.map(jnp.zeros_like, weight)
    stack = weight._replace(values=jnp.stack([other.values, weight.values]))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(20, 256)), jnp.float32)
    found = product(x, stack, jnp.int32(1), interpret=True)
    assert errors(found, x, weight).max() < 1e-6


def test_rows_of_no_whole_lanes_are_refused() -> None:
    assert matmul.unsupported(quantised("fp8_block", 8, 256).values) is None
    assert "; 64 is none" in str(matmul.unsupported(quantised("int4", 8, 128).values))


def test_heads_with_blocks_of_their_own() -> None:
    """Blocks of 128 rows are cut where a matrix `[features[-1], in]` ends."""
    rng = np.random.default_rng(0)
    weight = jax.tree.map(
        jnp.asarray, get_scheme("fp8_block").quantize(rng.normal(size=(3, 40, 256)).astype(np.float32))
    )
    x = jnp.asarray(rng.normal(size=(4, 256)), jnp.float32)
    flat = weight._replace(values=weight.values.reshape(-1, 256))
    found = matmul.block_matmul(x, flat.values, row_scales(weight).T, interpret=True)
    np.testing.assert_allclose(found, linear(x, weight).reshape(4, -1), rtol=1e-5, atol=1e-4)


def written(topology: str, scheme: str, matrix: str, tokens: int, multiply, layers=()) -> list[str]:
    """Which operations of a product compiled for a TPU write as many numbers as there are bytes in 4-bit weights.

    What the compiler moves to the core's memory before the first operation, for want of other work, does not count.
    """
    pytest.importorskip("libtpu")
    outputs, inputs = MATRICES[matrix]
    shapes = get_scheme(scheme).layout((outputs, inputs))
    shapes = shapes._replace(values=jax.ShapeDtypeStruct((*layers, *shapes.values.shape), shapes.values.dtype))
    x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
    program = compile_for(topology, multiply, x, shapes).program.as_text()
    fused = re.findall(r"calls=(%[\w.-]+)", program)
    parts = [part for part in program.split("\n\n") if part.strip().split(" ")[0] not in fused]
    found = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", "".join(parts))
    moved = {"parameter", "bitcast", "get-tuple-element", "copy-done", "slice-done", "custom-call"}
    least = outputs * inputs // 2
    return [op for shape, op in found if op not in moved and math.prod(map(int, shape.split(","))) >= least]


SOME = pytest.mark.parametrize("tokens", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (32, 256))])


def cases(schemes: list[str], *fast: tuple[str, str]):
    """All chips and schemes; `slow` but for these."""
    every = itertools.product(CHIPS, schemes)
    return pytest.mark.parametrize(
        ("topology", "scheme"),
        [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every],
    )


@SOME
@pytest.mark.parametrize("matrix", MATRICES)
@cases(["int4", "int4_symmetric", "fp8_block"], ("v5e:2x4", "int4"), ("tpu7x:2x2x1", "fp8_block"))
def test_compiled_kernels_read_the_weights_as_they_are(topology: str, scheme: str, matrix: str, tokens: int) -> None:
    assert not written(topology, scheme, matrix, tokens, product)


@cases(["int4", "int4_symmetric", "fp8_block"], ("v6e:2x4", "int4_symmetric"))
def test_compiled_kernels_take_no_layer_out_of_its_stack(topology: str, scheme: str) -> None:
    def all_layers(x, weight):
        def one(layer, x):
            return x + product(x, weight, layer)[:, : x.shape[1]]

        return jax.lax.fori_loop(0, 4, one, x)

    assert not written(topology, scheme, "Llama-70B, an eighth of down", 8, all_layers, layers=(4,))


@SOME
@cases(["int8", "fp8"], ("v6e:2x4", "int8"), ("tpu7x:2x2x1", "fp8"))
def test_xla_reads_weights_with_one_scale_a_row_as_they_are(topology: str, scheme: str, tokens: int) -> None:
    assert not written(topology, scheme, "Llama-8B, down", tokens, linear)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", "int4_symmetric", "fp8_block"])
def test_xla_writes_the_weights_that_have_kernels_again(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there are kernels: once this fails, they may go."""
    monkeypatch.setattr(matmul, "unsupported", lambda _: "not now")
    # A function of its own: what jax has traced for `linear` may have the kernel.
    assert written("v5e:2x4", scheme, "Llama-8B, down", 8, partial(linear))
