"""The model that heads are trained for, as training runs it: packed rows of whole texts, and no cache."""

import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.loading import LoadedModel
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import Block, RMSNorm, rotation_at
from jaxspec.types import Params

QUERIES = 128
"""Of a block of attention. Measured on XLA:CPU: 29 ms for 4 rows of 512 tokens, which take 75 in one block."""


def dense_hidden(
    params: Params,
    spec: ModelSpec,
    tokens: Int[Array, "N S"],
    segment: Int[Array, "N S"],
    position: Int[Array, "N S"],
) -> Float[Array, "N S E"]:
    """The normalised hidden states of packed rows (see `loss.Batch`): those that each text has alone.

    Differentiable: of each layer its input is kept, and the rest computed again on the way back. Layers are unrolled.
    """
    place = jnp.arange(tokens.shape[1])
    sees = (segment[:, :, None] == segment[:, None, :]) & (place[:, None] >= place)
    rotation = rotation_at(spec, position)
    layer_fn = jax.checkpoint(partial(_layer, spec=spec))
    x = params["embed"]["weight"][tokens]
    for layer in params["layers"]:
        x = layer_fn(layer, x, rotation, sees)
    return jnp.asarray(RMSNorm(spec.norm_eps).apply({"params": params["norm"]}, x))


@partial(jax.jit, static_argnames="spec")
def _layer(params, x, rotation, sees, *, spec: ModelSpec):
    # A jit of its own, so that the unrolled loop traces one layer and not all of them.
    return Block(spec).apply({"params": params}, x, rotation, lambda q, k, v: (_attention(q, k, v, sees), ()))[0]


def _attention(
    q: Float[Array, "N S K G D"], k: Float[Array, "N S K D"], v: Float[Array, "N S K D"], sees: Bool[Array, "N S S"]
) -> Float[Array, "N S K G D"]:
    """Softmax attention, one block of queries after the other: none meets the keys that come after its block."""
    q, k, v = q.transpose(0, 2, 3, 1, 4) * q.shape[-1] ** -0.5, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    mixed = []
    for start in range(0, sees.shape[1], QUERIES):
        here, past = slice(start, start + QUERIES), slice(start + QUERIES)
        scores = jnp.einsum("nkgsd,nktd->nkgst", q[:, :, :, here], k[:, :, past], preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(sees[:, None, None, here, past], scores, -jnp.inf), axis=-1)
        mixed.append(jnp.einsum("nkgst,nktd->nkgsd", weights.astype(v.dtype), v[:, :, past]))
    return jnp.concatenate(mixed, axis=3).transpose(0, 3, 1, 2, 4)


def identity(loaded: LoadedModel) -> str:
    """A digest that tells a model from others: of its name, its shape and the first numbers of each of its arrays."""
    digest = hashlib.sha256(f"{loaded.name} {loaded.spec}".encode())
    for leaf in jax.tree.leaves(loaded.params):
        digest.update(f"{leaf.dtype} {leaf.shape}".encode())
        digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)][:64]).tobytes())
    return digest.hexdigest()
