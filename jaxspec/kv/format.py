"""What a storage format of keys and values must be able to do."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array


class Format(NamedTuple):
    """A layout of pages as pure functions; it alone knows what is in the pool's arrays.

    `arrays(pages, page, heads, dim)`: name to shape and dtype of each stored array.
    `write(arrays, pages, offsets, k, v)`: stores keys and values `[.., K, D]` at slots given by physical page and
    offset `[..]`, and drops pages out of range.
    `read(arrays, pages, which)`: keys (0) or values (1) `[R, K, page, D]` of physical pages `[R]`.
    `move(arrays, source, target)`: copies slots as they are stored; both are (pages, offsets), out of range is dropped.
    """

    arrays: Callable[[int, int, int, int], dict[str, jax.ShapeDtypeStruct]]
    write: Callable[..., dict[str, Array]]
    read: Callable[..., Array]
    move: Callable[..., dict[str, Array]]
