"""The group of slots a sequence is in, where the format stores whole groups only (KIVI, Liu et al., 2024).

A query sees its own group in bfloat16 and all earlier ones as they are stored: what it sees depends on its slot alone,
not on how its prompt was cut into chunks or what was drafted. So every row of tokens lies within one group (drafts
past its end are not taken, `room`), and a sequence has at most one row in each group of a call. A group is stored as
soon as its last token is committed or, where rows are chains, written: what a rejected draft has left there is stored
again when the group is whole, and nobody looks before.

Tails have the batch first, `[B, L, K, 2, S, D]`, and room for a tree's nodes behind the group.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxspec.kv.bits import keep, numbers
from jaxspec.kv.format import Format
from pallas_kernels import Rows, Tail

TAIL = "tail"
"""The name of tails among the arrays of a pool."""
DTYPE = jnp.dtype(jnp.bfloat16)

Pool = dict[str, Array]
Block = Shaped[Array, "R K 2 S D"]


def place(length: Int[Array, "B"], group: int) -> Int[Array, "B"]:
    """Where slot `length` is within its group."""
    return length % group


def room(form: Format, length: Int[Array, "B"]) -> Int[Array, "B"] | None:
    """Drafts that a round may take after its root in slot `length`; None where any number."""
    return form.group - 1 - place(length, form.group) if form.group else None


def own_group(
    pool: Pool, group: int, layer, rows: Rows, k: Float[Array, "R T K D"], v: Float[Array, "R T K D"]
) -> Block:
    """The slots of each row's group: those of the tail, and the row's own tokens."""
    at = _places(rows, group, k.shape[1], pool[TAIL].shape[-2])
    index = jnp.arange(at.shape[0])[:, None]
    own = keep(jnp.stack([k, v], axis=-2), DTYPE, pool[TAIL].dtype)
    return pool[TAIL][rows.sequence, layer].at[index, :, :, at].set(own, mode="drop")


def visible(block: Block, group: int, rows: Rows) -> Tail:
    """What attention sees instead of the pages."""
    wide = numbers(block, DTYPE).astype(jnp.float32)
    return Tail(wide[:, :, 0], wide[:, :, 1], rows.start - place(rows.start, group))


def extend(pool: Pool, group: int, layer, rows: Rows, k: Float[Array, "R T K D"], v: Float[Array, "R T K D"]) -> Pool:
    """The pool with the rows' tokens in the tails; of a sequence with several rows, those of the last."""
    tails = pool[TAIL]
    end = jnp.where(rows.count > 0, rows.start + rows.count, 0)
    last = jnp.zeros(tails.shape[0], end.dtype).at[rows.sequence].max(end)
    kept = rows._replace(count=jnp.where(end == last[rows.sequence], rows.count, 0))
    at = _places(kept, group, k.shape[1], tails.shape[-2])
    own = keep(jnp.stack([k, v], axis=-2), DTYPE, pool[TAIL].dtype)
    return pool | {TAIL: tails.at[rows.sequence[:, None], layer, :, :, at].set(own, mode="drop")}


def store(
    form: Format, pool: Pool, whole: Bool[Array, "..."], pages: Int[Array, "R *L"], offsets: Int[Array, "..."], block
) -> Pool:
    """The pool with the groups of `block` `[R, *L, K, 2, S, D]` stored that are `whole`; costs nothing where none is.

    `pages`, `offsets`: where each group begins.
    """
    pages = jnp.where(whole, pages, jnp.iinfo(jnp.int32).max)

    def write(carry):
        slots = jnp.moveaxis(block[..., : form.group, :], (-4, -3), (-2, -4))  # [.., 2, group, K, D]
        k, v = (numbers(slots[..., half, :, :, :], DTYPE).astype(jnp.float32) for half in (0, 1))
        return jnp.bool_(False), form.write(carry[1], pages, jnp.broadcast_to(offsets, pages.shape), k, v)

    # A loop that runs once or not at all: a conditional would copy the pool.
    pages_only = {name: array for name, array in pool.items() if name != TAIL}
    _, stored = jax.lax.while_loop(lambda carry: carry[0], write, (jnp.any(whole), pages_only))
    return pool | stored


def move(pool: Pool, group: int, length: Int[Array, "B"], path: Int[Array, "B D"], count: Int[Array, "B"]) -> Pool:
    """The pool with accepted tree paths moved together, as `jaxspec.kv.pool.compact` does it in pages."""
    tails = pool[TAIL]
    batch, step = jnp.arange(path.shape[0])[:, None], jnp.arange(path.shape[1])
    first = place(length, group)[:, None]
    taken = tails.at[batch, :, :, :, first + path].get(mode="clip")
    target = jnp.where(step < count[:, None], first + step, tails.shape[-2])
    return pool | {TAIL: tails.at[batch, :, :, :, target].set(taken, mode="drop")}


def _places(rows: Rows, group: int, width: int, size: int) -> Int[Array, "R T"]:
    """Where the rows' tokens are in their tails; padding is out of range."""
    step = jnp.arange(width)
    return jnp.where(step < rows.count[:, None], place(rows.start, group)[:, None] + step, size)
