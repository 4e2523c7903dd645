"""Law 2 for the rejection rule: texts of several rounds have exactly the target's distribution, on chains and trees."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import noise, verify
from jaxspec.config import SamplingParams
from jaxspec.tree import Tree
from jaxspec.types import History, Proposal, Verdict
from tests.oracles import numpy_sampler as oracle
from tests.oracles.requests import Request, history_of, sampling_of

VOCAB, LENGTH, DRAWS = 5, 3, 20_000
FEW = 5_000
"""LENGTH tokens of a text are looked at: all the texts there are, 125, are told apart. FEW draws reject a fault that
is compiled for itself; the others share the programs of the right ones."""
MODEL, DRAFT = np.random.default_rng(5).normal(0, 1.2, (2, VOCAB, VOCAB)).astype(np.float32)
"""Logits of the target and of the draft after the last token, `[last, V]`."""
PROMPT = (1, 3)
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.1),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=-0.6),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.9, logit_bias={2: 1.0}, presence_penalty=0.5),
]
REQUESTS = [Request(params, PROMPT, ()) for params in PARAMS]
TREES = {
    "chain": Tree.chain(2),
    "bush": Tree((0, 0, 0, 1, 1, 1, 2)),
    "random": Tree(tuple(int(np.random.default_rng(9 + i).integers(0, i + 1)) for i in range(6))),
}
SIBLINGS = Tree((0, 0))
CAPACITY = LENGTH + max(tree.max_depth for tree in TREES.values()) + 1


@cache
def expected() -> np.ndarray:
    """Probability of every text `[requests, V ** LENGTH]`, token by token in float64."""
    table = []
    for request in REQUESTS:
        chances = []
        for text in product(range(VOCAB), repeat=LENGTH):
            chance = 1.0
            for index, token in enumerate(text):
                last = (*PROMPT, *text[:index])[-1]
                logits = oracle.adjusted(MODEL[last], request.params, PROMPT, text[:index])
                chance *= oracle.probabilities(logits, request.params)[token]
            chances.append(chance)
        table.append(chances)
    return np.array(table)


@partial(jax.jit, static_argnums=0)
def drafts(tree: Tree, root, key, temperature: float = 1.5) -> Proposal:
    """Children drawn one after the other without replacement, from the draft's four likeliest tokens."""
    levels = jnp.asarray(DRAFT) / temperature
    levels = jnp.where(levels >= jnp.sort(levels, axis=-1)[:, 1:2], levels, -jnp.inf)
    tokens, dists = {0: root}, {}
    for node, parent in enumerate(tree.parents, start=1):
        siblings = [n for n in range(1, node) if tree.parents[n - 1] == parent]
        logits = levels[tokens[parent]]
        for sibling in siblings:
            logits = jnp.where(jax.nn.one_hot(tokens[sibling], VOCAB) > 0, -jnp.inf, logits)
        dists[node] = jax.nn.softmax(logits, axis=-1)
        tokens[node] = jax.random.categorical(jax.random.fold_in(key, node), logits).astype(jnp.int32)
    order = range(1, tree.width)
    valid = jnp.stack([jnp.isfinite(dists[n]).all(-1) for n in order], axis=1)
    return Proposal(jnp.stack([tokens[n] for n in order], axis=1), valid, jnp.stack([dists[n] for n in order], axis=1))


def rejection(tree: Tree, logits, proposal: Proposal, *request) -> Verdict:
    """What `verify` does for such a batch, without the compilation of what it would do for another."""
    assert proposal.q is not None
    return verify.verify_rejection(tree, logits, proposal, proposal.q, *request)


@partial(jax.jit, static_argnums=(0, 1))
def one_round(tree: Tree, rule: Callable, root, proposal: Proposal, batch, history: History, texts, count):
    """Texts `[B, CAPACITY]` of `count` tokens each with one more round in them."""
    held = jnp.concatenate([root[:, None], proposal.tokens], axis=1)
    verdict = rule(tree, jnp.asarray(MODEL)[held], proposal, batch, history, count)
    place = count[:, None] + jnp.arange(tree.max_depth + 1)
    place = jnp.where(jnp.arange(tree.max_depth + 1) < verdict.count[:, None], place, CAPACITY)
    at = jnp.arange(count.shape[0])[:, None]
    before, texts = texts, texts.at[at, place].set(verdict.tokens, mode="drop")
    counts = history.counts.at[at, jnp.where(place < CAPACITY, verdict.tokens, VOCAB)].add(1, mode="drop")
    # A text that is long enough stands still: it has room for no more.
    going = count < LENGTH
    kept = History(jnp.where(going[:, None], counts, history.counts), history.in_prompt)
    return kept, jnp.where(going[:, None], texts, before), jnp.where(going, count + verdict.count, count)


