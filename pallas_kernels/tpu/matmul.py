"""Products with weights whose dequantisation XLA does not fuse into the product: it would write wider weights, or
copies of the narrow ones in another layout, to memory and read them again.

Tiles of outputs come one after the other, with all their inputs. A slab of inputs at a time is widened in the core's
memory. Products of weights in int8 or float8 with one scale a row need none of this.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float8e4m3fn, Int, UInt8

from pallas_kernels.tpu._windows import LANES, interpreted

GROUP = 32
"""Inputs of a row that share a step, two in a byte."""
MIDDLE = 8.0
"""Of the codes."""
TILE_BYTES = 2 * 2**20
"""Of the weights that come at once."""
TOKENS = 256
"""Of a tile."""
VMEM_BYTES = 64 * 2**20


def unsupported(values: Any) -> str | None:
    """Why there is no kernel for weights that are stored like this; None where there is one."""
    width = values.shape[-1]
    return f"rows of weights are multiples of {LANES} bytes in kernels; {width} is none" if width % LANES else None


def int4_matmul(
    x: Float[Array, "N in"],
    codes: UInt8[Array, "*layers out half"],
    scale: Float[Array, "out"],
    steps: UInt8[Array, "out groups"],
    zero: UInt8[Array, "out groups"] | None,
    layer: Int[Array, ""] | None = None,
    *,
    interpret: Any = False,
) -> Float[Array, "N out"]:
    """`x @ w.T` for `w = (code - zero) · step · scale`; a byte has the code of an even input in its low half and that
    of the next one in its high half. `zero` counts sixteenths; None is code 8 everywhere.

    With a `layer`, the codes are that of a stack `[layers, out, half]`, which is not copied out of it. Weights but for
    their scale are rounded to x's type; sums are float32. Codes are not `unsupported`.
    """
    sums = x.reshape(x.shape[0], -1, GROUP).astype(jnp.float32).sum(-1)
    padded = (jnp.pad(a, ((0, 0), (0, -a.shape[1] % LANES))) for a in (sums, steps, zero) if a is not None)
    sums, *shared = padded
    scratch = pltpu.VMEM((_tile(codes), LANES), jnp.float32)
    inputs = x[:, ::2], x[:, 1::2], sums
    return _call(_int4_kernel, inputs, codes, layer, tuple(shared), scale[None], [scratch], interpret)


def block_matmul(
    x: Float[Array, "N in"],
    values: Float8e4m3fn[Array, "*layers out in"],
    scale: Float[Array, "blocks out"],
    layer: Int[Array, ""] | None = None,
    *,
    interpret: Any = False,
) -> Float[Array, "N out"]:
    """`x @ w.T` for `w = value · scale`, with one scale for each row's 128 neighbouring inputs. Sums are float32; the
    rest is as in `int4_matmul`."""
    return _call(_block_kernel, (x,), values, layer, (), scale, [], interpret)


def _tile(values: Array) -> int:
    """Outputs of a tile."""
    outputs, width = values.shape[-2:]
    return min(max(TILE_BYTES // width // LANES, 1) * LANES, outputs)


def _call(
    kernel: Callable[..., None],
    inputs: tuple[Array, ...],
    values: Array,
    layer: Int[Array, ""] | None,
    of_rows: tuple[Array, ...],
    of_columns: Array,
    scratch: list[Any],
    interpret: Any,
) -> Float[Array, "N out"]:
    """Run a kernel on each tile of tokens and outputs. It gets inputs, values, more about their rows `[out, ..]` and
    about outputs `[.., out]`, the results `[N, tile]`, sums of that shape, and scratch memory."""
    tokens, (outputs, width) = inputs[0].shape[0], values.shape[-2:]
    tile, some = _tile(values), min(tokens, TOKENS)
    stack = values[None] if layer is None else values
    index = jnp.int32(0) if layer is None else layer
    return pl.pallas_call(
        lambda _, *refs: kernel(*refs),
        out_shape=jax.ShapeDtypeStruct((tokens, outputs), inputs[0].dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(tokens, some), pl.cdiv(outputs, tile)),
            in_specs=[
                *(pl.BlockSpec((some, a.shape[1]), lambda n, o, _: (n, 0)) for a in inputs),
                pl.BlockSpec((None, tile, width), lambda n, o, layer: (layer[0], o, 0)),
                *(pl.BlockSpec((tile, a.shape[1]), lambda n, o, _: (o, 0)) for a in of_rows),
                pl.BlockSpec((of_columns.shape[0], tile), lambda n, o, _: (0, o)),
            ],
            out_specs=pl.BlockSpec((some, tile), lambda n, o, _: (n, o)),
            scratch_shapes=[pltpu.VMEM((some, tile), jnp.float32), *scratch],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpreted(interpret),
        name="quantised_matmul",
    )(jnp.reshape(index, 1), *inputs, stack, *of_rows, of_columns)


def _product(
    x: Float[Array, "N slab"], weights: Float[Array, "tile slab"], precision: jax.lax.Precision | None = None
) -> Float[Array, "N tile"]:
    return jax.lax.dot_general(
        x, weights, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _int4_kernel(even, odd, sums, codes, steps, *refs):
    """Where the code that stands for 0 is not the middle one, the difference is the same in a group: it is added to the
    sums, not to every code."""
    *zero, scale, out, total, wide = refs
    slabs, groups = codes.shape[1] // LANES, 2 * LANES // GROUP
    slabs_a_chunk = LANES // groups
    group = jax.lax.broadcasted_iota(jnp.int32, (codes.shape[0], LANES), 1) // (GROUP // 2)
    total[...] = jnp.zeros_like(total)

    def chunk(index, _):
        """The slabs whose groups share a tile of steps."""
        lanes = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
        wide[...] = _widened(steps[:, lanes])
        if zero:
            offset = MIDDLE - _widened(zero[0][:, lanes]) * (1 / 16)
            total[...] += _product(sums[:, lanes], wide[...] * offset, jax.lax.Precision.HIGHEST)

        def slab(place, _):
            lanes = pl.ds(pl.multiple_of((index * slabs_a_chunk + place) * LANES, LANES), LANES)
            step = jnp.take_along_axis(wide[...], group + place * groups, axis=1)
            pair = codes[:, lanes].astype(jnp.int32)
            for x, code in ((even, pair & 15), (odd, pair >> 4)):
                total[...] += _product(x[:, lanes], ((code.astype(jnp.float32) - MIDDLE) * step).astype(x.dtype))

        jax.lax.fori_loop(0, jnp.minimum(slabs_a_chunk, slabs - index * slabs_a_chunk), slab, None)

    jax.lax.fori_loop(0, steps.shape[1] // LANES, chunk, None)
    out[...] = (total[...] * scale[...]).astype(out.dtype)


def _widened(narrow):
    return narrow.astype(jnp.int32).astype(jnp.float32)


def _block_kernel(x, values, scale, out, sums):
    sums[...] = jnp.zeros_like(sums)

    def block(index, _):
        lanes = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
        weights = values[:, lanes].astype(x.dtype)
        sums[...] += _product(x[:, lanes], weights) * scale[pl.ds(index, 1), :]

    jax.lax.fori_loop(0, values.shape[1] // LANES, block, None)
    out[...] = sums[...].astype(out.dtype)
