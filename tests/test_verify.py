"""Verification against plain sampling one token at a time, and against a walk in Python."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import noise, sampling, verify
from jaxspec.config import SamplingParams
from jaxspec.tree import Tree
from jaxspec.types import Proposal, Verdict
from tests.oracles import numpy_sampler as oracle
from tests.oracles.requests import Request, history_of, random_requests, sampling_of

VOCAB = 9
MODEL = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
"""A target model: the logits after the two tokens before, `[before last, last, V]`."""

_PENALTIES: dict = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.5}
_OPTIONS: list[dict] = [
    {},
    _PENALTIES,
    {"repetition_penalty": 0.5, "frequency_penalty": -1.0},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
    {"logit_bias": {0: 2.0, 4: -1.0}, "min_tokens": 9},
    {**_PENALTIES, "top_k": 5, "top_p": 0.95, "min_tokens": 8, "logit_bias": {3: 1.0}},
]
PARAMS = [SamplingParams(temperature=t, **options) for t in (0.0, 0.7, 1.0) for options in _OPTIONS]
REQUESTS = random_requests(PARAMS * 3, VOCAB, seed=1)
ORDINAL = np.array([len(r.output) for r in REQUESTS])

TREES = {
    "chain": Tree.chain(4),
    "branches": Tree((0, 0, 1, 1, 2, 3, 3, 4, 6)),
    "wide": Tree(tuple(int(np.random.default_rng(i).integers(max(0, i - 12), i + 1)) for i in range(45))),
}

STEPS = max(tree.max_depth for tree in TREES.values()) + 1


class Case(NamedTuple):
    """A drafted tree for every request, and what plain sampling says about it."""

    tree: Tree
    tokens: np.ndarray
    valid: np.ndarray
    logits: np.ndarray
    truth: np.ndarray


class Found(NamedTuple):
    """A verdict in numpy."""

    tokens: np.ndarray
    path: np.ndarray
    count: np.ndarray
    finite: np.ndarray


@jax.jit
def plain_draw(logits, batch, history, ordinal):
    keys = noise.noise_keys(batch.seed, batch.sample, ordinal[:, None], noise.TARGET)
    return sampling.draw(logits[:, None], batch, history, None, ordinal[:, None], keys)[0][:, 0]


def last_two(request: Request) -> list[int]:
    return [0, *request.prompt, *request.output][-2:]


@cache
def plain() -> np.ndarray:
    """What plain sampling emits `[B, STEPS]`: forward, draw, append, with no draft anywhere."""
    batch, texts = sampling_of(REQUESTS), list(REQUESTS)
    for _ in range(STEPS):
        logits = np.stack([MODEL[tuple(last_two(r))] for r in texts])
        ordinal = np.array([len(r.output) for r in texts])
        tokens = plain_draw(logits, batch, history_of(texts, VOCAB), ordinal).tolist()
        texts = [
            Request(r.params, r.prompt, (*r.output, token), r.stop_ids) for r, token in zip(texts, tokens, strict=True)
        ]
    return np.array([r.output[-STEPS:] for r in texts])


def case(tree: Tree, seed: int, right: float = 0.6) -> Case:
    """Drafts of which a good part continue as plain sampling does, and a few are not valid."""
    rng = np.random.default_rng(seed)
    truth = plain()
    depths = np.array(tree.depths[1:], int)
    tokens = rng.integers(VOCAB, size=(len(REQUESTS), tree.size))
    tokens = np.where(rng.random(tokens.shape) < right, truth[:, depths - 1], tokens)
    valid = rng.random(tokens.shape) < 0.9
    return Case(tree, tokens, valid, logits_of(tree, tokens), truth)


def logits_of(tree: Tree, tokens: np.ndarray) -> np.ndarray:
    """What the target says at every node `[B, W, V]`, each from the text on its own path."""
    logits = np.zeros((len(REQUESTS), tree.width, VOCAB), np.float32)
    for row, request in enumerate(REQUESTS):
        texts = [last_two(request)]
        for token, parent in zip(tokens[row], tree.parents, strict=True):
            texts.append([texts[parent][-1], int(token)])
        logits[row] = [MODEL[tuple(text)] for text in texts]
    return logits


def walk(case: Case, row: int) -> tuple[list[int], list[int]]:
    """The path and the tokens that plain sampling's truth leads to."""
    path, emitted = [0], [int(case.truth[row, 0])]
    while True:
        children = [
            node
            for node in range(1, case.tree.width)
            if case.tree.parents[node - 1] == path[-1]
            and case.valid[row, node - 1]
            and case.tokens[row, node - 1] == emitted[-1]
        ]
        if not children:
            return path, emitted
        path.append(children[0])
        emitted.append(int(case.truth[row, len(path) - 1]))


