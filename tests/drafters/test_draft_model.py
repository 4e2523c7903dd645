"""Draft models that cannot follow their target are refused, and one that is the target itself is always right."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.drafters import _pace, get_drafter
from jaxspec.drafters._model import model_drafter
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.loading import load_model
from jaxspec.models.transformer import forward, logits_of
from jaxspec.types import Models, Sequences
from pallas_kernels import Rows
from tests.driver import SPEC, Job, decode_all, make_program, random_params
from tests.oracles import numpy_sampler as oracle
from tests.test_decode import MIX

COUPLED = EngineConfig(draft_tokens=4, draft_adaptive=False, verify="coupled")


@pytest.fixture(scope="module")
def target(tiny_model):
    return load_model(str(tiny_model), progress=False)


def build(target, **options):
    return get_drafter(EngineConfig(drafter="draft_model", **options), target)


def test_it_must_be_named(target):
    with pytest.raises(ConfigError, match="needs draft_model"):
        build(target)


def test_missing_weights_are_one_clear_error(target, tmp_path):
    with pytest.raises(LoadError, match="no such file"):
        build(target, draft_model=str(tmp_path / "nowhere"))


def test_another_vocabulary_is_refused(target, tiny_model, monkeypatch):
    other = dict(target.tokenizer.vocabulary) | {"stranger": 461}
    monkeypatch.setattr(
        type(target.tokenizer), "vocabulary", property(lambda self: other if self is target.tokenizer else {})
    )
    with pytest.raises(ConfigError, match="another vocabulary"):
        build(target, draft_model=str(tiny_model))


def test_a_shorter_context_is_refused_unless_it_is_not_used(target, tiny_model):
    long = target._replace(spec=dataclasses.replace(target.spec, max_context=512))
    with pytest.raises(ConfigError, match="trained for 256 tokens, fewer than the context of 512"):
        build(long, draft_model=str(tiny_model))
    build(long, draft_model=str(tiny_model), max_context=256)


@pytest.mark.parametrize(
    "prompt", [[4], *(pytest.param(more, marks=pytest.mark.slow) for more in ([4, 5], [4, 5, 6, 7]))]
)
def test_the_target_as_its_own_draft_is_always_right(prompt):
    params = random_params()
    job = MIX[1]._replace(prompt=prompt)
    drafter = model_drafter(SPEC, SPEC, COUPLED)
    got = decode_all(Models(params.target, params.target), make_program(drafter, pages=160), {2: job})[2]
    assert got.tokens == decode_all(params, make_program(pages=160), {2: job})[2].tokens
    # 20 tokens, five a round: nothing was rejected.
    assert got.steps == 4


def disturbed(params, amount: float = 0.05):
    """The target's weights with some noise: a draft that is mostly right."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: a * (1 + amount * rng.standard_normal(a.shape, np.float32)), params.target)


@pytest.mark.parametrize("temperature", [None, pytest.param(0.4, marks=pytest.mark.slow)])
def test_law_2_rejection_in_the_loop_follows_the_target(temperature):
    """Texts of three tokens, from drafts that cross rounds, against the probabilities of plain forwards."""
    params = random_params()
    config = EngineConfig(draft_tokens=2, draft_adaptive=False, draft_temperature=temperature)
    program = make_program(model_drafter(SPEC, SPEC, config), pages=LAW_ROWS * 13)
    drafted, accepted = follow_the_target(program, Models(params.target, disturbed(params)), length=3, calls=30)
    assert 0.3 * drafted < accepted < drafted


LAW_ROWS, LAW_PROMPT, LAW_KEPT = 64, [4, 5, 6], 3
"""Of law 2 in the loop: rows of a batch, with one prompt, that draw from their likeliest tokens; the last is greedy."""


def hot(length: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=LAW_KEPT, max_tokens=length, ignore_eos=True)


def follow_the_target(program, models: Models, length: int, calls: int) -> tuple[int, int]:
    """Texts of `length` tokens have the probabilities of plain forwards; returns the drafts, and those accepted."""
    jobs = {row: Job(LAW_PROMPT, hot(length), seed=row) for row in range(LAW_ROWS - 1)}
    jobs[LAW_ROWS - 1] = Job(LAW_PROMPT, SamplingParams(max_tokens=length, ignore_eos=True))
    plain = Models(models.target, {})
    chances = text_chances(plain, LAW_PROMPT, hot(length), length)
    likeliest = greedy_text(plain, LAW_PROMPT, length)
    texts = {text: index for index, text in enumerate(chances)}
    found, drafted, accepted = [], 0, 0
    for call in range(calls):
        results = decode_all(models, program, jobs, batch=LAW_ROWS, edit=partial(reseeded, call))
        assert tuple(results.pop(LAW_ROWS - 1).tokens) == likeliest
        found += [texts[tuple(result.tokens)] for result in results.values()]
        drafted += sum(result.drafted for result in results.values())
        accepted += sum(result.accepted for result in results.values())
    assert oracle.p_value(np.array(found), np.array(list(chances.values()))) > 1e-6
    return drafted, accepted


