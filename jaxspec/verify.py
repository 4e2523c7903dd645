"""Verification: which drafts the target accepts, and the token that follows them."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import noise, vocabulary
from jaxspec.sampling import distribution, draw, is_usable
from jaxspec.tree import Tree
from jaxspec.types import History, Proposal, Sampling, Verdict

TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


def verify(
    tree: Tree,
    logits: Float[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    history: History,
    ordinal: Int[Array, "B"],
) -> Verdict:
    """By the rule that the proposal allows: `rejection` where it says what its tokens were drawn from, else `coupled`.

    Greedy rows come to the same by either; `coupled` is the cheaper for a batch of them alone.
    """
    request, q = (sampling, history, ordinal), proposal.q
    if q is None:
        return verify_coupled(tree, logits, proposal, *request)
    return jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: verify_rejection(tree, logits, proposal, q, *request),
        lambda: verify_coupled(tree, logits, proposal, *request),
    )


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
    drawn, usable = _drawn(tree, logits, proposal, sampling, history, ordinal)
    path, count = _walk(tree, proposal, drawn)
    return Verdict(jnp.take_along_axis(drawn, path, axis=1), path, count, _all_on(path, count, usable))


def verify_rejection(
    tree: Tree,
    logits: Float[Array, "B W V"],
    proposal: Proposal,
    q: Float[Array, "B N V"],
    sampling: Sampling,
    history: History,
    ordinal: Int[Array, "B"],
) -> Verdict:
    """Accept a draft x with probability min(1, p(x)/q(x)), else go on with what p has above q (Leviathan et al., 2023).

    Siblings are judged in order, each against what the rejection of those before it has left of p; the q of a sibling
    drawn without replacement has no mass on them. Tokens have the target's distribution p exactly.
    """
    counts = partial(_path_counts, tree, proposal, logits.shape[-1])
    wanted = distribution(logits, sampling, history, counts, ordinal[:, None] + jnp.asarray(tree.depths))
    at = ordinal[:, None] + jnp.arange(tree.max_depth + 1)
    accept_keys, last_keys = (
        noise.noise_keys(sampling.seed, sampling.sample, at, purpose) for purpose in (noise.ACCEPT, noise.RESIDUAL)
    )
    chance = noise.uniform(accept_keys, jnp.arange(tree.children.shape[1]))
    node, p = jnp.zeros_like(ordinal), wanted[:, 0]
    path, tokens, going = [node], [], jnp.ones(ordinal.shape, bool)
    for depth in range(tree.max_depth):
        node, p = _judge_children(tree, proposal, q, chance[:, depth], node, p, going)
        going = going & (node > 0)
        p = jnp.where(going[:, None], _row(wanted, node), p)
        tokens.append(_row(proposal.tokens, node - 1))
        path.append(node)
    path = jnp.stack(path, axis=1)
    count = jnp.sum(jnp.cumprod(path[:, 1:] > 0, axis=1), axis=1) + 1
    noise_of_last = noise.gumbel(_row(last_keys, count - 1), vocabulary.ids(logits.shape[-1]))
    last = vocabulary.argmax(jnp.log(p) + noise_of_last)
    place = jnp.arange(path.shape[1])
    tokens = jnp.where(place < count[:, None] - 1, jnp.stack([*tokens, last], axis=1), last[:, None])
    return Verdict(tokens, path, count, _all_on(path, count, is_usable(logits)))


def verify_typical(
    tree: Tree,
    logits: Float[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    history: History,
    ordinal: Int[Array, "B"],
) -> Verdict:
    """Accept a draft x where p(x) > min(ε, δ·exp(−H(p))), with ε = 0.09 and δ = 0.3, p the target's distribution there
    and H its entropy in nats (Cai et al., 2024, section 2.3). NOT exact: likely drafts displace the target's own draw.

    Of the longest accepted paths the likeliest is taken; the token after it is the target's own draw. Greedy rows are
    exact still: all their probability is on one token.
    """
    drawn, usable = _drawn(tree, logits, proposal, sampling, history, ordinal)
    depths, parents = jnp.asarray(tree.depths), jnp.asarray(tree.parents, jnp.int32)
    counts = partial(_path_counts, tree, proposal, logits.shape[-1])
    p = distribution(logits, sampling, history, counts, ordinal[:, None] + depths)
    entropy = -vocabulary.total(jnp.where(p > 0, p * jnp.log(p), 0))
    least = jnp.minimum(TYPICAL_EPSILON, TYPICAL_DELTA * jnp.exp(-entropy))
    chance = vocabulary.at(p[:, parents], proposal.tokens[..., None])[..., 0]
    fits = proposal.valid & (chance > least[:, parents])
    score = [jnp.zeros(ordinal.shape)]
    for node, parent in enumerate(tree.parents):
        score.append(jnp.where(fits[:, node], score[parent] + jnp.log(chance[:, node]), -jnp.inf))
    score = jnp.stack(score, axis=1)
    depth = jnp.max(jnp.where(score > -jnp.inf, depths, 0), axis=1)
    node = jnp.argmax(jnp.where(depths == depth[:, None], score, -jnp.inf), axis=1)
    path = jnp.asarray(tree.paths)[node]
    place = jnp.arange(path.shape[1])
    ahead = jnp.take_along_axis(proposal.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    tokens = jnp.where(place < depth[:, None], jnp.pad(ahead, ((0, 0), (0, 1))), _row(drawn, node)[:, None])
    return Verdict(tokens, path, depth + 1, _all_on(path, depth + 1, usable))


def _drawn(
    tree: Tree, logits, proposal: Proposal, sampling: Sampling, history: History, ordinal
) -> tuple[Int[Array, "B W"], Bool[Array, "B W"]]:
    """The target's own token at every node, by the noise of its ordinal, and whether its logits were usable."""
    depths = jnp.asarray(tree.depths)
    at = ordinal[:, None] + jnp.arange(tree.max_depth + 1)
    keys = noise.noise_keys(sampling.seed, sampling.sample, at, noise.TARGET)
    counts = partial(_path_counts, tree, proposal, logits.shape[-1])
    return draw(logits, sampling, history, counts, ordinal[:, None] + depths, keys[:, depths])


