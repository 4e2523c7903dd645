"""The one door through which every weight meets its activations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LEFT_MAX = 64
"""Tokens up to which the CPU multiplies with the weight on the left: measured 1.2 to 2 times faster for 2 to 64."""


def linear(x: Float[Array, "*batch in"], weight: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """`x @ weight.T`, in the order that the backend does best. Weights keep the [out, in] storage of Hugging Face."""
    flat = x.reshape(-1, x.shape[-1])
    if jax.default_backend() == "cpu" and flat.shape[0] <= LEFT_MAX:
        # The barriers keep XLA from turning the product round again.
        barrier = jax.lax.optimization_barrier
        y = barrier(jnp.dot(weight, barrier(flat.T))).T
    else:
        y = flat @ weight.T
    return y.reshape(*x.shape[:-1], weight.shape[0])