@partial(jax.jit, static_argnames="tree")
def coupled(tree, logits, proposal, batch, history, ordinal) -> Verdict:
    return verify.verify_coupled(tree, logits, proposal, batch, history, ordinal)


def verdict_of(case: Case, run=coupled) -> Found:
    proposal = Proposal(jnp.asarray(case.tokens, jnp.int32), jnp.asarray(case.valid))
    history = history_of(REQUESTS, VOCAB)
    found = run(case.tree, jnp.asarray(case.logits), proposal, sampling_of(REQUESTS), history, jnp.asarray(ORDINAL))
    return Found(*(np.asarray(part) for part in found))


def differences(case: Case, verdict: Found) -> int:
    """Rows whose path or tokens are not those of the walk."""
    wrong = 0
    for row in range(len(REQUESTS)):
        path, emitted = walk(case, row)
        count = int(verdict.count[row])
        wrong += (verdict.path[row, :count].tolist(), verdict.tokens[row, :count].tolist()) != (path, emitted)
    return wrong


@pytest.mark.parametrize("name", TREES)
def test_emitted_tokens_are_those_of_plain_sampling(name: str) -> None:
    """Law 1: each node's penalties, filters and noise are those that plain sampling has on that path."""
    tree, lengths = TREES[name], []
    for seed in range(4):
        drafted = case(tree, seed)
        verdict = verdict_of(drafted)
        assert differences(drafted, verdict) == 0
        assert verdict.finite.all()
        assert verdict.count.min() >= 1
        assert verdict.count.max() <= tree.max_depth + 1
        lengths.extend(verdict.count.tolist())
    assert {1, 2, 3} <= set(lengths)


def test_drafts_that_are_all_right_are_all_accepted() -> None:
    drafted = case(TREES["chain"], 0, right=1.0)
    drafted.valid[:] = True
    verdict = verdict_of(drafted)
    assert (verdict.count == 5).all()
    np.testing.assert_array_equal(verdict.tokens, drafted.truth[:, :5])


@pytest.mark.parametrize("name", ["chain", "branches", "wide"])
def test_a_node_that_is_not_valid_is_never_accepted(name: str) -> None:
    """Padding holds token 0, and 0 is what the target wants: it must not pass for a draft."""
    drafted = case(TREES[name], 0)
    drafted.tokens[:], drafted.valid[:] = 0, False
    drafted.logits[:] = 30 * np.eye(VOCAB)[0]
    verdict = verdict_of(drafted)
    np.testing.assert_array_equal(verdict.count, 1)
    drafted.valid[:, 0] = True  # the padding after one real draft
    verdict = verdict_of(drafted)
    follows = verdict.tokens[:, 0] == 0
    np.testing.assert_array_equal(verdict.count, 1 + follows)
    assert follows.mean() > 0.5


def test_a_child_under_a_node_that_is_not_valid_is_out_of_reach() -> None:
    drafted = case(TREES["chain"], 0, right=1.0)
    drafted.valid[:] = [True, False, True, True]
    np.testing.assert_array_equal(verdict_of(drafted).count, 2)


def test_a_row_does_not_depend_on_its_mates() -> None:
    drafted = case(TREES["branches"], 2)
    verdict = verdict_of(drafted)
    kept = np.arange(len(REQUESTS)) % 2 == 0
    other = case(TREES["branches"], 3)

    def mix(mine: np.ndarray, others: np.ndarray) -> np.ndarray:
        return np.where(kept.reshape(-1, *[1] * (mine.ndim - 1)), mine, others)

    mixed = Case(drafted.tree, *map(mix, drafted[1:], other[1:]))
    mixed.logits[1] = np.nan
    again = verdict_of(mixed)
    for before, after in zip(verdict, again, strict=True):
        np.testing.assert_array_equal(before[kept], after[kept])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_logits_count_only_on_the_path_that_was_walked(bad: float) -> None:
    drafted = case(TREES["branches"], 0)
    reached = np.zeros((len(REQUESTS), drafted.tree.width), bool)
    for row in range(len(REQUESTS)):
        reached[row, walk(drafted, row)[0]] = True
    drafted.logits[~reached] = bad
    verdict = verdict_of(drafted)
    assert verdict.finite.all()
    assert differences(drafted, verdict) == 0
    drafted.logits[::2, 0, 3] = bad
    verdict = verdict_of(drafted)
    np.testing.assert_array_equal(verdict.finite, np.arange(len(REQUESTS)) % 2 == 1)
    assert verdict.tokens.min() >= 0
    assert verdict.tokens.max() < VOCAB


