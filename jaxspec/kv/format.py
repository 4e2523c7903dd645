"""What a storage format of keys and values must be able to do."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array


class Format(NamedTuple):
    """A layout of pages as pure functions; it alone knows what is in the pool's arrays, which all have pages first.

    `arrays(pages, page, heads, dim)`: name to shape and dtype of each stored array (a pool may keep narrow floats as
    their bits: `jaxspec.kv.bits`). ConfigError where the format has no
    pages of that size or heads of that dimension.
    `write(arrays, pages, offsets, k, v)`: stores keys and values `[.., K, D]` at slots given by physical page and
    offset `[..]`, and drops pages out of range. Where slots are stored in groups, a whole group `[.., group, K, D]` at
    the place of its first slot.
    `read(arrays, pages, which)`: keys (0) or values (1) `[R, K, page, D]` of physical pages `[R]`.
    `move(arrays, source, target)`: copies slots as they are stored; both are (pages, offsets), out of range is dropped.
    None where slots are stored in groups.
    """

    arrays: Callable[[int, int, int, int], dict[str, jax.ShapeDtypeStruct]]
    write: Callable[..., dict[str, Array]]
    read: Callable[..., Array]
    move: Callable[..., dict[str, Array]] | None
    group: int = 0
    """Slots that are stored together; the group a sequence is in waits in its tail (`jaxspec.kv.tail`). 0: none are."""
    draft: "Format | None" = None
    """What a draft model's cache is stored in, where not in this: its rows run ahead of a group's end."""
