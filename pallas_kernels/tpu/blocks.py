"""Sizes of the blocks that the attention kernel works in, per chip and shape."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.chip import Chip

LANES, SUBLANES = 128, 8
TILE = 64
"""Rows of queries that are worked on at a time: more have too many logits for the registers. Many times more, those of
prompts, are worked on together nevertheless: that their logits are spilled costs less than to fetch the keys into the
matrix unit for every tile."""
MOST_ROWS = 512
"""Of a work item."""
SCRATCH_BYTES = 2**24
"""For the running numbers of all heads, 128 in float32 thrice for every row."""


@dataclass(frozen=True)
class Blocks:
    """How the attention kernel divides its work."""

    fetch_pages: int
    """Pages copied together, into one buffer."""
    compute_tokens: int
    """Slots of one step of the softmax: whole pages and whole 128s, a divisor of what is fetched."""
    query_tokens: int
    """Query tokens of a row that are attended together; longer rows are cut into tiles."""
    buffers: int = 2
    """One is in use while the others are filled."""
    int8_keys: bool = False
    """Multiply int8 keys as such, where the chip's matrix unit can, not widened."""


def padded_rows(rows: int) -> int:
    """Rows of queries with padding to whole registers, and to whole tiles if there are several."""
    unit = TILE if rows > TILE else SUBLANES
    return -(-rows // unit) * unit


def tile_of(queries: int) -> int:
    """Rows that are worked on at a time, of so many with padding."""
    return queries if queries <= TILE or queries > 2 * TILE else TILE


def turned(page: int, dim: int) -> bool:
    """Whether XLA:TPU lays out an array [.., page, dim] with the page along lanes, where that pads it less; a kernel
    then takes it as [.., dim, page], or else XLA copies it."""
    return page % LANES == 0 and dim % LANES != 0


def blocks_for(chip: Chip | None, dtype: jnp.dtype, page: int, heads: int, group: int, dim: int, width: int) -> Blocks:
    """Blocks for `width` query tokens a row, `heads` of `group` queries each, pages of `page` slots of `dtype`.

    A step's logits fill half of the 64 vector registers at most, so that none is spilled. Buffers hold 512 KiB or 1024
    slots, which hides what it costs to begin copies, and there are enough of them that 1.5 MiB are under way, about
    what a chip's memory delivers within its latency; both as far as steps do not ask for more. Prompts get four times
    as much of both: with more to do in a step, less waits for its results.
    """
    dtype = jnp.dtype(dtype)
    most_rows = min(MOST_ROWS, SCRATCH_BYTES // (3 * 4 * LANES * heads))
    query_tokens = min(width, max(1, most_rows // group // SUBLANES * SUBLANES or most_rows // group))
    rows = tile_of(padded_rows(query_tokens * group))
    registers, buffer_bytes = (128, 2**21) if rows > TILE else (32, 2**19)
    # In two parts queries are twice the rows: past some, widening the keys costs less.
    int8_keys = dtype == jnp.int8 and chip is not None and bool(chip.int8_flops) and rows <= min(16, 2048 // dim)
    slot_bytes = 2 * heads * dtype.itemsize * (dim if turned(page, dim) else -(-dim // LANES) * LANES)
    least = max(page, LANES)
    most = min(1024 * LANES // max(dim, LANES), registers * SUBLANES * LANES // rows, 2**22 // slot_bytes)
    compute = max(least, most // least * least)
    fetch = max(compute, min(1024, buffer_bytes // slot_bytes) // compute * compute)
    buffers = min(8, max(2, 2**21 // (fetch * slot_bytes)))
    return Blocks(fetch // page, compute, query_tokens, buffers, int8_keys)
