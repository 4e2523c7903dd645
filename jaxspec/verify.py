"""Verification: which drafts the target accepts, and the token that follows them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import noise
from jaxspec.sampling import draw
from jaxspec.tree import Tree
from jaxspec.types import History, Proposal, Sampling, Verdict


def verify_coupled(
    tree: Tree,
    logits: Float[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    history: History,
    ordinal: Int[Array, "B"],
) -> Verdict:
    """Draw the target's own token at each node with its ordinal's noise, and follow the child that equals it.

    The emitted tokens are those of plain sampling with the same seed, whatever was drafted; greedy is the noiseless
    case.
    """
    depths = jnp.asarray(tree.depths)
    keys = noise.noise_keys(
        sampling.seed, sampling.sample, ordinal[:, None] + jnp.arange(tree.max_depth + 1), noise.TARGET
    )
    drawn, usable = draw(
        logits,
        sampling,
        history,
        _path_counts(tree, proposal, logits.shape[-1]),
        ordinal[:, None] + depths,
        keys[:, depths],
    )
    path, count = _walk(tree, proposal, drawn)
    tokens = jnp.take_along_axis(drawn, path, axis=1)
    on_path = jnp.arange(path.shape[1]) < count[:, None]
    finite = jnp.all(jnp.take_along_axis(usable, path, axis=1) | ~on_path, axis=1)
    return Verdict(tokens, path, count, finite)


def _walk(tree: Tree, proposal: Proposal, drawn: Int[Array, "B W"]) -> tuple[Int[Array, "B path"], Int[Array, "B"]]:
    """From the root, step to the child that holds the drawn token for as long as there is one."""
    batch = drawn.shape[0]
    node, count = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.int32)
    path, going = [node], jnp.ones(batch, bool)
    parents = jnp.asarray(tree.parents, jnp.int32)
    for _ in range(tree.max_depth):
        wanted = jnp.take_along_axis(drawn, node[:, None], axis=1)
        fits = (parents == node[:, None]) & proposal.valid & (proposal.tokens == wanted)
        going &= jnp.any(fits, axis=1)
        node = jnp.where(going, jnp.argmax(fits, axis=1).astype(jnp.int32) + 1, node)
        count += going
        path.append(node)
    return jnp.stack(path, axis=1), count


def _path_counts(tree: Tree, proposal: Proposal, vocab: int) -> Int[Array, "B W V"] | None:
    """How often each token was drafted on the way to each node, that node included; None without drafts."""
    if tree.size == 0:
        return None
    batch, nodes = proposal.tokens.shape
    drafted = jnp.asarray(tree.is_ancestor[:, 1:], jnp.int32)
    counts = jnp.zeros((batch, tree.width, vocab), jnp.int32)
    rows = jnp.arange(batch)[:, None, None], jnp.arange(tree.width)[None, :, None], proposal.tokens[:, None, :]
    return counts.at[rows].add(jnp.broadcast_to(drafted, (batch, tree.width, nodes)))
