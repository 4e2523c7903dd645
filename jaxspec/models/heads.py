"""Heads that guess further tokens from one hidden state: Medusa (Cai et al., 2024) and, conditioned on the tokens that
were guessed before, Hydra (Ankner et al., 2024).

The model's own output guesses the token after the one whose hidden state it is; head k, the one k + 1 tokens later.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec import parallel
from jaxspec.models.linear import linear
from jaxspec.models.quantization import Quantized, dequantize
from jaxspec.models.spec import ModelSpec, padded_vocab
from jaxspec.models.transformer import Projection, embed
from jaxspec.types import Params


@dataclass(frozen=True)
class HeadsSpec:
    """The static shape of a set of heads.

    Their parameters are `{"heads": (head, ..)}`, and `token_map`, int32 [vocab], where they guess some tokens only. A
    head is `{"blocks": parameters of a Head}`, with `output` [vocab, E] where it has a projection of its own.
    """

    num_heads: int
    embed_dim: int
    """Of the model that they were made for."""
    vocab: int
    """Tokens that they guess: the whole vocabulary of the model, or those in `token_map`."""
    layers: int = 1
    """Blocks of a head."""
    own_output: bool = False
    """Whether each head has an output projection of its own; else all use the model's."""
    conditioned: int = 0
    """Width of a first block that also sees the embeddings of the tokens between the hidden state and the guess; 0
    where heads see the hidden state alone."""


class Head(nn.Module):
    """Residual blocks, `x + SiLU(W x + b)`. A conditioned head's first is `x + V SiLU(W [x, path] + b)`, its inputs
    scaled to unit root mean square. New ones change nothing: a new head repeats what the model says."""

    spec: HeadsSpec

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "*batch E"], path: Float[Array, "*batch P E"] | None
    ) -> Float[Array, "*batch E"]:
        spec, x = self.spec, hidden
        for index in range(spec.layers):
            name = f"block_{index}"
            if path is not None and index == 0:
                seen = jnp.concatenate([_unit(x), _unit(path).reshape(*x.shape[:-1], -1)], axis=-1)
                inner = nn.silu(Projection((spec.conditioned,), True, name=name)(seen))
                x = x + Projection((spec.embed_dim,), initializer=nn.initializers.zeros, name="mix")(inner)
            else:
                x = x + nn.silu(Projection((spec.embed_dim,), True, initializer=nn.initializers.zeros, name=name)(x))
        return x


def _unit(x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def init_heads(spec: HeadsSpec, key: Array, output: Float[Array, "vocab E"], dtype: Any = jnp.float32) -> Params:
    """New heads. Their own projections, where they have some, begin as `output`, the model's own."""
    hidden = jnp.zeros((1, spec.embed_dim), dtype)
    heads = []
    for index, of_head in enumerate(jax.random.split(key, spec.num_heads)):
        path = jnp.zeros((1, index + 1, spec.embed_dim), dtype) if spec.conditioned else None
        head: Params = {"blocks": Head(spec).init(of_head, hidden, path)["params"]}
        if spec.own_output:
            head["output"] = jnp.array(output, dtype)
        heads.append(head)
    return {"heads": tuple(heads)}


def of_base(spec: HeadsSpec, params: Params, model: ModelSpec, base: Params) -> Params:
    """What heads use of the model that they were made for: `output`, its projection, of the tokens that they guess, and
    `embed`, where they are conditioned."""
    found: Params = {}
    if not spec.own_output:
        weight = (base["embed"] if model.tied_embeddings else base["lm_head"])["weight"]
        if "token_map" in params:
            weight = _rows_of(weight, params["token_map"], base["embed"]["weight"].dtype)
        found["output"] = weight
    if spec.conditioned:
        found["embed"] = base["embed"]["weight"]
    return found


@partial(jax.jit, static_argnames="dtype")
def _rows_of(weight: Array | Quantized, tokens: Int[Array, "vocab"], dtype: Any) -> Float[Array, "padded E"]:
    """The rows of some tokens, padded where several devices share them."""

    def own(weight: Array | Quantized, tokens: Int[Array, "vocab"]) -> Float[Array, "few E"]:
        rows = embed(dequantize(weight, dtype) if isinstance(weight, Quantized) else weight, tokens)
        whole = padded_vocab(len(tokens), parallel.share())
        padded, few = jnp.pad(rows, ((0, whole - len(tokens)), (0, 0))), whole // parallel.share()
        return jax.lax.dynamic_slice_in_dim(padded, parallel.index() * few, few)

    return parallel.on_each(own, PartitionSpec(parallel.MODEL), weight, tokens)


def head_hidden(
    spec: HeadsSpec,
    head: Params,
    shared: Params,
    hidden: Float[Array, "*batch E"],
    path: Int[Array, "*batch P"],
) -> Float[Array, "*batch E"]:
    """What a head makes of a hidden state: `output_of` it are the logits of its guess.

    `path` are the tokens from the one that follows the hidden state's own to the one before the guess: one for the
    first head, two for the second. Heads that are not conditioned do not look at it. `shared` is from `of_base`.
    """
    seen = embed(shared["embed"], path) if spec.conditioned else None
    return jnp.asarray(Head(spec).apply({"params": head["blocks"]}, hidden, seen))


def output_of(spec: HeadsSpec, head: Params, shared: Params) -> Float[Array, "vocab E"]:
    """The projection from what a head makes of a hidden state to logits."""
    return head["output"] if spec.own_output else shared["output"]


def head_logits(
    spec: HeadsSpec,
    head: Params,
    shared: Params,
    hidden: Float[Array, "*batch E"],
    path: Int[Array, "*batch P"],
) -> Float[Array, "*batch vocab"]:
    """Float32 logits of a head's guess; see `head_hidden`."""
    return linear(head_hidden(spec, head, shared, hidden, path), output_of(spec, head, shared)).astype(jnp.float32)
