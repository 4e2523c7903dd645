"""What every drafter must do; each file in `jaxspec/drafters` is found by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.drafters import drafter_names, get_drafter
from jaxspec.drafters._model import model_drafter
from jaxspec.errors import ConfigError
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.sampling import sampling_row
from jaxspec.tree import Tree
from jaxspec.types import Drafter, History, Models, Params, Progress, Proposal, Sequences, Verdict, View
from tests.driver import SPEC, Job, Result, decode_all, make_program, random_params, write_heads
from tests.test_decode import MIX

BATCH, PROMPT, CONTEXT = 5, 12, 24
VOCAB, KNOWN, EMBED = 512, 300, 64
"""Rows of the tiny model's embedding, and a bound below which every id is a token."""


@pytest.fixture(scope="module")
def target(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), progress=False)


OTHERWISE = [("draft_model", "coupled"), ("layer_skip", "coupled"), ("medusa", "rejection"), ("medusa", "typical")]
"""Rules that are not a drafter's own choice."""


@pytest.fixture(scope="module")
def tiny_heads(target: LoadedModel, tmp_path_factory) -> str:
    return str(write_heads(tmp_path_factory.mktemp("heads"), target.spec))


@pytest.fixture(params=[*((name, "auto") for name in drafter_names()), *OTHERWISE])
def built(request: pytest.FixtureRequest, target: LoadedModel, tiny_model, tiny_heads: str):
    name, verify = request.param
    config = EngineConfig(
        drafter=name, draft_tokens=3, draft_model=str(tiny_model), medusa_heads=tiny_heads, verify=verify
    )
    return get_drafter(config, target)


@pytest.fixture
def drafter(built) -> Drafter:
    return built[0]


@pytest.fixture
def params(built):
    return built[1]


def sequences() -> Sequences:
    length = jnp.arange(3, 3 + BATCH)
    table = jnp.arange(4 * BATCH).reshape(1, BATCH, 4)
    return Sequences(table, length[None], length[None] * 0, length)


def progress(seed: int = 0) -> Progress:
    tokens = jnp.asarray(np.random.default_rng(seed).integers(KNOWN, size=BATCH), jnp.int32)
    zeros = jnp.zeros(BATCH, jnp.int32)
    return Progress(tokens, zeros, jnp.ones(BATCH, bool), zeros, zeros, zeros, zeros)


def view(now: Progress) -> View:
    sampling = jax.tree.map(lambda a: jnp.broadcast_to(a, (BATCH, *a.shape)), sampling_row(SamplingParams()))
    nothing = jnp.zeros((BATCH, VOCAB), jnp.int32)
    return View(sequences(), now, sampling, History(nothing, nothing > 0))


def propose(drafter: Drafter, params, state, now: Progress, jit: bool = True):
    """The proposal and the state after it, over an empty pool of its own."""
    pool_spec = make_program(drafter).draft_pool
    pool = pool_spec.allocate(BATCH) if pool_spec else {}
    call = partial(drafter.propose, pool_spec=pool_spec)
    found, after, _ = (jax.jit(call) if jit else call)(params, state, pool, view(now))
    return found, after


def prompt(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(KNOWN, size=PROMPT), jnp.int32)


def admitted(drafter: Drafter, prompts: list[int]):
    """The state after every row took the prompt of that seed."""
    state = drafter.init(BATCH, CONTEXT)
    for row, seed in enumerate(prompts):
        state = jax.jit(drafter.admit)(state, jnp.int32(row), prompt(seed), jnp.int32(PROMPT))
    return state


def verdict(drafter: Drafter) -> Verdict:
    depth = drafter.tree.max_depth + 1
    tokens = jnp.asarray(np.random.default_rng(1).integers(KNOWN, size=(BATCH, depth)), jnp.int32)
    count = jnp.arange(BATCH, dtype=jnp.int32) % depth + 1
    return Verdict(tokens, jnp.zeros((BATCH, depth), jnp.int32), count, jnp.ones(BATCH, bool))


def outcome(drafter: Drafter) -> tuple[Verdict, jax.Array, jax.Array]:
    """What a drafter is told of a round: the verdict, how much of it counts, and hidden states."""
    hidden = np.random.default_rng(2).normal(0, 1, (BATCH, EMBED)).astype(np.float32)
    return verdict(drafter), verdict(drafter).count, jnp.asarray(hidden)


def shapes(tree) -> list:
    return jax.tree.leaves(jax.tree.map(lambda a: (jnp.shape(a), jnp.asarray(a).dtype), tree))


def equal(first, second) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def test_its_tree_is_static_and_its_state_has_the_batch_first(drafter: Drafter) -> None:
    assert isinstance(drafter.tree, Tree)
    hash(drafter)
    for leaf in jax.tree.leaves(drafter.init(BATCH, CONTEXT)):
        assert leaf.shape[0] == BATCH


def test_a_proposal_fills_the_tree(drafter: Drafter, params) -> None:
    found, _ = propose(drafter, params, admitted(drafter, list(range(BATCH))), progress())
    assert isinstance(found, Proposal)
    assert found.tokens.shape == found.valid.shape == (BATCH, drafter.tree.size)
    assert (found.tokens.dtype, found.valid.dtype) == (jnp.int32, bool)
    drafted = np.asarray(found.tokens)[np.asarray(found.valid)]
    assert np.all((drafted >= 0) & (drafted < KNOWN))


