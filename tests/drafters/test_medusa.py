"""Heads: guesses against a brute force, laws 1 and 2 on trees, and what is refused."""

import json
import logging
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.drafters import _heads, _pace, get_drafter
from jaxspec.errors import ConfigError
from jaxspec.kv.formats import get_format
from jaxspec.models.heads import head_logits
from jaxspec.models.loading import LoadedModel
from jaxspec.sampling import sampling_row
from jaxspec.tree import Tree
from jaxspec.types import History, Models, Progress, Verdict, View
from tests.drafters.test_draft_model import LAW_KEPT, LAW_PROMPT, LAW_ROWS, follow_the_target, hot, text_chances
from tests.drafters.test_drafters import REPEATING
from tests.driver import SPEC, decode_all, make_program, random_params, write_heads
from tests.oracles import numpy_sampler as oracle

PARAMS = random_params()
CHAIN = [[0], [0, 0], [0, 0, 0]]
BUSH = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [3], [0, 1, 0], [1, 0, 0], [4], [5]]


@pytest.fixture(scope="module")
def plain():
    return {
        name: decode_all(PARAMS, make_program(kv=get_format(name), pages=160, page=8), REPEATING, batch=8)
        for name in ("float32", "int8")
    }


@pytest.fixture(scope="module")
def common(plain) -> list[int]:
    """The tokens that these texts have most: heads that guess them are right now and then."""
    count = Counter(token for result in plain["float32"].values() for token in result.tokens)
    return [token for token, _ in count.most_common(10)]


def folder_of(tmp_path: Path, nodes: list[list[int]], **options) -> str:
    folder = write_heads(tmp_path / "heads", SPEC, **options)
    (folder / "tree.json").write_text(json.dumps({"nodes": nodes, "chances": [0.5] * len(nodes)}))
    return str(folder)


def drafter_of(folder: str, name: str = "medusa", **options):
    loaded = LoadedModel(SPEC, PARAMS.target, None, "tiny")
    return get_drafter(EngineConfig(drafter=name, medusa_heads=folder, **options), loaded)


@pytest.mark.parametrize("conditioned", [0, 16])
@pytest.mark.parametrize("tokens", [None, [3, 5, 7, 11, 13, 17, 19]])
def test_guesses_are_the_likeliest_under_each_path(tmp_path, conditioned: int, tokens) -> None:
    """Node by node: the r-th token of its head, given the tokens above it, and the product of the chances."""
    folder = folder_of(tmp_path, BUSH, conditioned=conditioned, tokens=tokens)
    config = EngineConfig(drafter="medusa", medusa_heads=folder)
    heads, params = _heads.load(config, LoadedModel(SPEC, PARAMS.target, None, "tiny"))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(0, 1, (3, SPEC.embed_dim)), jnp.float32)
    root = jnp.asarray([4, 5, 6], jnp.int32)
    wanted = jnp.asarray([True, True, False])
    found = jax.jit(partial(_heads.guess, heads, floor=0.0))(params, hidden, root, wanted)
    assert not np.asarray(found.chance[2]).any()
    for row in range(2):
        said = {(): (int(root[row]), 1.0)}
        for node, ranks in enumerate(map(tuple, BUSH)):
            path = [said[ranks[:i]][0] for i in range(len(ranks))]
            head = params["heads"][len(ranks) - 1]
            logits = head_logits(heads.spec, head, params, hidden[row], jnp.asarray(path))
            logits = np.asarray(logits)[: SPEC.valid_vocab]  # no padding is guessed
            order, chances = np.argsort(-logits), oracle.softmax(logits.astype(np.float64))
            token = order[ranks[-1]]
            said[ranks] = int(token if tokens is None else tokens[token]), said[ranks[:-1]][1] * chances[token]
            assert int(found.tokens[row, node]) == said[ranks][0]
            assert float(found.chance[row, node]) == pytest.approx(said[ranks][1], rel=1e-4)


@pytest.mark.parametrize(
    ("kv", "nodes", "conditioned"),
    [
        pytest.param("float32", CHAIN, 0, marks=pytest.mark.slow),
        ("float32", BUSH, 16),
        pytest.param("int8", BUSH, 0, marks=pytest.mark.slow),
    ],
)
def test_law_1_trees_change_speed_and_nothing_else(
    unoptimised, tmp_path, plain, common, kv: str, nodes, conditioned: int
) -> None:
    folder = folder_of(tmp_path, nodes, conditioned=conditioned, tokens=common)
    drafter, params = drafter_of(folder, draft_adaptive=False)
    assert drafter.tree == Tree.of_paths(nodes)
    program = make_program(drafter, kv=get_format(kv), pages=160, page=8)
    got = decode_all(Models(PARAMS.target, params), program, REPEATING, batch=8)
    for row, expected in plain[kv].items():
        assert (got[row].tokens, got[row].finish) == (expected.tokens, expected.finish)
    assert sum(r.accepted for r in got.values()) > 5  # or this shows nothing
    alone = decode_all(Models(PARAMS.target, params), program, {0: REPEATING[1]}, batch=1)[0]
    assert alone.tokens == plain[kv][1].tokens


