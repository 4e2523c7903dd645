"""Ragged paged attention as one Pallas TPU kernel: decode, draft-tree verification and chunked prefill.

Every row's tile of query tokens is a step of the grid and goes over the pages it sees, a block of them at a time, with
an online softmax. While a block is worked on, the next ones are copied, across steps of the grid. Follows
PagedAttention (Kwon et al., 2023) and FlashAttention (Dao et al., 2022), with the tree mask of SpecInfer (Miao et al.,
2023).
"""

from collections.abc import Callable
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Rows, Variant
from pallas_kernels.tpu._attention_fetch import fetch_next, start, wait, wait_whole
from pallas_kernels.tpu._attention_softmax import LOW_PART, add_block, add_visible_block, finish, reset
from pallas_kernels.tpu._attention_work import Plan, all_visible, block_at, item_at
from pallas_kernels.tpu._windows import VMEM_BYTES, interpreted
from pallas_kernels.tpu.blocks import LANES, Blocks, padded_rows, turned

PAGE_ROWS = {"float32": 8, "bfloat16": 16, "int8": 32, "float8_e4m3fn": 32}
"""Slots that a tile of memory holds of every type: pages are whole tiles."""


class _Operand(NamedTuple):
    """An array that the kernel gets one by one of its first axis: `place(w)` for work item w."""

    array: Array
    place: Callable


def unsupported(q: Array, arrays: dict[str, Array]) -> str | None:
    """Why the kernel cannot do this, in a line; None if it can."""
    kv = arrays["kv"]
    name, page = kv.dtype.name, kv.shape[3]
    if set(arrays) - {"kv", "scale"}:
        return f"pages have {', '.join(sorted(arrays))}, the kernel reads kv and scale"
    if name not in PAGE_ROWS:
        return f"pages of {name}; the kernel reads {', '.join(PAGE_ROWS)}"
    if page % PAGE_ROWS[name]:
        return f"pages of {page} slots; {name} needs a multiple of {PAGE_ROWS[name]}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype.name}; the kernel takes float32 and bfloat16"
    return None


