"""What the model itself is trained on along with its heads (Medusa-2): its own next token, and to stay what it was."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import logits_of
from jaxspec.types import Params
from train_medusa.loss import Batch, in_chunks, labels_of


class OwnTally(NamedTuple):
    """Sums over the tokens to be learned."""

    labels: Float[Array, ""]
    loss: Float[Array, ""]
    """Cross entropy of the model's own guess, in nats."""
    divergence: Float[Array, ""]
    """KL(untouched model ‖ model), in nats."""


def own_tally(
    model: ModelSpec,
    params: Params,
    untouched: Params,
    batch: Batch,
    hidden: Float[Array, "N S E"],
    before: Float[Array, "N S E"],
    chunk: int,
) -> OwnTally:
    """How the model guesses the tokens to be learned, and how far it went from the untouched one.

    `hidden` and `before` are their hidden states. The logits of `chunk` places are held at once, in both directions.
    """
    ids, counts = labels_of(batch, -1)

    @jax.checkpoint
    def add(tally: OwnTally, part) -> tuple[OwnTally, None]:
        now, then, label, counts = part
        log_q = jax.nn.log_softmax(logits_of(params, model, now))
        log_p = jax.nn.log_softmax(logits_of(untouched, model, then))
        loss = -jnp.take_along_axis(log_q, label[:, None], axis=1)[:, 0]
        # Padding ids have -inf on both sides: no difference.
        gap = jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * (log_p - jnp.where(jnp.isfinite(log_p), log_q, 0)), 0)
        sums = jnp.sum(counts), jnp.sum(jnp.where(counts, loss, 0)), jnp.sum(jnp.where(counts, jnp.sum(gap, -1), 0))
        return OwnTally(*(old + new for old, new in zip(tally, sums, strict=True))), None

    zero = OwnTally(*(jnp.zeros(()) for _ in range(3)))
    return jax.lax.scan(add, zero, in_chunks((hidden, before, ids, counts), chunk))[0]