def test_every_step_keeps_the_state_in_shape(drafter: Drafter, params) -> None:
    """A while loop carries it."""
    state = drafter.init(BATCH, CONTEXT)
    wanted = jax.tree.structure(state), shapes(state)
    after_admit = admitted(drafter, list(range(BATCH)))
    found, after_propose = propose(drafter, params, after_admit, progress())
    after_observe = jax.jit(drafter.observe)(after_propose, found, *outcome(drafter))
    for after in (after_admit, after_propose, after_observe):
        assert (jax.tree.structure(after), shapes(after)) == wanted


def test_it_is_pure(drafter: Drafter, params) -> None:
    """The same arguments give the same result, jitted or not, and are left as they were."""
    state = admitted(drafter, list(range(BATCH)))
    kept = jax.tree.map(np.array, state)
    calls = [propose(drafter, params, state, progress(), jit) for jit in (True, True, False)]
    assert equal(calls[0], calls[1])
    assert equal(calls[0], calls[2])
    observed = [drafter.observe(calls[0][1], calls[0][0], *outcome(drafter)) for _ in range(2)]
    assert equal(*observed)
    assert equal(state, kept)


def test_admission_touches_one_row_and_forgets_its_last_request(drafter: Drafter) -> None:
    state = admitted(drafter, [0, 1, 2, 3, 4])
    again = jax.jit(drafter.admit)(state, jnp.int32(2), prompt(7), jnp.int32(PROMPT))
    others = np.array([0, 1, 3, 4])
    assert equal(*(jax.tree.map(lambda a: a[others], s) for s in (state, again)))
    assert equal(again, admitted(drafter, [0, 1, 7, 3, 4]))


def test_a_row_does_not_depend_on_its_mates(drafter: Drafter, params) -> None:
    kept = np.array([0, 3])
    here = progress()
    there = here._replace(token=jnp.where(jnp.isin(jnp.arange(BATCH), kept), here.token, (here.token + 3) % KNOWN))
    rounds = []
    for prompts, state_of in (([0, 1, 2, 3, 4], here), ([0, 8, 9, 3, 7], there)):
        state = admitted(drafter, prompts)
        for _ in range(2):  # some drafters know nothing in the first round
            found, state = propose(drafter, params, state, state_of)
            state = drafter.observe(state, found, *outcome(drafter))
        rounds.append((found, state))
    assert equal(*(jax.tree.map(lambda a: a[kept], r) for r in rounds))


def test_widths_end_with_the_whole_tree(drafter: Drafter) -> None:
    assert list(drafter.widths) == sorted(set(drafter.widths))
    assert drafter.widths[-1] == drafter.tree.width


MORE = {
    4: Job([3, 4, 5, 4], SamplingParams(max_tokens=20, repetition_penalty=1.2, presence_penalty=0.4, logprobs=0)),
    5: Job([9, 8, 9], SamplingParams(temperature=1.0, top_p=0.9, max_tokens=13, logprobs=0), seed=2**63),
    6: Job(
        [30, 31], SamplingParams(max_tokens=20, min_tokens=4, logprobs=0), eos_ids=tuple(range(0, SPEC.valid_vocab, 8))
    ),
    7: Job(list(range(12)), SamplingParams(temperature=0.5, min_p=0.1, logit_bias={5: 3.0}, max_tokens=20, logprobs=0)),
}
REPEATING = {
    row: job._replace(prompt=[*job.prompt, *job.prompt, *job.prompt][:30]) for row, job in (MIX | MORE).items()
}


def law_drafter(config: EngineConfig, target: LoadedModel, params: Models) -> tuple[Drafter, Params]:
    """The configured drafter for the driver's model; a draft model is the target with its weights disturbed."""
    if config.drafter != "draft_model":
        return get_drafter(config, target._replace(spec=SPEC, params=params.target))
    rng = np.random.default_rng(0)
    draft = jax.tree.map(lambda a: a * (1 + 0.01 * rng.standard_normal(a.shape, np.float32)), params.target)
    return model_drafter(SPEC, SPEC, config), draft


@pytest.fixture(scope="module")
def plain() -> dict[int, Result]:
    return decode_all(random_params(), make_program(pages=160), REPEATING, batch=len(REPEATING))


@pytest.mark.parametrize("adaptive", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("name", [name for name in drafter_names() if name != "none"])
def test_law_1_the_tokens_are_those_of_plain_decoding(
    unoptimised, name: str, adaptive: bool, target: LoadedModel, plain, tmp_path
) -> None:
    params = random_params()
    heads = str(write_heads(tmp_path / "heads", SPEC, conditioned=16))
    config = EngineConfig(
        drafter=name, draft_tokens=4, draft_adaptive=adaptive, ngram_min=1, verify="coupled", medusa_heads=heads
    )
    drafter, draft_params = law_drafter(config, target, params)
    decode = partial(
        decode_all, Models(params.target, draft_params), make_program(drafter, pages=160), batch=len(plain)
    )
    together = decode(REPEATING)
    for row, expected in plain.items():
        assert (together[row].tokens, together[row].finish) == (expected.tokens, expected.finish)
    assert decode({1: REPEATING[1]})[1].tokens == plain[1].tokens
    if adaptive:  # it may find that drafting does not pay
        return
    assert sum(r.drafted for r in together.values()) > 0
    if name == "draft_model":
        # A draft so close to the target, with the same noise, is mostly right: its cache is in step.
        accepted, drafted = (sum(getattr(r, f) for r in together.values()) for f in ("accepted", "drafted"))
        assert accepted > 0.3 * drafted


def test_files_are_drafters(target: LoadedModel) -> None:
    assert "none" in drafter_names()
    assert get_drafter(EngineConfig(), target)[0].tree == Tree()


def test_an_unknown_drafter_is_refused_with_the_names_there_are(target: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"no drafter named 'oracle' \(there are: .*none"):
        get_drafter(EngineConfig(drafter="oracle"), target)