def play(tree: Tree, rule: Callable = rejection, spoil=lambda tree, proposal: proposal, draws: int = DRAWS):
    """The index of the text that every row came to, `[requests, draws]`: each needs one to three rounds."""
    total = draws * len(REQUESTS)
    batch, history = (
        jax.tree.map(lambda a: jnp.repeat(a, draws, axis=0), rows)
        for rows in (sampling_of(REQUESTS), history_of(REQUESTS, VOCAB))
    )
    seeds = jnp.arange(total, dtype=jnp.uint32)
    batch = batch._replace(seed=jnp.stack([seeds, seeds * 0 + 7], axis=1))
    texts, count = jnp.zeros((total, CAPACITY), jnp.int32), jnp.zeros(total, jnp.int32)
    for index in range(LENGTH):
        root = jnp.where(count > 0, texts[seeds, jnp.maximum(count - 1, 0)], PROMPT[-1])
        proposal = spoil(tree, drafts(tree, root, jax.random.key(index)))
        history, texts, count = one_round(tree, rule, root, proposal, batch, history, texts, count)
    assert int(count.min()) >= LENGTH
    weights = VOCAB ** np.arange(LENGTH)[::-1]
    return (np.asarray(texts)[:, :LENGTH] @ weights).reshape(len(REQUESTS), draws)


def p_values(found: np.ndarray) -> np.ndarray:
    return np.array([oracle.p_value(row, p) for row, p in zip(found, expected(), strict=True)])


@pytest.mark.parametrize("name", TREES)
def test_texts_of_several_rounds_follow_the_target(name: str) -> None:
    found = play(TREES[name])
    assert p_values(found).min() > 1e-6
    assert len(set(found[0])) == 1  # the greedy row of the mixed batch
    for count in (1_250, DRAWS):  # n·|f - p|² has the expectation 1 - Σp², whatever n is
        ratios = []
        for row, p in zip(found[1:], expected()[1:], strict=True):
            frequency = np.bincount(row[:count], minlength=p.size) / count
            ratios.append(count * np.sum((frequency - p) ** 2) / (1 - np.sum(p**2)))
        assert 0.6 < np.mean(ratios) < 1.6


def test_more_drafts_are_accepted_than_by_the_coupled_rule() -> None:
    """The sum of min(p, q) instead of the sum of p·q: what the rule is for."""
    tree = Tree.chain(2)
    rows = 2_000
    batch = jax.tree.map(lambda a: jnp.repeat(a, rows, axis=0), sampling_of(REQUESTS[1:2]))
    batch = batch._replace(seed=jnp.stack([jnp.arange(rows, dtype=jnp.uint32)] * 2, axis=1))
    history = jax.tree.map(lambda a: jnp.repeat(a, rows, axis=0), history_of(REQUESTS[1:2], VOCAB))
    root = jnp.full(rows, PROMPT[-1])
    proposal = drafts(tree, root, jax.random.key(0), temperature=1.0)
    held = jnp.concatenate([root[:, None], proposal.tokens], axis=1)
    arguments = jnp.asarray(MODEL)[held], proposal, batch, history, jnp.zeros(rows, jnp.int32)
    counts = [
        np.asarray(jax.jit(rule, static_argnums=0)(tree, *arguments).count)
        for rule in (rejection, verify.verify_coupled)
    ]
    p, q = jax.nn.softmax(MODEL[PROMPT[-1]]), np.asarray(proposal.q)[0, 0]
    assert (counts[0] > 1).mean() == pytest.approx(float(np.minimum(p, q).sum()), abs=0.05)
    assert (counts[0] - 1).mean() > 1.2 * (counts[1] - 1).mean()


def test_a_token_the_target_never_draws_is_not_accepted_at_chance_zero() -> None:
    assert not verify._accepts(jnp.float32(0), jnp.float32(0), jnp.float32(0.5))
    assert verify._accepts(jnp.float32(0), jnp.float32(1e-9), jnp.float32(0.5))


