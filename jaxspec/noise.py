"""Randomness as a pure function of (seed, sample, ordinal, purpose): never of batch, schedule or cache position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

TARGET = 0
"""Purpose: the target's own draw of a token."""
DRAFT = 1
"""Purpose: a draft model's draw of a token that the rejection rule will judge."""
ACCEPT = 2
"""Purpose: the judgement of the drafts for one ordinal, a uniform number for each of the siblings."""
RESIDUAL = 3
"""Purpose: the draw that ends a round of the rejection rule."""


def noise_keys(
    seed: UInt32[Array, "B 2"], sample: Int[Array, "B"], ordinal: Int[Array, "B D"], purpose: int
) -> UInt32[Array, "B D 2"]:
    """Two key words for every draw: threefry (Salmon et al., 2011) over all that the draw may depend on."""

    def one(words, sample, ordinal):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        for part in (sample, ordinal, purpose):
            key = jax.random.fold_in(key, part)
        return jax.random.key_data(key)

    return jax.vmap(lambda w, s, row: jax.vmap(lambda o: one(w, s, o))(row))(seed, sample, ordinal)


def gumbel(keys: UInt32[Array, "*batch 2"], ids: Int[Array, "V"]) -> Float[Array, "*batch V"]:
    """Standard Gumbel noise of each token id under each key: a counter hash, so any shard computes its own ids.

    Minus the logarithm of an exponential variate, which is drawn as -log(1 - u) so that the small ones, which
    decide, keep 32 bits of resolution.
    """
    uniform = (_bits(keys, ids).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))))


def uniform(keys: UInt32[Array, "*batch 2"], ids: Int[Array, "N"]) -> Float[Array, "*batch N"]:
    """Numbers in [0, 1) of each id under each key, multiples of 2^-24."""
    return (_bits(keys, ids) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _bits(keys: UInt32[Array, "*batch 2"], ids: Int[Array, "V"]) -> UInt32[Array, "*batch V"]:
    counter = ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    return _mix(_mix(counter + keys[..., :1]) ^ keys[..., 1:])


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    # A 32-bit integer mixer of the xor-shift-multiply kind; the distribution tests are its judge.
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