def _all_on(path: Int[Array, "B path"], count: Int[Array, "B"], usable: Bool[Array, "B W"]) -> Bool[Array, "B"]:
    """Whether all the nodes of a path are usable."""
    on_path = jnp.arange(path.shape[1]) < count[:, None]
    return jnp.all(jnp.take_along_axis(usable, path, axis=1) | ~on_path, axis=1)


def _judge_children(
    tree: Tree, proposal: Proposal, q: Float[Array, "B N V"], chance: Float[Array, "B C"], node, p, going
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """The first accepted child, 0 for none, and what is then left of p."""
    children = jnp.asarray(tree.children)[node]
    chosen = jnp.zeros_like(node)
    for rank in range(children.shape[1]):
        child = children[:, rank]
        judged = going & (chosen == 0) & (child > 0) & _row(proposal.valid, child - 1)
        token, drawn_from = _row(proposal.tokens, child - 1), _row(q, child - 1)
        of_token = (vocabulary.at(x, token[:, None])[:, 0] for x in (p, drawn_from))
        fits = judged & _accepts(chance[:, rank], *of_token)
        p = jnp.where((judged & ~fits)[:, None], _residual(p, drawn_from), p)
        chosen = jnp.where(fits, child, chosen)
    return chosen, p


def _accepts(chance, p, q):
    # Strictly below: a token that the target never draws is not accepted even at chance 0.
    return chance * q < p


def _residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    above = jnp.maximum(p - q, 0)
    total = vocabulary.total(above)[..., None]
    # Nothing is left where p and q are equal but for rounding: then p itself is right.
    return jnp.where(total > 0, above / total, p)


def _row(array: Array, index: Int[Array, "B"]) -> Array:
    """Entry `index[b]` of every row b."""
    return array[jnp.arange(index.shape[0]), index]


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


def _path_counts(tree: Tree, proposal: Proposal, width: int) -> Int[Array, "B W V"]:
    """How often each token was drafted on the way to each node, that node included."""
    batch, nodes = proposal.tokens.shape
    drafted = jnp.asarray(tree.is_ancestor[:, 1:], jnp.int32)
    counts = jnp.zeros((batch, tree.width, width), jnp.int32)
    tokens = vocabulary.column(proposal.tokens, width)[:, None, :]
    rows = jnp.arange(batch)[:, None, None], jnp.arange(tree.width)[None, :, None], tokens
    return counts.at[rows].add(jnp.broadcast_to(drafted, (batch, tree.width, nodes)), mode="drop")