def reseeded(call: int, state):
    seed = state.sampling.seed.at[:, 1].set(call)
    return state._replace(sampling=state.sampling._replace(seed=seed))


def next_logits(params, texts):
    """Logits `[texts, V]` after each text, all of one length, from plain forwards."""
    length = len(texts[0])
    tokens = np.zeros((-(-len(texts) // LAW_ROWS) * LAW_ROWS, 8), np.int32)
    tokens[: len(texts), :length] = texts
    return np.asarray(_all_logits(params.target, tokens)[: len(texts), length - 1])


@jax.jit
def _all_logits(target, tokens):
    batch, width = tokens.shape
    program = make_program(pages=batch * 13)
    table, zeros = jnp.arange(batch * 13).reshape(1, batch, 13), jnp.zeros(batch, jnp.int32)
    rows = Rows(jnp.arange(batch), zeros, zeros + width)
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    sequences = Sequences(table, zeros[None], zeros[None], zeros)
    pool = program.pool.allocate(batch)
    hidden, _ = forward(target, SPEC, program.pool, rows, tokens, positions, None, pool, sequences)
    return logits_of(target, SPEC, hidden)


def text_chances(params, prompt, sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Every text of so many tokens that can be drawn, and its probability."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        logits = next_logits(params, [[*prompt, *text] for text in chances])
        ahead = [oracle.probabilities(row, sampling) for row in logits]
        chances = {
            (*text, int(token)): chance * p[token]
            for (text, chance), p in zip(chances.items(), ahead, strict=True)
            for token in np.flatnonzero(p)
        }
    return chances


def greedy_text(params, prompt, length: int) -> tuple[int, ...]:
    return next(iter(text_chances(params, prompt, SamplingParams(), length)))


@pytest.mark.slow
def test_a_hotter_draft_is_rejected_more():
    params = random_params()
    jobs = {
        row: Job([4, 5, 6], SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True), row) for row in range(4)
    }
    accepted = []
    for temperature in (None, 3.0):
        config = EngineConfig(draft_tokens=4, draft_adaptive=False, draft_temperature=temperature)
        program = make_program(model_drafter(SPEC, SPEC, config), pages=160)
        results = decode_all(Models(params.target, params.target), program, jobs).values()
        accepted.append(sum(r.accepted for r in results) / sum(r.drafted for r in results))
    assert accepted[0] == 1.0
    assert accepted[1] < 0.8


def test_rounds_without_drafts_leave_no_gap_in_its_cache(monkeypatch):
    """The target as its own draft is right again after any silence, at once."""
    monkeypatch.setattr(_pace, "learn", lambda pace, drafted, accepted: _pace.Pace(pace.hits + 1, pace.trials))
    monkeypatch.setattr(_pace, "best_length", lambda pace, *_: jnp.where(pace.hits % 21 < 19, 0, 3).astype(jnp.int32))
    params = random_params()
    jobs = {
        row: Job(prompt, SamplingParams(max_tokens=30, ignore_eos=True)) for row, prompt in enumerate([[4], [5, 6]])
    }
    config = EngineConfig(draft_tokens=3, verify="coupled")
    program = make_program(model_drafter(SPEC, SPEC, config), pages=160)
    got = decode_all(Models(params.target, params.target), program, jobs)
    for row, plain in decode_all(params, make_program(pages=160), jobs).items():
        assert got[row].tokens == plain.tokens
        assert got[row].drafted == got[row].accepted == 6


@pytest.mark.slow
def test_layer_skip_runs_in_the_engine(tiny_model):
    plain = LLM(str(tiny_model), max_batch=1)
    skipping = LLM(str(tiny_model), max_batch=1, drafter="layer_skip", draft_layers=1, verify="coupled")
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.8, seed=3)):
        expected, got = (llm.generate("she sells sea shells", params)[0] for llm in (plain, skipping))
        assert got.token_ids == expected.token_ids
    with pytest.raises(ConfigError, match="draft_layers must be below the model's 2 layers"):
        LLM(str(tiny_model), drafter="layer_skip", draft_layers=2)
