"""The one transformer: every family is a ModelSpec and a table of tensor names."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import parallel, vocabulary
from jaxspec.kv.pool import Pool, PoolSpec, write_and_attend
from jaxspec.models.linear import linear, of_layer
from jaxspec.models.spec import ModelSpec
from jaxspec.types import Params, Sequences
from pallas_kernels import Packing, Rows


class RMSNorm(nn.Module):
    """Root mean square normalisation in float32 (Zhang and Sennrich, 2019)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), x.dtype)
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * weight


class Projection(nn.Module):
    """A linear map to `[.., *features]` with its weight stored as `[*features, in]`."""

    features: tuple[int, ...]
    use_bias: bool = False
    joined: bool = False
    """Whether each of several devices has a share of the inputs, and of their weights: their sums are the result."""
    initializer: nn.initializers.Initializer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "..."]:
        shape = (*self.features, x.shape[-1])
        if self.is_initializing():
            init = self.initializer or nn.initializers.normal(shape[-1] ** -0.5)
            weight = self.param("weight", init, shape, x.dtype)
        else:  # where it may be quantised, which `param` would not take
            weight = self.get_variable("params", "weight")
        y = linear(x, weight)
        if self.joined:
            y = parallel.total(y)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, self.features, x.dtype)
        return y


class Block(nn.Module):
    """One layer. `attend(q, k, v)` stores k and v and returns the attention's result and the pool."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Float[Array, "R T E"], rotation, attend):
        spec, group, joined = self.spec, self.spec.group, self.spec.share > 1
        h = RMSNorm(spec.norm_eps, name="attention_norm")(x)
        shape = (spec.num_kv_heads, group + 2, spec.head_dim)
        qkv = Projection(shape, spec.qkv_bias, name="qkv")(h)
        q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
        mixed, pool = attend(rotate(q, rotation), rotate(k[..., None, :], rotation)[..., 0, :], v)
        mixed = mixed.reshape(*x.shape[:-1], spec.num_heads * spec.head_dim)
        x = x + Projection((spec.embed_dim,), spec.o_bias, joined, name="o")(mixed)
        h = RMSNorm(spec.norm_eps, name="mlp_norm")(x)
        gate_up = Projection((2, spec.mlp_dim), spec.mlp_bias, name="gate_up")(h)
        h = nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return x + Projection((spec.embed_dim,), spec.mlp_bias, joined, name="down")(h), pool


def rotation_at(spec: ModelSpec, positions: Int[Array, "R T"]) -> tuple[Float[Array, "R T half"], ...]:
    """Cosine and sine of the RoPE angles (Su et al., 2021), in float32, right to 1e-6 rad at any position from 0 on.

    A product in float32 would be wrong by 0.06 rad at position 10^6. So each byte of a position is multiplied by the
    angle of its unit, in turns as fixed-point fractions: whole turns overflow, and nothing is rounded.
    """
    turns = jnp.zeros((), jnp.uint32)
    for byte, unit in enumerate(_turns(spec.inv_freq)):
        turns = turns + (positions >> 8 * byte & 255).astype(jnp.uint32)[..., None] * unit
    angle = jax.lax.bitcast_convert_type(turns, jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
    return jnp.cos(angle), jnp.sin(angle)


def _turns(inv_freq: tuple[float, ...]) -> np.ndarray:
    """uint32 [4, half]: the fractions of a turn, times 2^32, that 1, 2^8, 2^16 and 2^24 positions make."""
    turns = np.asarray(inv_freq, np.float64) / (2 * np.pi) * 256.0 ** np.arange(4)[:, None]
    return np.round(turns % 1 * 2**32).astype(np.uint64).astype(np.uint32)


def rotate(x: Float[Array, "R T K G D"], rotation) -> Float[Array, "R T K G D"]:
    """Turn the pairs (i, i + D/2) of every head by the angles of their position."""
    cos, sin = (part[:, :, None, None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@partial(jax.jit, static_argnames=("spec", "pool_spec", "distinct"))
def _layer(
    params,
    x,
    pool,
    layer,
    rotation,
    turn,
    rows,
    table,
    ancestors,
    packing,
    *,
    spec: ModelSpec,
    pool_spec: PoolSpec,
    distinct: bool,
):
    # A jit of its own, so that the unrolled loop traces one layer and not all of them.
    def attend(q, k, v):
        sink_q = None if turn is None else rotate(q, turn)
        if packing is not None:
            q, k, v, sink_q = jax.tree.map(lambda a: a[0][packing.token], (q, k, v, sink_q))
        mixed, written = write_and_attend(
            pool_spec, pool, layer, rows, table, ancestors, q, k, v, distinct=distinct, sink_queries=sink_q
        )
        return (mixed if packing is None else mixed[packing.row, packing.column][None]), written

    return Block(spec).apply({"params": params}, x, rotation, attend)


def forward(
    params: Params,
    spec: ModelSpec,
    pool_spec: PoolSpec,
    rows: Rows,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    ancestors: Int[Array, "R T W"] | None,
    pool: Pool,
    sequences: Sequences,
    packing: Packing | None = None,
    *,
    distinct: bool = False,
) -> tuple[Float[Array, "R T E"], Pool]:
    """Run rows of tokens through the layers: writes their keys and values, returns the normalised hidden states.

    With a `packing`, tokens and positions are `[1, N]` and only attention sees rows: no padding of a short row is
    multiplied with the weights. `distinct` promises that no two rows are of one sequence: kernels then write them all
    at once. `ancestors` None is causal within a row. Layers are unrolled where `params["layers"]`
    is a tuple and scanned where it is one stacked tree; the block is the same.
    """
    table = sequences.page_table[0]
    # Behind a barrier: XLA:CPU fuses the cosines into every layer, and counts them again for every head (that of jax
    # 0.10 does so all the same).
    rotation, turn = jax.lax.optimization_barrier(
        (rotation_at(spec, positions), _turn_back(spec, pool_spec.policy.left_out(positions)))
    )
    x = embed(params["embed"]["weight"], tokens)
    layer_fn = partial(_layer, spec=spec, pool_spec=pool_spec, distinct=distinct)
    layers = params["layers"]
    if isinstance(layers, tuple):
        for index, layer in enumerate(layers):
            x, pool = layer_fn(layer, x, pool, jnp.int32(index), rotation, turn, rows, table, ancestors, packing)
    else:

        def body(carry, index):
            layer = of_layer(layers, index)
            return layer_fn(layer, *carry, index, rotation, turn, rows, table, ancestors, packing), None

        (x, pool), _ = jax.lax.scan(body, (x, pool), jnp.arange(spec.num_layers))
    return jnp.asarray(RMSNorm(spec.norm_eps).apply({"params": params["norm"]}, x)), pool


def _turn_back(spec: ModelSpec, distance: Int[Array, "R T"] | None):
    """What `rotate` takes to bring a query back by these distances."""
    if distance is None:
        return None
    cos, sin = rotation_at(spec, distance)
    return cos, -sin


def embed(weight: Float[Array, "V E"], tokens: Int[Array, "*batch"]) -> Float[Array, "*batch E"]:
    """The embeddings of tokens, of which each device has a slice of the vocabulary."""
    if parallel.share() == 1:
        return weight[tokens]
    at = vocabulary.column(tokens, len(weight))
    own = jnp.where((at < len(weight))[..., None], weight[jnp.minimum(at, len(weight) - 1)], 0)
    return parallel.total(own)


def logits_of(params: Params, spec: ModelSpec, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
    """Float32 logits of normalised hidden states, on each device of its slice; padding ids get -inf."""
    head = params["embed"] if spec.tied_embeddings else params["lm_head"]
    logits = linear(hidden, head["weight"]).astype(jnp.float32)
    if spec.valid_vocab == spec.vocab_size:
        return logits
    return jnp.where(vocabulary.ids(logits.shape[-1]) < spec.valid_vocab, logits, -jnp.inf)


def init_params(spec: ModelSpec, key: Array, dtype=jnp.float32) -> Params:
    """Random parameters with unrolled layers, as `loading` lays them out."""
    keys = jax.random.split(key, spec.num_layers + 2)
    x = jnp.zeros((1, 1, spec.embed_dim), dtype)
    rotation = rotation_at(spec, jnp.zeros((1, 1), jnp.int32))
    layers = tuple(Block(spec).init(k, x, rotation, lambda q, k, v: (q, ()))["params"] for k in keys[2:])
    shape = (spec.vocab_size, spec.embed_dim)
    params: Params = {
        "embed": {"weight": jax.random.normal(keys[0], shape, dtype)},
        "layers": layers,
        "norm": {"weight": jnp.ones(spec.embed_dim, dtype)},
    }
    if not spec.tied_embeddings:
        params["lm_head"] = {"weight": jax.random.normal(keys[1], shape, dtype) * spec.embed_dim**-0.5}
    return params
