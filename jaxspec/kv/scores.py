"""How much the tokens of a sequence were looked at, and which of them stay (H2O, Zhang et al., 2023).

A slot's score is the sum of the softmax weights that voters gave it, a mean over the queries of its key/value head. It
goes where its key goes. Scores have the batch first, `[B, L, K, S]`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Rows

SCORES = "scores"
"""The name of scores among the arrays of a pool."""
DTYPE = jnp.dtype(jnp.float32)

Pool = dict[str, Array]


def vote(pool: Pool, layer, rows: Rows, mass: Float[Array, "R K S"]) -> Pool:
    """The pool with what the first token of each row looks at added, in its first S slots; rows without tokens have no
    vote."""
    weights = jnp.where((rows.count > 0)[:, None, None], mass, 0)
    return pool | {SCORES: pool[SCORES].at[rows.sequence, layer, :, : mass.shape[-1]].add(weights)}


def clear(pool: Pool, row: Int[Array, ""]) -> Pool:
    """The pool with no votes in a row, where it counts them."""
    return pool | {SCORES: pool[SCORES].at[row].set(0)} if SCORES in pool else pool


def heaviest(
    scores: Float[Array, "L K S"], length: Int[Array, ""], heavy: int, recent: int
) -> tuple[Int[Array, "L K N"], Float[Array, "L K S"]]:
    """The last `recent` of `length` slots and the `heavy` best of the others, of equals the first ones, in order; and
    their scores in the slots that they go to."""
    slots = jnp.arange(scores.shape[-1])
    order = jnp.where(slots >= length - recent, jnp.inf, scores)
    order = jnp.where(slots < length, order, -jnp.inf)
    stay = jnp.sort(jax.lax.top_k(order, heavy + recent)[1], axis=-1)
    moved = jnp.take_along_axis(scores, stay, axis=-1)
    return stay, jnp.zeros_like(scores).at[..., : stay.shape[-1]].set(moved)


def ends(length: Int[Array, ""], first: int, last: int) -> Int[Array, "1 1 N"]:
    """The first and the last of `length` slots, in the shape of `heaviest`."""
    return jnp.concatenate([jnp.arange(first), length - last + jnp.arange(last)])[None, None]
