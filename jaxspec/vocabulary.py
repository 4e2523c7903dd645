"""Arrays whose last dimension is the vocabulary. Of several devices that share a model each has a slice of it: these
are the operations that need them all. Token ids are those of the whole vocabulary everywhere."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import parallel

Ids = Int[Array, "..."]


def columns(size: int) -> int:
    """Words that each device has, of a vocabulary of so many."""
    return size // parallel.share()


def ids(width: int) -> Int[Array, "width"]:
    """Token ids of this device's columns."""
    return jnp.arange(width) + parallel.index() * width


def column(token: Ids, width: int) -> Ids:
    """The column of a token among `width` of this device; `width`, which scatters drop, if it is another's or none."""
    at = token - parallel.index() * width
    return jnp.where((at >= 0) & (at < width), at, width)


def maximum(x: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    return parallel.greatest(jnp.max(x, axis=-1))


def total(x: Array) -> Array:
    """The sum over the vocabulary."""
    return parallel.total(jnp.sum(x, axis=-1))


def any_of(x: Bool[Array, "*batch V"]) -> Bool[Array, "*batch"]:
    found = jnp.any(x, axis=-1)
    return parallel.greatest(found.astype(jnp.int32)) > 0 if parallel.share() > 1 else found


def argmax(x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """The likeliest token; of equals that of the lowest id."""
    best = jnp.argmax(x, axis=-1).astype(jnp.int32)
    if parallel.share() == 1:
        return best
    value = jnp.max(x, axis=-1)
    values, tokens = (parallel.gathered(a[..., None]) for a in (value, best + parallel.index() * x.shape[-1]))
    return jnp.take_along_axis(tokens, jnp.argmax(values, axis=-1)[..., None], axis=-1)[..., 0]


def top_k(x: Float[Array, "*batch V"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """The k greatest numbers and their tokens, the greatest first."""
    few = min(k, x.shape[-1])
    values, at = jax.lax.top_k(x, few)
    if parallel.share() == 1:
        return values, at
    values, tokens = (parallel.gathered(a) for a in (values, at + parallel.index() * x.shape[-1]))
    values, at = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(tokens, at, axis=-1)


def logsumexp(x: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    if parallel.share() == 1:
        return jax.nn.logsumexp(x, axis=-1)
    best = maximum(x)
    best = jnp.where(jnp.isfinite(best), best, 0)
    return jnp.log(total(jnp.exp(x - best[..., None]))) + best


def softmax(x: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    if parallel.share() == 1:
        return jax.nn.softmax(x, axis=-1)
    weight = jnp.exp(x - maximum(x)[..., None])
    return weight / total(weight)[..., None]


def one_hot(token: Int[Array, "*batch"], width: int) -> Float[Array, "*batch V"]:
    """Over this device's columns."""
    return jax.nn.one_hot(column(token, width), width)


def at(x: Float[Array, "*batch V"], token: Int[Array, "*batch k"]) -> Float[Array, "*batch k"]:
    """What stands at some tokens, 0 where a token is none."""
    if parallel.share() == 1:
        return jnp.take_along_axis(x, token, axis=-1)
    place = column(token, x.shape[-1])
    own = jnp.take_along_axis(x, jnp.minimum(place, x.shape[-1] - 1), axis=-1)
    return parallel.total(jnp.where(place < x.shape[-1], own, 0))