def test_equal_distributions_leave_p_when_rounding_leaves_nothing() -> None:
    p = jnp.array([[0.5, 0.5, 0.0]])
    np.testing.assert_array_equal(verify._residual(p, p), p)


def test_invalid_nodes_are_never_accepted_and_cost_no_mass() -> None:
    def nothing(tree, proposal):
        return proposal._replace(valid=proposal.valid & False)

    assert p_values(play(TREES["bush"], spoil=nothing)).min() > 1e-6


def test_unusable_logits_count_only_on_the_path_that_was_walked() -> None:
    tree = Tree.chain(2)
    batch, history = sampling_of(REQUESTS), history_of(REQUESTS, VOCAB)
    rows = len(REQUESTS)
    never = Proposal(
        jnp.zeros((rows, 2), jnp.int32),
        jnp.zeros((rows, 2), bool),
        jnp.broadcast_to(jax.nn.one_hot(0, VOCAB), (rows, 2, VOCAB)),
    )
    logits = np.repeat(MODEL[None, :1], rows, axis=0).repeat(3, axis=1)
    logits[:, 1:] = np.nan
    ordinal = jnp.zeros(rows, jnp.int32)
    judge = jax.jit(rejection, static_argnums=0)
    assert judge(tree, jnp.asarray(logits), never, batch, history, ordinal).finite.all()
    logits[::2, 0, 2] = np.nan
    found = judge(tree, jnp.asarray(logits), never, batch, history, ordinal)
    np.testing.assert_array_equal(found.finite, np.arange(rows) % 2 == 1)
    assert int(found.tokens.min()) >= 0
    assert int(found.tokens.max()) < VOCAB


# The faults that these checks are for


def _q_unfiltered(tree: Tree, proposal: Proposal) -> Proposal:
    parents = jnp.asarray([0, *tree.parents])[1:]
    held = jnp.concatenate([jnp.full((proposal.tokens.shape[0], 1), PROMPT[-1]), proposal.tokens], axis=1)
    return proposal._replace(q=jax.nn.softmax(jnp.asarray(DRAFT)[held[:, parents]] / 1.5, axis=-1))


def _q_as_if_replaced(tree: Tree, proposal: Proposal) -> Proposal:
    """Siblings report the first one's q."""
    first = jnp.asarray([tree.parents.index(parent) for parent in tree.parents])
    assert proposal.q is not None
    return proposal._replace(q=proposal.q[:, first])


@pytest.mark.parametrize(("name", "spoil"), [("chain", _q_unfiltered), ("bush", _q_as_if_replaced)])
def test_a_wrong_q_is_seen(name: str, spoil: Callable) -> None:
    assert p_values(play(TREES[name], spoil=spoil)).min() < 1e-6


def spoilt(tree: Tree, *rest) -> Verdict:
    """`rejection` under a name of its own: a program that was compiled before would not show what is patched now."""
    return rejection(tree, *rest)


def _not_renormalised(p, q):
    return jnp.maximum(p - q, 0)


def _no_residual(p, q):
    return p


@pytest.mark.parametrize("fault", [_not_renormalised, _no_residual])
def test_a_wrong_residual_is_seen(fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_residual", fault)
    assert p_values(play(SIBLINGS, rule=partial(spoilt), draws=FEW)).min() < 1e-6


def test_one_chance_for_all_siblings_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.uniform
    monkeypatch.setattr(noise, "uniform", lambda keys, ids: right(keys, ids * 0))
    assert p_values(play(SIBLINGS, rule=partial(spoilt))).min() < 1e-6


def test_a_bonus_after_a_rejection_at_the_last_draft_is_seen() -> None:
    def rule(tree: Tree, logits, proposal, batch, history, ordinal) -> Verdict:
        found = rejection(tree, logits, proposal, batch, history, ordinal)
        rejected = found.count == tree.max_depth
        bonus = jax.random.categorical(jax.random.key(3), logits[:, -1]).astype(jnp.int32)
        tokens = found.tokens.at[:, -1].set(jnp.where(rejected, bonus, found.tokens[:, -1]))
        return found._replace(tokens=tokens, count=found.count + rejected)

    assert p_values(play(TREES["chain"], rule=rule, draws=FEW)).min() < 1e-6