@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_copies_and_heads_take_turns(unoptimised, tmp_path, plain, common, adaptive: bool) -> None:
    folder = folder_of(tmp_path, BUSH, conditioned=16, tokens=common)
    drafter, params = drafter_of(folder, "ngram_medusa", draft_adaptive=adaptive, ngram_min=1)
    assert drafter.tree == Tree.of_paths([(0,), (1,), (0, 0), *[(0,) * depth for depth in range(3, 7)]])
    got = decode_all(Models(PARAMS.target, params), make_program(drafter, pages=160, page=8), REPEATING, batch=8)
    for row, expected in plain["float32"].items():
        assert (got[row].tokens, got[row].finish) == (expected.tokens, expected.finish)
    assert adaptive or sum(r.accepted for r in got.values()) > 5


@pytest.mark.parametrize("nodes", [pytest.param(CHAIN, marks=pytest.mark.slow), BUSH[:7]])
def test_law_2_drawn_drafts_follow_the_target(tmp_path, nodes) -> None:
    """Texts of four tokens from drafts without replacement, against the probabilities of plain forwards."""
    chances = text_chances(PARAMS, LAW_PROMPT, hot(4), 4)
    likely: Counter[int] = Counter()
    for text, chance in chances.items():
        for token in text[1:]:  # the first round drafts nothing
            likely[token] += chance
    tokens = [token for token, _ in likely.most_common(LAW_KEPT)]
    folder = folder_of(tmp_path, nodes, conditioned=16, tokens=tokens)
    drafter, params = drafter_of(folder, verify="rejection", draft_adaptive=False, draft_temperature=20.0)
    program = make_program(drafter, pages=LAW_ROWS * 16)
    drafted, accepted = follow_the_target(program, Models(PARAMS.target, params), length=4, calls=10)
    assert 0.02 * drafted < accepted < drafted


def test_siblings_are_drawn_without_replacement(tmp_path) -> None:
    """How often each ordered pair is drawn, against p(a)·p(b)/(1 − p(a)); and q is what each was drawn from."""
    tokens, rows = [3, 5, 7, 11], 8192
    folder = folder_of(tmp_path, [[0], [1]], tokens=tokens)
    config = EngineConfig(medusa_heads=folder)
    heads, params = _heads.load(config, LoadedModel(SPEC, PARAMS.target, None, "tiny"))
    hidden = jnp.full((rows, SPEC.embed_dim), 0.05)
    seeds = jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 7, jnp.uint32)], axis=1)
    row = sampling_row(SamplingParams(temperature=1.5))
    sampling = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), row)._replace(seed=seeds)
    zeros = jnp.zeros(rows, jnp.int32)
    progress = Progress(zeros + 4, zeros, zeros == 0, zeros, zeros, zeros, zeros)
    nothing = jnp.zeros((rows, SPEC.vocab_size), jnp.int32)
    view = View(None, progress, sampling, History(nothing, nothing > 0))
    found = jax.jit(lambda *a: _heads.draw(heads, *a, view, None))(params, hidden)
    assert np.asarray(found.valid).all()
    logits = head_logits(heads.spec, params["heads"][0], params, hidden[0], zeros[:1])
    p = oracle.softmax(np.asarray(logits, np.float64) / 1.5)
    pairs = np.where(np.eye(4), 0, p[:, None] * p / (1 - p[:, None]))
    drawn = np.searchsorted(tokens, np.asarray(found.tokens))
    assert oracle.p_value(drawn[:, 0] * 4 + drawn[:, 1], pairs.reshape(-1)) > 1e-6
    q = np.asarray(found.q)[:, :, tokens]
    np.testing.assert_allclose(q.sum(-1), 1, rtol=1e-4)  # and nothing on tokens that no head guesses
    np.testing.assert_allclose(q[0, 0], p, rtol=1e-3)
    left = np.where(np.arange(4) == drawn[0, 0], 0, p)
    np.testing.assert_allclose(q[0, 1], left / left.sum(), rtol=1e-3)


