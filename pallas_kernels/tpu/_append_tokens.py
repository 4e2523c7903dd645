"""What append does with tokens in the core's memory: how they are stored, and how they get into windows of pages."""

import math
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.codes import quantise
from pallas_kernels.tpu._windows import Stored, narrow, widen
from pallas_kernels.tpu.blocks import LANES, SUBLANES


class Block(NamedTuple):
    """The static shape of a grid step."""

    rows: int
    width: int
    heads: int
    dim: int
    kinds: dict[str, Stored]
    wholly: bool
    """Numbers need all of float32; else bfloat16 holds what is stored."""
    together: int
    """Rows that may be on their way at the same time."""

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    @property
    def lanes(self) -> int:
        """Numbers of a vector that are moved together: rows that begin anywhere are no wider than a tile."""
        return self.dim if self.dim <= LANES else math.gcd(self.dim, LANES)

    @property
    def parts(self) -> range:
        """Of a vector, each of so many numbers."""
        return range(self.dim // self.lanes)

    @property
    def margin(self) -> int:
        """Rows before and after the tokens: a window may begin before the first and end after the last."""
        return max(self.kinds["kv"].size, SUBLANES)

    def windows(self, name: str) -> int:
        """Windows of an array that rows write to at most."""
        return self.rows * self.kinds[name].most(self.width)

    def buffer(self, name: str, pool: Array) -> tuple[int, ...]:
        """Shape of room for them."""
        return self.windows(name), *self.kinds[name].shape(pool.shape[1:])

    def wide(self) -> tuple[int, ...]:
        """Shape of the tokens' numbers in float32: first keys and values of each head, and parts of a vector."""
        return 2 * self.heads, len(self.parts), self.tokens + 2 * self.margin, self.lanes


class Window(NamedTuple):
    """A window that a row writes to; a list of them lies in the scalar memory, field by field."""

    row: Int[Array, ""]
    """In the grid step."""
    page: Int[Array, ""]
    slot: Int[Array, ""]
    """Its first, in the page."""
    begin: Int[Array, ""]
    """Where in it the row's first token would lie; before it where this is negative."""
    end: Int[Array, ""]


def encode(block: Block, k, v, dtype, wide, scales) -> None:
    """The numbers that are stored for all tokens, as float32, and their scales: one column for each of keys
    and values of a head."""
    scaled = dtype.itemsize == 1
    lane = jax.lax.broadcasted_iota(jnp.int32, (block.tokens, scales.shape[1]), 1)
    columns = jnp.zeros(lane.shape, jnp.float32)
    for head, (half, ref) in product(range(block.heads), enumerate((k, v))):
        column = 2 * head + half
        numbers = widen(ref[:, head * block.dim : (head + 1) * block.dim])
        if scaled:
            numbers, scale = quantise(numbers, dtype)
            columns = jnp.where(lane == column, scale, columns)
        numbers = widen(narrow(numbers, dtype))
        for part in block.parts:
            lanes = numbers[:, part * block.lanes : (part + 1) * block.lanes]
            wide[column, part, block.margin : block.margin + block.tokens, :] = lanes
    if scaled:
        scales[: block.tokens, :] = columns


def merge_in_rows(block: Block, wide, buffer, at: Window) -> None:
    """Vectors of a window's slots in its rows."""
    size = block.kinds["kv"].size
    slot = jax.lax.broadcasted_iota(jnp.int32, (size, block.lanes), 0)
    mine = (slot >= at.begin) & (slot < at.end)
    tokens = pl.ds(block.margin + at.row * block.width - at.begin, size)
    for column, part in product(range(2 * block.heads), block.parts):
        lanes = pl.ds(part * block.lanes, block.lanes)
        place = column // 2, column % 2, slice(None), lanes
        buffer[place] = narrow(jnp.where(mine, wide[column, part, tokens, :], widen(buffer[place])), buffer.dtype)


def merge_in_lanes(block: Block, wide, buffer, at: Window) -> None:
    """Vectors of a window's slots in its lanes."""
    for column, part in product(range(2 * block.heads), block.parts):
        place = column // 2, column % 2, pl.ds(part * block.lanes, block.lanes)
        new, mine = _in_lanes(block, wide.at[column, part], block.margin, at, buffer.shape[-1])
        buffer[place] = narrow(jnp.where(mine, new, widen(buffer[place])), buffer.dtype)


def merge_scales(block: Block, scales, buffer, at: Window) -> None:
    """Scales of a window's slots, those of keys and of values of a head in two rows."""
    new, mine = _in_lanes(block, scales, 0, at, buffer.shape[-1])
    for head in range(block.heads):
        two = slice(2 * head, 2 * head + 2)
        buffer[head] = narrow(jnp.where(mine[two], new[two], widen(buffer[head])), buffer.dtype)


def _in_lanes(block: Block, tokens, first: int, at: Window, size: int):
    """Rows of a window's tokens, from row `first` of the step's first token on, as the lanes of its slots, and which
    lanes are theirs. The product has one term that is not zero, and is exact."""
    count = -(-block.width // SUBLANES) * SUBLANES
    numbers = tokens[pl.ds(first + at.row * block.width, count), :]
    token, slot = (jax.lax.broadcasted_iota(jnp.int32, (count, size), axis) for axis in (0, 1))
    here = token + at.begin == slot
    real = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 0) + at.begin < at.end
    exact, precision = (jnp.float32, jax.lax.Precision.HIGHEST) if block.wholly else (jnp.bfloat16, None)
    new = jax.lax.dot_general(
        jnp.where(real, numbers, 0).astype(exact),
        here.astype(exact),
        (((0,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    lane = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1)
    return new, (lane >= at.begin) & (lane < at.end)
