"""Writing new keys and values into the pages of a pool, in place: XLA's scatter would copy the whole pool.

The windows that a row's slots lie in are read, changed and written back. Those of all rows are on their way at the
same time where every row is of another sequence; else rows may share a window, and take their turns.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Rows
from pallas_kernels.tpu._append_tokens import (
    Block,
    Window,
    encode,
    merge_in_lanes,
    merge_in_rows,
    merge_scales,
)
from pallas_kernels.tpu._commit import commit
from pallas_kernels.tpu._windows import (
    VMEM_BYTES,
    Stored,
    divided,
    each_window,
    interpreted,
    padded_bytes,
    pinned,
    remaining,
    seen,
    stored,
    unsupported,
)
from pallas_kernels.tpu.blocks import LANES, SUBLANES

__all__ = ["append", "commit", "unsupported"]

BLOCK_BYTES = 4 * 2**20
"""Memory for the rows of one grid step, if more than a few have to share it at all."""
ROW_TILE = 16
"""Tokens of a grid step are a multiple of this, where they are not all tokens."""


class _Lines(NamedTuple):
    """Where the rows of a call lie, in the scalar memory."""

    sequence: Any
    start: Any
    count: Any
    table: Any


def append(
    arrays: dict[str, Array],
    rows: Rows,
    page_table: Int[Array, "B P"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K D"],
    *,
    distinct: bool,
    interpret: Any = False,
) -> dict[str, Array]:
    """The pool's arrays with the rows' keys and values in their slots; donated arrays are changed where they are.

    `arrays` has "kv" `[pages, K, 2, page, D]`, keys first; where that is int8 or float8 also "scale" bfloat16
    `[pages, K, 2, page]`, one for each vector: its largest number becomes the largest of the type. Padding, slots past
    the page table and pages out of range are not written. `distinct` promises that every row is of another sequence.
    NotImplementedError for pools that `unsupported` names.
    """
    reason = unsupported(arrays, interpret)
    if reason is not None:
        raise NotImplementedError(reason)
    num_rows, width, heads, dim = k.shape
    kinds = stored(arrays)
    pools = seen(arrays, kinds)
    block = _block(pools, kinds, k.shape, distinct)
    steps = -(-num_rows // block.rows)
    padding = (0, steps * block.rows - num_rows)
    sequence, start, count = (jnp.pad(part.astype(jnp.int32), padding) for part in rows)
    lines = _Lines(sequence, start, count, page_table.astype(jnp.int32))
    tokens = pl.BlockSpec((block.tokens, heads * dim), lambda step, *_: (step, 0))
    everywhere = dict.fromkeys(pools, pl.BlockSpec(memory_space=pltpu.HBM))
    written = pl.pallas_call(
        partial(_kernel, block),
        out_shape={name: pltpu.HBM((1, *pool.shape), pool.dtype) for name, pool in pools.items()},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lines),
            grid=(steps,),
            in_specs=[tokens, tokens, everywhere],
            out_specs=everywhere,
            scratch_shapes=[
                {name: pltpu.VMEM(block.buffer(name, pool), pool.dtype) for name, pool in pools.items()},
                {name: pltpu.SMEM((len(Window._fields), block.windows(name)), jnp.int32) for name in pools},
                pltpu.VMEM(block.wide(), jnp.float32),
                pltpu.VMEM((block.tokens + SUBLANES, -(-2 * heads // LANES) * LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(lines) + 2 + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=max(2 * _room(block, pools), VMEM_BYTES)),
        interpret=interpreted(interpret),
        name="append",
    )(
        *lines,
        *(a.reshape(num_rows * width, heads * dim) for a in (k, v)),
        pinned({name: pool[None] for name, pool in pools.items()}, interpret),
    )
    return seen({name: pool[0] for name, pool in written.items()}, kinds)


def _block(pools: dict[str, Array], kinds: dict[str, Stored], shape: tuple[int, ...], distinct: bool) -> Block:
    """As many rows in a grid step as find room; tokens of a step are whole tiles."""
    num_rows, width, heads, dim = shape
    step = ROW_TILE // math.gcd(width, ROW_TILE)
    few = Block(step, width, heads, dim, kinds, pools["kv"].dtype.itemsize == 4, 1)
    count = min(max(BLOCK_BYTES // _room(few, pools), 1) * step, num_rows)
    return few._replace(rows=count, together=count if distinct else 1)


def _room(block: Block, pools: dict[str, Array]) -> int:
    """Bytes of the core's memory that a grid step takes: windows, and tokens as they come (twice) and in float32."""
    windows = sum(padded_bytes(block.buffer(name, pool), pool.dtype.itemsize) for name, pool in pools.items())
    return windows + 3 * padded_bytes((2 * block.heads, block.tokens, block.dim), 4)


