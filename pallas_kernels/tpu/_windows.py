"""Windows: the parts of a page that are read, changed and written back where only some of its slots change.

A DMA takes whole tiles of an array's last two dimensions. Slots lie in rows where vectors fill whole lanes (128 of
them): a window is then one tile of rows. Else XLA keeps the pool with its slots in lanes, so that no lane is empty, and
so the kernels see it; scales have their slots there anyway. Such a window is 128 slots.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.tpu.blocks import LANES

VMEM_BYTES = 2**24
"""Of the core's memory, what any chip gives a kernel that does not ask for more."""
ROW_BYTES = 32
"""Of a column of a tile."""


class Stored(NamedTuple):
    """How one of the pool's arrays lies in memory."""

    page: int
    size: int
    """Slots of a window."""
    in_lanes: bool
    turned: bool
    """The kernel sees `[.., D, page]` where `[.., page, D]` is meant."""

    def window(self, slot: Int[Array, ""]) -> tuple[Any, ...]:
        """Index of the window that begins at a slot of a page, in what of the array comes after its pages."""
        part = pl.ds(pl.multiple_of(slot, self.size), self.size)
        whole = slice(None)
        return (whole, whole, whole, part) if self.turned else (whole, whole, part)

    def shape(self, page_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a window in pages `[K, 2, ..]` of that shape, as the kernel sees them."""
        return (*page_shape[:-1], self.size) if self.in_lanes else (*page_shape[:2], self.size, *page_shape[3:])

    def most(self, slots: int) -> int:
        """Windows that so many neighbouring slots touch at most."""
        return (slots + self.size - 2) // self.size + 1


def stored(arrays: dict[str, Any]) -> dict[str, Stored]:
    """How each of the pool's arrays lies in memory."""
    kv = arrays["kv"]
    page, dim = kv.shape[3:]
    lanes = LANES if page % LANES == 0 else page
    turned = dim % LANES != 0
    rows = ROW_BYTES // kv.dtype.itemsize
    found = {"kv": Stored(page, lanes if turned else rows, turned, turned)}
    return found | {"scale": Stored(page, lanes, True, False)} if "scale" in arrays else found


def pinned(pools: dict[str, Array], interpret: Any) -> dict[str, Array]:
    """The pools, to stay where they are: XLA would move what fits into faster memory, as scales do, and back.

    They must be of another shape than a program's own arguments and results, which it refuses to pin.
    """
    if interpret:
        return pools
    return {name: pltpu.with_memory_space_constraint(pool, pltpu.HBM) for name, pool in pools.items()}


def seen(arrays: dict[str, Array], kinds: dict[str, Stored]) -> dict[str, Array]:
    """The pool's arrays as kernels see them, and back: no number moves."""
    return {name: jnp.swapaxes(array, -1, -2) if kinds[name].turned else array for name, array in arrays.items()}


def each_window(
    begin: Int[Array, ""], end: Int[Array, ""], size: int, visit: Callable[[Any, Any], Any], carry: Any
) -> Any:
    """`carry` after `carry = visit(slot, carry)` for every window that slots `begin` to `end` touch, from the window's
    first slot on."""
    base = divided(begin, size)
    number = jnp.where(end > begin, divided(end - 1, size) + 1 - base, 0)
    return jax.lax.fori_loop(0, number, lambda index, carry: visit((base + index) * size, carry), carry)


def divided(number: Int[Array, ""], by: int) -> Int[Array, ""]:
    """`number // by` of a number that is not negative, in fewer instructions."""
    return number >> (by.bit_length() - 1) if by & (by - 1) == 0 else jax.lax.div(number, by)


def remaining(number: Int[Array, ""], by: int) -> Int[Array, ""]:
    """`number % by`, likewise."""
    return number & (by - 1) if by & (by - 1) == 0 else jax.lax.rem(number, by)


def widen(narrow: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """As float32, which can be moved by single rows."""
    return narrow.astype(jnp.float32)


def narrow(wide: Shaped[Array, "*shape"], dtype: Any) -> Shaped[Array, "*shape"]:
    """float32 numbers as the pool stores them."""
    return (wide.astype(jnp.int32) if jnp.issubdtype(dtype, jnp.integer) else wide).astype(dtype)


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """What an array takes in the memory of the core: whole tiles of its last two dimensions."""
    *lead, rows, lanes = shape
    tile = ROW_BYTES // itemsize
    return itemsize * -(-rows // tile) * tile * -(-lanes // LANES) * LANES * math.prod(lead)


def interpreted(interpret: Any) -> Any:
    """True as the interpreter of TPU kernels with its defaults."""
    return pltpu.InterpretParams() if interpret is True else interpret


def unsupported(arrays: dict[str, Any], interpret: Any = False) -> str | None:
    """Why the pages of such a pool cannot be written to in place; None where they can. The interpreter can do with
    pages of fewer slots than a TPU."""
    extra = set(arrays) - {"kv", "scale"}
    if extra:
        return f"pages are written in place where they hold kv and scale, not {', '.join(sorted(extra))}"
    for name, kind in stored(arrays).items():
        size = LANES if kind.in_lanes and not interpret else kind.size
        if kind.page % size:
            what = f"{name} of {arrays[name].dtype.name}, heads of {arrays['kv'].shape[4]}"
            return f"pages ({what}) are written in place by {size} slots; {kind.page} is no multiple of that"
    return None
