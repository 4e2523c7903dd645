"""What every drafter must do; each file in `jaxspec/drafters` is found by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters import drafter_names, get_drafter
from jaxspec.errors import ConfigError
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import init_params
from jaxspec.tree import Tree
from jaxspec.types import Drafter, Progress, Proposal, Sequences, Verdict

BATCH, PROMPT = 5, 12
MODEL = ModelSpec(
    vocab_size=32,
    valid_vocab=30,
    num_layers=1,
    embed_dim=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=8,
    norm_eps=1e-5,
    inv_freq=(1.0, 0.1),
    max_context=64,
    tied_embeddings=True,
)


@pytest.fixture(params=drafter_names())
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return get_drafter(request.param)


@pytest.fixture(scope="module")
def params():
    return jax.jit(partial(init_params, MODEL))(jax.random.key(0))


def sequences() -> Sequences:
    length = jnp.arange(3, 3 + BATCH)
    table = jnp.arange(4 * BATCH).reshape(1, BATCH, 4)
    return Sequences(table, length[None], length[None] * 0, length)


def progress(seed: int = 0) -> Progress:
    tokens = jnp.asarray(np.random.default_rng(seed).integers(MODEL.valid_vocab, size=BATCH), jnp.int32)
    zeros = jnp.zeros(BATCH, jnp.int32)
    return Progress(tokens, zeros, jnp.ones(BATCH, bool), zeros, zeros, zeros, zeros)


def prompt(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(MODEL.valid_vocab, size=PROMPT), jnp.int32)


def admitted(drafter: Drafter, prompts: list[int]):
    """The state after every row took the prompt of that seed."""
    state = drafter.init(MODEL, BATCH)
    for row, seed in enumerate(prompts):
        state = jax.jit(drafter.admit)(state, jnp.int32(row), prompt(seed))
    return state


def verdict(drafter: Drafter) -> Verdict:
    depth = drafter.tree.max_depth + 1
    tokens = jnp.asarray(np.random.default_rng(1).integers(MODEL.valid_vocab, size=(BATCH, depth)), jnp.int32)
    count = jnp.arange(BATCH, dtype=jnp.int32) % depth + 1
    return Verdict(tokens, jnp.zeros((BATCH, depth), jnp.int32), count, jnp.ones(BATCH, bool))


def shapes(tree) -> list:
    return jax.tree.leaves(jax.tree.map(lambda a: (jnp.shape(a), jnp.asarray(a).dtype), tree))


def equal(first, second) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def test_its_tree_is_static_and_its_state_has_the_batch_first(drafter: Drafter) -> None:
    assert isinstance(drafter.tree, Tree)
    hash(drafter)
    for leaf in jax.tree.leaves(drafter.init(MODEL, BATCH)):
        assert leaf.shape[0] == BATCH


def test_a_proposal_fills_the_tree(drafter: Drafter, params) -> None:
    found, _ = jax.jit(drafter.propose)(params, admitted(drafter, list(range(BATCH))), sequences(), progress())
    assert isinstance(found, Proposal)
    assert found.tokens.shape == found.valid.shape == (BATCH, drafter.tree.size)
    assert (found.tokens.dtype, found.valid.dtype) == (jnp.int32, bool)
    drafted = np.asarray(found.tokens)[np.asarray(found.valid)]
    assert np.all((drafted >= 0) & (drafted < MODEL.valid_vocab))


def test_every_step_keeps_the_state_in_shape(drafter: Drafter, params) -> None:
    """A while loop carries it."""
    state = drafter.init(MODEL, BATCH)
    wanted = jax.tree.structure(state), shapes(state)
    after_admit = admitted(drafter, list(range(BATCH)))
    after_propose = jax.jit(drafter.propose)(params, after_admit, sequences(), progress())[1]
    after_observe = jax.jit(drafter.observe)(after_propose, verdict(drafter))
    for after in (after_admit, after_propose, after_observe):
        assert (jax.tree.structure(after), shapes(after)) == wanted


def test_it_is_pure(drafter: Drafter, params) -> None:
    """The same arguments give the same result, jitted or not, and are left as they were."""
    state = admitted(drafter, list(range(BATCH)))
    kept = jax.tree.map(np.array, state)
    jitted = jax.jit(drafter.propose)
    calls = [call(params, state, sequences(), progress()) for call in (jitted, jitted, drafter.propose)]
    assert equal(calls[0], calls[1])
    assert equal(calls[0], calls[2])
    observed = [drafter.observe(calls[0][1], verdict(drafter)) for _ in range(2)]
    assert equal(*observed)
    assert equal(state, kept)


def test_admission_touches_one_row_and_forgets_its_last_request(drafter: Drafter) -> None:
    state = admitted(drafter, [0, 1, 2, 3, 4])
    again = jax.jit(drafter.admit)(state, jnp.int32(2), prompt(7))
    others = np.array([0, 1, 3, 4])
    assert equal(*(jax.tree.map(lambda a: a[others], s) for s in (state, again)))
    assert equal(again, admitted(drafter, [0, 1, 7, 3, 4]))


def test_a_row_does_not_depend_on_its_mates(drafter: Drafter, params) -> None:
    kept = np.array([0, 3])
    here = progress()
    there = here._replace(token=jnp.where(jnp.isin(jnp.arange(BATCH), kept), here.token, (here.token + 3) % 30))
    rounds = []
    for prompts, state_of in (([0, 1, 2, 3, 4], here), ([0, 8, 9, 3, 7], there)):
        found, state = jax.jit(drafter.propose)(params, admitted(drafter, prompts), sequences(), state_of)
        rounds.append((found, drafter.observe(state, verdict(drafter))))
    assert equal(*(jax.tree.map(lambda a: a[kept], r) for r in rounds))


def test_files_are_drafters() -> None:
    assert "none" in drafter_names()
    assert get_drafter("none").tree == Tree()


def test_an_unknown_drafter_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no drafter named 'oracle' \(there are: .*none"):
        get_drafter("oracle")