def _kernel(block: Block, sequence, start, count, table, k, v, _, pages, buffers, lists, wide, scales, semaphores):
    lines = _Lines(sequence, start, count, table)
    pages = {name: pool.at[0] for name, pool in pages.items()}
    encode(block, k, v, buffers["kv"].dtype, wide, scales)

    def some_rows(turn, _):
        numbers, reads = {}, {}
        for name, pool in pages.items():
            read = partial(_copy, block.kinds[name], pool, buffers[name], semaphores, True)
            numbers[name], reads[name] = _find(block, lines, turn, block.kinds[name], pool.shape[0], lists[name], read)
        for name, buffer in buffers.items():
            _wait(reads[name], buffer, semaphores.at[1])
        for name, pool in pages.items():
            write = partial(_copy, block.kinds[name], pool, buffers[name], semaphores, False)
            tokens = scales if name == "scale" else wide
            _merge(block, name, numbers[name], lists[name], tokens, buffers[name], write)
        for name, buffer in buffers.items():
            _wait(numbers[name], buffer, semaphores.at[0])

    jax.lax.fori_loop(0, block.rows // block.together, some_rows, None)


def _copy(kind: Stored, pool, buffer, semaphores, reading: bool, index, at: Window) -> None:
    """Begin to read or write a window."""
    ends = pool.at[at.page, *kind.window(at.slot)], buffer.at[index]
    source, target = ends if reading else ends[::-1]
    pltpu.make_async_copy(source, target, semaphores.at[int(reading)]).start()


def _wait(number, buffer, semaphore) -> None:
    """Wait for so many windows: a semaphore counts bytes, whatever they are of."""

    def one(_index, _):
        pltpu.make_async_copy(buffer.at[0], buffer.at[0], semaphore).wait()

    jax.lax.fori_loop(0, number, one, None)


def _find(block: Block, lines: _Lines, turn, kind: Stored, num_pages: int, windows, read):
    """List the windows that a turn's rows write to, and begin to read those that keep some of their slots. Returns the
    numbers of both."""

    def of_row(i, found):
        row = turn * block.together + i
        line = pl.program_id(0) * block.rows + row
        start = lines.start[line]
        end = jnp.minimum(start + lines.count[line], lines.table.shape[1] * kind.page)

        def of_window(slot, found):
            number, reads = found
            page = lines.table[lines.sequence[line], divided(slot, kind.page)]
            at = Window(row, page, remaining(slot, kind.page), start - slot, end - slot)
            for field, value in enumerate(at):
                windows[field, number] = value
            exists = (page >= 0) & (page < num_pages)
            needed = exists & ((at.begin > 0) | (at.end < kind.size))
            pl.when(needed)(lambda: read(number, at))
            return number + exists.astype(jnp.int32), reads + needed.astype(jnp.int32)

        return each_window(start, end, kind.size, of_window, found)

    return jax.lax.fori_loop(0, block.together, of_row, (0, 0))


def _merge(block: Block, name: str, number, windows, tokens, buffer, write) -> None:
    """Put the tokens into all windows of the list, and begin to write these."""
    merge = merge_in_lanes if block.kinds[name].in_lanes else merge_in_rows
    merge = merge_scales if name == "scale" else merge

    def one(index, _):
        at = Window(*(windows[field, index] for field in range(len(Window._fields))))
        merge(block, tokens, buffer.at[index], at)
        write(index, at)

    jax.lax.fori_loop(0, number, one, None)