def test_typical_takes_more_and_greedy_rows_stay_exact(unoptimised, tmp_path, plain, common) -> None:
    folder = folder_of(tmp_path, BUSH, conditioned=16, tokens=common)
    results = {}
    for rule in ("coupled", "typical"):
        drafter, params = drafter_of(folder, verify=rule, draft_adaptive=False)
        program = make_program(drafter, pages=160, page=8)
        results[rule] = decode_all(Models(PARAMS.target, params), program, REPEATING, batch=8)
    for row, job in REPEATING.items():
        if job.params.temperature == 0:
            assert results["typical"][row].tokens == plain["float32"][row].tokens
    assert any(results["typical"][row].tokens != plain["float32"][row].tokens for row in REPEATING)


@pytest.mark.parametrize("rule", [pytest.param("typical", marks=pytest.mark.slow), "rejection"])
def test_law_3_where_drafts_have_a_say_in_the_text_company_has_none(unoptimised, tmp_path, common, rule: str) -> None:
    """Adaptive lengths follow a row's own history, not what the others draft."""
    drafter, params = drafter_of(folder_of(tmp_path, BUSH[:7], conditioned=16, tokens=common), verify=rule)
    decode = partial(decode_all, Models(PARAMS.target, params), make_program(drafter, pages=160, page=8), batch=8)
    together = decode(REPEATING)
    for row in (1, 2):
        assert decode({row: REPEATING[row]})[row].tokens == together[row].tokens


def test_a_tree_deeper_than_the_heads_is_refused(tmp_path) -> None:
    folder = folder_of(tmp_path, [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ConfigError, match=r"tree.json: a tree of depth 4 needs as many heads, there are 3"):
        drafter_of(folder)
    drafter_of(folder, draft_tokens=3)  # of its first nodes that is not so


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "tree.json"),
        ('{"nodes": [[0]], "chances": []}', "1 nodes and 0 chances"),
        ('{"nodes": [[1]], "chances": [0.5]}', "must come once"),
        ('{"nodes": 3, "chances": [0.5]}', "tree.json"),
    ],
)
def test_a_wrong_tree_is_one_clear_error(tmp_path, content: str, message: str) -> None:
    folder = Path(folder_of(tmp_path, CHAIN))
    (folder / "tree.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        drafter_of(str(folder))


def test_heads_without_a_tree_get_one_and_a_warning(tmp_path, caplog) -> None:
    folder = write_heads(tmp_path / "heads", SPEC)
    with caplog.at_level(logging.WARNING):
        drafter, _ = drafter_of(str(folder), draft_tokens=9)
    assert drafter.tree.size == 9
    assert "the draft tree is a guess" in caplog.text


def test_models_without_heads_say_so() -> None:
    loaded = LoadedModel(SPEC, PARAMS.target, None, "tiny")
    with pytest.raises(ConfigError, match="no heads come with tiny: give medusa_heads"):
        get_drafter(EngineConfig(drafter="medusa"), loaded)


def test_more_siblings_than_tokens_to_guess_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="6 siblings: the heads guess 3 tokens"):
        drafter_of(folder_of(tmp_path, BUSH, tokens=[3, 4, 5]))


def test_rules_that_a_drafter_does_not_allow_are_refused(tmp_path) -> None:
    loaded = LoadedModel(SPEC, PARAMS.target, None, "tiny")
    for name, rule in (("ngram", "rejection"), ("ngram", "typical"), ("layer_skip", "typical")):
        with pytest.raises(ConfigError, match=f"{name} cannot be verified by {rule}"):
            get_drafter(EngineConfig(drafter=name, verify=rule), loaded)


def test_heads_that_seldom_pay_are_seldom_asked(tmp_path) -> None:
    drafter, params = drafter_of(folder_of(tmp_path, CHAIN))
    state = drafter.init(4, 64)
    rare, often = _pace.Pace(0.0, 20.0), _pace.Pace(10.0, 20.0)
    use = jax.tree.map(lambda *a: jnp.asarray(a), rare, rare, often, _pace.Pace(0.0, 0.0))
    state = state._replace(known=jnp.ones(4, bool), hidden=state.hidden + 0.05, use=use)
    zeros = jnp.zeros(4, jnp.int32)
    progress = Progress(zeros + 4, jnp.int32([7, 8, 7, 7]), zeros == 0, zeros, zeros, zeros, zeros)
    view = View(None, progress, None, None)
    proposal, *_ = drafter.propose(params, state, {}, view, None)
    np.testing.assert_array_equal(proposal.valid[:, 0], [False, True, True, True])
    # A round that made guesses and checked none counts against them, one that made none does not count.
    verdict = Verdict(None, None, zeros + 1, None)
    after = drafter.observe(state, proposal._replace(valid=proposal.valid & False), verdict, zeros + 1, state.hidden)
    np.testing.assert_allclose(after.use.trials, [20, 20, 20, 1])  # 20 * 0.95 + 1 is 20, too
    np.testing.assert_allclose(after.use.hits, [0, 0, 10 * 0.95, 0], rtol=1e-6)