@pytest.mark.parametrize("name", TREES)
def test_typical_acceptance_is_a_brute_force_search(name: str) -> None:
    """Of all paths of nodes likely enough the longest, of those the likeliest; then the target's own draw."""
    drafted, lengths = case(TREES[name], 5), []
    verdict = verdict_of(drafted, jax.jit(verify.verify_typical, static_argnums=0))
    own = verdict_of(drafted)
    for row, request in enumerate(REQUESTS):
        score, doubt = typical_scores(drafted, row)
        if doubt:
            continue
        path, count = verdict.path[row].tolist(), int(verdict.count[row])
        node = path[count - 1]
        assert path[:count] == line_of(drafted.tree, node)
        best = max(score, key=lambda n: (drafted.tree.depths[n], score[n]))
        assert drafted.tree.depths[node] == drafted.tree.depths[best]
        assert score[node] == pytest.approx(score[best], abs=1e-4)
        assert verdict.tokens[row, : count - 1].tolist() == [drafted.tokens[row, n - 1] for n in path[1:count]]
        lengths.append(count)
        if request.params.temperature == 0:  # exact for greedy rows
            assert count >= own.count[row]  # more where two siblings hold the same token
            assert verdict.tokens[row, :count].tolist() == drafted.truth[row, :count].tolist()
    assert {1, 2, 3} <= set(lengths)
    assert len(lengths) > len(REQUESTS) / 2


def line_of(tree: Tree, node: int) -> list[int]:
    return ([*line_of(tree, tree.parents[node - 1])] if node else []) + [node]


def typical_scores(drafted: Case, row: int) -> tuple[dict[int, float], bool]:
    """Σ log p of every node that may be accepted, and whether one was too close to call."""
    request, score, doubt = REQUESTS[row], {0: 0.0}, False
    for node, parent in enumerate(drafted.tree.parents, start=1):
        if parent not in score or not drafted.valid[row, node - 1]:
            continue
        text = tuple(int(drafted.tokens[row, n - 1]) for n in line_of(drafted.tree, parent)[1:])
        output = (*request.output, *text)
        adjusted = oracle.adjusted(
            drafted.logits[row, parent], request.params, request.prompt, output, request.stop_ids
        )
        p = oracle.probabilities(adjusted, request.params)
        if request.params.temperature:
            doubt |= oracle.doubtful(adjusted / request.params.temperature, request.params).any()
        entropy = -np.sum(p[p > 0] * np.log(p[p > 0]))
        least, chance = min(0.09, 0.3 * np.exp(-entropy)), p[drafted.tokens[row, node - 1]]
        doubt |= abs(chance - least) < 1e-5
        if chance > least:
            score[node] = score[parent] + np.log(chance)
    return score, bool(doubt)


# The faults that these checks are for


def _no_path_counts(tree, proposal, vocab):
    return PATH_COUNTS(tree, proposal, vocab) * 0


def _counts_of_all_nodes(tree, proposal, vocab):
    batch = proposal.tokens.shape[0]
    counts = jnp.zeros((batch, vocab), jnp.int32).at[jnp.arange(batch)[:, None], proposal.tokens].add(1)
    return jnp.broadcast_to(counts[:, None], (batch, tree.width, vocab))


def _counts_of_the_parent(tree, proposal, vocab):
    return PATH_COUNTS(tree, proposal, vocab)[:, jnp.array([0, *tree.parents])]


def _invalid_accepted(tree, proposal, drawn):
    return WALK(tree, proposal._replace(valid=proposal.valid | True), drawn)


def _first_child_only(tree, proposal, drawn):
    first = [tree.parents.index(parent) == node for node, parent in enumerate(tree.parents)]
    return WALK(tree, proposal._replace(valid=proposal.valid & jnp.array(first)), drawn)


PATH_COUNTS, WALK = verify._path_counts, verify._walk


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_path_counts", _no_path_counts),
        pytest.param("_walk", _invalid_accepted, marks=pytest.mark.slow),
        pytest.param("_path_counts", _counts_of_all_nodes, marks=pytest.mark.slow),
        pytest.param("_path_counts", _counts_of_the_parent, marks=pytest.mark.slow),
        pytest.param("_walk", _first_child_only, marks=pytest.mark.slow),
    ],
)
def test_faults_are_seen(name: str, fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, name, fault)
    run = jax.jit(partial(verify.verify_coupled), static_argnums=0)
    drafted = case(TREES["branches"], 1)
    assert differences(drafted, verdict_of(drafted, run)) > 0


@pytest.mark.slow
def test_noise_of_the_wrong_depth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.noise_keys
    monkeypatch.setattr(
        noise, "noise_keys", lambda seed, sample, at, purpose: right(seed, sample, at * 0 + at[:, :1], purpose)
    )
    run = jax.jit(partial(verify.verify_coupled), static_argnums=0)
    drafted = case(TREES["chain"], 1)
    assert differences(drafted, verdict_of(drafted, run)) > 0
