"""The loss of heads against plain recomputations: which labels count, what they cost, and which guesses hit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.heads import HeadsSpec, head_logits, init_heads
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import logits_of
from train_medusa.joint import own_tally
from train_medusa.loss import RANKS, TOP, Batch, heads_loss, in_chunks, labels_of, shared_of

pytestmark = pytest.mark.usefixtures("unoptimised")
E, V, HEADS, ROWS, ROW = 12, 40, 2, 3, 14
DECAY = 0.7
MODEL = ModelSpec(
    vocab_size=V,
    valid_vocab=V - 3,
    num_layers=1,
    embed_dim=E,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    mlp_dim=8,
    norm_eps=1e-5,
    inv_freq=(1.0, 0.1, 0.01),
    max_context=64,
    tied_embeddings=True,
)
SPEC = HeadsSpec(HEADS, E, V)
TOKEN_MAP = np.array([0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 36], np.int32)
SHAPES = {
    "plain": SPEC,
    "own output, two layers": replace(SPEC, own_output=True, layers=2),
    "conditioned": replace(SPEC, conditioned=16),
    "some tokens": replace(SPEC, vocab=len(TOKEN_MAP)),
}


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def base() -> dict:
    return {"embed": {"weight": jnp.asarray(numbers(V, E, seed=1))}}


@pytest.fixture(scope="module")
def hidden() -> jax.Array:
    return jnp.asarray(numbers(ROWS, ROW, E, seed=2))


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Two texts a row and padding, an answer at the end of each text."""
    rng = np.random.default_rng(3)
    segment, target = np.zeros((2, ROWS, ROW), np.int32)
    for row in range(ROWS):
        first, both = 5 + row, 11 + row
        segment[row, :first], segment[row, first:both] = 1, 2
        target[row, first - 3 : first] = target[row, both - 4 : both] = 1
    tokens = rng.integers(0, V - 3, (ROWS, ROW)).astype(np.int32)
    position = np.zeros_like(tokens)
    return Batch(tokens, segment, position, target.astype(bool))


def made(spec: HeadsSpec, base: dict) -> dict:
    """Heads that do something, and not what another does."""
    guessed = TOKEN_MAP if spec.vocab < V else np.arange(V)
    params = init_heads(spec, jax.random.key(0), base["embed"]["weight"][guessed])
    leaves, tree = jax.tree.flatten(params)
    noisy = [leaf + 0.3 * numbers(*leaf.shape, seed=10 + i) for i, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(tree, noisy)
    return params | ({"token_map": jnp.asarray(TOKEN_MAP)} if spec.vocab < V else {})


@partial(jax.jit, static_argnames=("spec", "soft", "chunk"))
def loss_of(spec: HeadsSpec, params: dict, base: dict, batch: Batch, hidden, soft: float = 0.0, chunk: int = 8):
    shared = shared_of(spec, params, MODEL, base)
    return heads_loss(spec, params["heads"], shared, batch, hidden, decay=DECAY, soft=soft, chunk=chunk)


def places(batch: Batch, head: int) -> list[tuple[int, int]]:
    """Where a head has a label: a token to be learned of the same text, head + 2 places on."""
    segment, target = batch.segment, batch.target
    return [
        (n, t)
        for n in range(ROWS)
        for t in range(ROW - head - 2)
        if segment[n, t] and segment[n, t] == segment[n, t + head + 2] and target[n, t + head + 2]
    ]


def plain_loss(spec: HeadsSpec, params: dict, base: dict, batch: Batch, hidden, soft: float = 0.0):
    """The labels one by one, and all their logits at once."""
    guessed = (TOKEN_MAP if "token_map" in params else np.arange(V)).tolist()
    shared = {"embed": base["embed"]["weight"], "output": base["embed"]["weight"][np.array(guessed)]}
    total = jnp.zeros(())
    for k in range(HEADS):
        known = [(n, t) for n, t in places(batch, k) if int(batch.tokens[n, t + k + 2]) in guessed]
        n, t = np.array(known).T
        path = jnp.asarray(np.stack([batch.tokens[n, t + 1 + step] for step in range(k + 1)], axis=1))
        log_q = jax.nn.log_softmax(head_logits(spec, params["heads"][k], shared, hidden[n, t], path))
        wanted = np.eye(len(guessed))[[guessed.index(token) for token in batch.tokens[n, t + k + 2]]]
        if soft:
            seen = jax.lax.stop_gradient(hidden[n, t + k + 1]) @ shared["output"].T
            wanted = (1 - soft) * wanted + soft * jax.nn.softmax(seen)
        total -= DECAY**k * jnp.sum(wanted * log_q) / len(known)
    return total


def test_labels_are_the_tokens_two_and_more_places_on_in_the_same_text(batch: Batch) -> None:
    for head in range(HEADS):
        ids, counts = labels_of(batch, head)
        found = [tuple(place) for place in np.argwhere(np.asarray(counts))]
        assert found == places(batch, head)
        assert found, "the head has labels"
        for n, t in found:
            assert ids[n, t] == batch.tokens[n, t + 2 + head]


@pytest.mark.parametrize(("shape", "soft"), [*zip(SHAPES, (0.0, 0.4, 0.0, 0.4), strict=True)])
def test_loss_and_gradient_are_those_of_a_plain_recomputation(base, batch, hidden, shape: str, soft: float) -> None:
    spec, of_heads = SHAPES[shape], made(SHAPES[shape], base)
    rest = {name: value for name, value in of_heads.items() if name != "heads"}

    def ours(heads, hidden):
        return loss_of(spec, {"heads": heads} | rest, base, batch, hidden, soft)[0]

    def plain(heads, hidden):
        return plain_loss(spec, {"heads": heads} | rest, base, batch, hidden, soft)

    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(of_heads["heads"], hidden) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), found, wanted)