def paged_attention(
    q: Float[Array, "R T K G D"],
    kv: Array,
    scales: Float[Array, "N K 2 page"] | None,
    rows: Rows,
    page_table: Int[Array, "B P"],
    ancestors: Int[Array, "R T W"] | None,
    sink_queries: Float[Array, "R T K G D"] | None = None,
    *,
    scale: float,
    variant: Variant,
    blocks: Blocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "R T K G D"] | tuple[Float[Array, "R T K G D"], Float[Array, "R K S"]]:
    """See `pallas_kernels.api.paged_attention`. `kv` [N, K, 2, page, D] holds keys and values, in 8 bits with `scales`.

    Raises NotImplementedError for what `unsupported` tells.
    """
    arrays = {"kv": kv} if scales is None else {"kv": kv, "scale": scales}
    why = unsupported(q, arrays)
    if why is not None:
        raise NotImplementedError(why)
    num_rows, width, _, group, dim = q.shape
    plan = Plan(
        variant=variant,
        blocks=blocks,
        dtype=jnp.promote_types(q.dtype, kv.dtype if scales is None else jnp.bfloat16),
        tree=ancestors is not None,
        sink_queries=sink_queries is not None,
        width=width,
        tiles=-(-width // blocks.query_tokens),
        group=group,
        page=kv.shape[3],
        turned=turned(kv.shape[3], dim),
        table_width=page_table.shape[1],
    )
    if plan.turned:
        arrays["kv"] = kv.swapaxes(-1, -2)
    operands = _queries(plan, "q", q * scale)
    if sink_queries is not None:
        operands |= _queries(plan, "sink_q", sink_queries * scale)
    if width > 1:
        operands |= _marks(plan, num_rows, ancestors)
    scalars = {"sequence": rows.sequence, "start": rows.start, "count": rows.count, "table": page_table.reshape(-1)}
    out = _call(plan, scalars, operands, arrays, _results(plan, q), interpret)
    result = _by_token(plan, out[0])
    return (result, out[1][:, :, : page_table.shape[1] * plan.page]) if variant.mass else result


def _results(plan: Plan, q: Float[Array, "R T K G D"]) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: results by work item and, if asked for, masses by row, of whole blocks."""
    num_rows, _, heads, _, dim = q.shape
    queries = padded_rows(plan.blocks.query_tokens * plan.group)
    results = {"out": jax.ShapeDtypeStruct((num_rows * plan.tiles, heads, queries, dim), q.dtype)}
    if plan.variant.mass:
        slots = -(-plan.table_width * plan.page // plan.block) * plan.block
        results["mass"] = jax.ShapeDtypeStruct((num_rows, heads, slots), jnp.float32)
    return results


def _scratch(plan: Plan, arrays: dict[str, Array], results: dict[str, jax.ShapeDtypeStruct]) -> dict:
    """Memory that the kernel keeps from step to step."""
    _, heads, queries, dim = results["out"].shape
    scratch = {
        "arrived": pltpu.SemaphoreType.DMA((plan.blocks.buffers,)),
        "cursor": pltpu.SMEM((4,), jnp.int32),
        "peak": pltpu.VMEM((heads, queries, LANES), jnp.float32),
        "total": pltpu.VMEM((heads, queries, LANES), jnp.float32),
        "mixed": pltpu.VMEM((heads, queries, dim), jnp.float32),
    }
    for name, array in arrays.items():
        shape = (plan.blocks.buffers, plan.blocks.fetch_pages, *array.shape[1:])
        scratch[f"{name}_buffer"] = pltpu.VMEM(shape, array.dtype)
    if "mass" in results:
        scratch["logits"] = pltpu.VMEM((heads, padded_rows(plan.group), results["mass"].shape[2]), jnp.float32)
    return scratch


def _call(plan: Plan, scalars, operands: dict[str, _Operand], arrays, results, interpret) -> list[Array]:
    """Run the kernel, once for every work item."""
    scratch = _scratch(plan, arrays, results)
    places = {"out": lambda w: w, "mass": lambda w: jax.lax.div(w, plan.tiles)}

    def spec(shape: tuple[int, ...], place: Callable) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape[1:]), lambda w, *_: (place(w), *[0] * (len(shape) - 1)))

    blocks = [operand.array for operand in operands.values()] + list(results.values())
    memory = [2 * prod(block.shape[1:]) * block.dtype.itemsize for block in blocks]
    memory += [prod(ref.shape) * ref.dtype.itemsize for ref in scratch.values() if ref.memory_space == pltpu.VMEM]
    run = pl.pallas_call(
        partial(_kernel, plan, [*scalars, *operands, *arrays, *results, *scratch]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=results["out"].shape[:1],
            in_specs=[
                *(spec(operand.array.shape, operand.place) for operand in operands.values()),
                *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in arrays),
            ],
            out_specs=[spec(result.shape, places[name]) for name, result in results.items()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(results.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=max(VMEM_BYTES, 2 * sum(memory)),
            disable_bounds_checks=True,
        ),
        name=f"paged_attention_{'tree' if plan.tree else 'chain'}{plan.width}_{arrays['kv'].dtype.name}",
        interpret=interpreted(interpret),
    )
    return list(run(*scalars.values(), *(operand.array for operand in operands.values()), *arrays.values()))


def _kernel(plan: Plan, names: list[str], *given) -> None:
    """One work item."""
    refs = SimpleNamespace(**dict(zip(names, given, strict=True)))
    index = pl.program_id(0)
    pl.when(index == 0)(lambda: start(plan, refs))
    item = item_at(plan, refs, index)
    reset(plan, refs)

    def visit(i, carry):
        block = block_at(plan, item, i)
        visible = all_visible(plan, item, block)

        @pl.when(visible)
        def _() -> None:
            add_visible_block(plan, refs, item, block, wait_whole(plan, refs))
            # In this order the compiler finds a place for all of this beside that.
            fetch_next(plan, refs)

        @pl.when(jnp.logical_not(visible))
        def _() -> None:
            fetch_next(plan, refs)
            add_block(plan, refs, item, block, wait(plan, refs, item, block))

        return carry

    jax.lax.fori_loop(0, item.blocks, visit, 0)
    finish(plan, refs, item)


def _queries(plan: Plan, name: str, q: Float[Array, "R T K G D"]) -> dict[str, _Operand]:
    """Queries [W, K, Q, D] by work item and head, rows padded to whole registers; in two parts if keys are in int8."""
    tokens = plan.blocks.query_tokens
    q = jnp.pad(q, ((0, 0), (0, plan.tiles * tokens - plan.width), (0, 0), (0, 0), (0, 0)))
    q = q.reshape(-1, tokens, *q.shape[2:]).transpose(0, 2, 1, 3, 4)
    q = _pad_rows(q.reshape(*q.shape[:2], -1, q.shape[-1]))
    if not plan.blocks.int8_keys:
        return {name: _Operand(q.astype(plan.dtype), lambda w: w)}
    codes, unit = split(q)
    return {name: _Operand(codes, lambda w: w), f"{name}_unit": _Operand(unit, lambda w: w)}


def _by_token(plan: Plan, out: Float[Array, "W K Q D"]) -> Float[Array, "R T K G D"]:
    """Results of work items in the order that queries came in."""
    heads, dim = out.shape[1], out.shape[3]
    tokens = plan.blocks.query_tokens
    out = out[:, :, : tokens * plan.group].reshape(-1, heads, tokens, plan.group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(-1, plan.tiles * tokens, heads, plan.group, dim)[:, : plan.width]


def split(q: Float[Array, "W K Q D"]) -> tuple[Int[Array, "W K Q2 D"], Float[Array, "W K Q lanes"]]:
    """Queries as int8: `unit * (256 * high + low)`, high parts first, low ones after them, and a unit for every query:
    1/32512 of its largest number, a finer step than bfloat16 has there."""
    q = q.astype(jnp.float32)
    unit = jnp.maximum(jnp.max(jnp.abs(q), axis=-1, keepdims=True), 1e-30) / (127 * LOW_PART)
    codes = jnp.round(q / unit)
    high = jnp.floor((codes + LOW_PART // 2) / LOW_PART)
    parts = jnp.concatenate([high, codes - high * LOW_PART], axis=2)
    return parts.astype(jnp.int8), jnp.broadcast_to(unit, (*unit.shape[:3], LANES))


def _marks(plan: Plan, num_rows: int, ancestors: Int[Array, "R T W"] | None) -> dict[str, _Operand]:
    """What tells queries of an item apart, [.., Q, 1 + W]: depth in the row, then ancestor words."""
    tiles, tokens = plan.tiles, plan.blocks.query_tokens
    if ancestors is None:
        marks = jnp.arange(tiles * tokens, dtype=jnp.int32).reshape(tiles, tokens, 1)
    else:
        depth = jax.lax.population_count(ancestors).sum(-1, keepdims=True) - 1
        marks = jnp.pad(jnp.concatenate([depth, ancestors], -1), ((0, 0), (0, tiles * tokens - plan.width), (0, 0)))
        marks = marks.reshape(num_rows * tiles, tokens, -1)
    marks = _pad_rows(jnp.repeat(marks, plan.group, axis=1))
    return {"marks": _Operand(marks, lambda w: w if plan.tree else jax.lax.rem(w, tiles))}


def _pad_rows(x: Array) -> Array:
    """With whole registers of rows, the axis before the last."""
    more = padded_rows(x.shape[-2]) - x.shape[-2]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])
