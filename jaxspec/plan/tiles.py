"""What arrays take in the memory of a TPU: their last two dimensions come in tiles."""

import math
from typing import Any

import jax
import jax.numpy as jnp

LANES, SUBLANES, WORD = 128, 8, 4
"""Numbers of a register's row, its rows, and bytes of one of its numbers; narrower ones share it."""


def held_bytes(tree: Any, tiled: bool) -> int:
    """Bytes of the arrays of a tree on one device, in tiles or as they are."""
    return sum(_bytes(tuple(leaf.shape), jnp.dtype(leaf.dtype).itemsize, tiled) for leaf in jax.tree.leaves(tree))


def _bytes(shape: tuple[int, ...], width: int, tiled: bool) -> int:
    """The compiler may turn an array, and takes the two dimensions that leave the least of their tiles empty; tiles
    are as low as the second of them allows."""
    size = math.prod(shape) * width
    if not tiled or not size:
        return size
    packing = WORD // width
    if len(shape) < 2:
        return _whole(max(size // width, 1), LANES * packing) * width
    return min(
        size
        // (shape[lane] * shape[row])
        * _whole(shape[lane], LANES)
        * _whole(shape[row], _height(shape[row], packing))
        for lane in range(len(shape))
        for row in range(len(shape))
        if row != lane
    )


def _height(rows: int, packing: int) -> int:
    """Of a tile: a power of 2."""
    return min(packing * SUBLANES, max(packing, 2 ** math.ceil(math.log2(rows))))


def _whole(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