@pytest.mark.parametrize("chunk", [8, 1000])
def test_chunks_change_nothing(base, batch, hidden, chunk: int) -> None:
    params = made(SPEC, base)
    found, wanted = (loss_of(SPEC, params, base, batch, hidden, chunk=c) for c in (chunk, ROWS * ROW))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


def test_chunks_take_the_same_places_of_every_row() -> None:
    chunks = np.asarray(in_chunks(jnp.arange(1, 2 * 5 + 1).reshape(2, 5), 4))
    assert chunks.tolist() == [[1, 2, 6, 7], [3, 4, 8, 9], [5, 0, 10, 0]]


def test_masked_tokens_contribute_nothing(base, batch, hidden) -> None:
    """Other tokens where nothing is to be learned, and other hidden states where no head has a label."""
    params = made(SPEC, base)
    labels = np.any([np.asarray(labels_of(batch, head)[1]) for head in range(HEADS)], axis=0)
    tokens = np.where(batch.target, batch.tokens, (batch.tokens + 7) % (V - 3))
    elsewhere = jnp.where(labels[..., None], hidden, hidden + 5)
    assert not np.array_equal(tokens, batch.tokens)
    assert not labels.all()

    def gradient(batch, hidden):
        return jax.value_and_grad(lambda p: loss_of(SPEC, p, base, batch, hidden)[0])(params)

    found, wanted = gradient(batch._replace(tokens=tokens), elsewhere), gradient(batch, hidden)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_batch_of_padding_has_no_loss_and_no_gradient(base, batch, hidden) -> None:
    empty = batch._replace(segment=np.zeros_like(batch.segment))
    loss, gradient = jax.value_and_grad(lambda p: loss_of(SPEC, p, base, empty, hidden)[0])(made(SPEC, base))
    assert loss == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("shape", ["plain", "some tokens"])
def test_hits_and_ranks_are_those_of_sorted_logits(base, batch, hidden, shape: str) -> None:
    spec, params = SHAPES[shape], made(SHAPES[shape], base)
    guessed = np.asarray(params.get("token_map", np.arange(V)))
    tally = loss_of(spec, params, base, batch, hidden)[1]
    weights, states = np.asarray(base["embed"]["weight"], np.float64), np.asarray(hidden, np.float64)
    for k, head in enumerate(params["heads"]):
        block = jax.tree.map(lambda a: np.asarray(a, np.float64), head["blocks"]["block_0"])
        ranks, known = [], 0
        for n, t in places(batch, k):
            inner = block["weight"] @ states[n, t] + block["bias"]
            logits = weights[guessed] @ (states[n, t] + inner / (1 + np.exp(-inner)))
            where = np.flatnonzero(guessed == int(batch.tokens[n, t + k + 2]))
            if len(where):
                known += 1
                ranks.append(np.argsort(-logits).tolist().index(where[0]))
        assert tally.labels[k] == len(places(batch, k))
        assert tally.guessable[k] == known
        assert tally.hits[k].tolist() == [sum(rank < top for rank in ranks) for top in TOP]
        assert tally.ranks[k].tolist() == [ranks.count(rank) for rank in range(RANKS)]
    if shape == "some tokens":
        assert 0 < tally.guessable.sum() < tally.labels.sum()


def test_the_model_itself_is_measured_on_its_next_tokens(base, batch, hidden) -> None:
    """Padding ids of the vocabulary, which the model never says, stay out of both sums."""
    before, other = hidden + 0.3, {"embed": {"weight": base["embed"]["weight"] * 1.1}}
    tally = own_tally(MODEL, base, other, batch, hidden, before, chunk=8)
    log_q, log_p = (
        np.asarray(jax.nn.log_softmax(logits_of(of, MODEL, states)), np.float64)[..., : MODEL.valid_vocab]
        for of, states in ((base, hidden), (other, before))
    )
    chosen = places(batch, -1)
    assert tally.labels == len(chosen)
    loss = -sum(log_q[n, t, int(batch.tokens[n, t + 1])] for n, t in chosen)
    gap = sum(np.sum(np.exp(log_p[n, t]) * (log_p[n, t] - log_q[n, t])) for n, t in chosen)
    np.testing.assert_allclose((tally.loss, tally.divergence), (loss, gap), rtol=1e-5)
    same = own_tally(MODEL, base, base, batch, hidden, hidden, chunk=8)
    np.testing.assert_allclose(same.divergence, 0, atol=1e-6)
    gradient = jax.grad(lambda h: own_tally(MODEL, base, base, batch, h, hidden, 8).divergence)(hidden)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
