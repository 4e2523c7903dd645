"""Draft models that cannot follow their target are refused, and one that is the target itself is always right."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.drafters import get_drafter
from jaxspec.drafters._model import model_drafter
from jaxspec.errors import ConfigError, LoadError
from jaxspec.models.loading import load_model
from jaxspec.types import Models
from tests.driver import SPEC, decode_all, make_program, random_params
from tests.test_decode import MIX


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


@pytest.mark.parametrize("prompt", [[4], [4, 5], [4, 5, 6, 7]])
def test_the_target_as_its_own_draft_is_always_right(prompt):
    params = random_params()
    job = MIX[1]._replace(prompt=prompt)
    drafter = model_drafter(SPEC, SPEC, 4, adaptive=False)
    got = decode_all(Models(params.target, params.target), make_program(drafter, pages=160), {2: job})[2]
    assert got.tokens == decode_all(params, make_program(pages=160), {2: job})[2].tokens
    # 20 tokens, five a round: nothing was rejected.
    assert got.steps == 4


def test_a_padded_vocabulary_of_another_length_changes_nothing():
    params = random_params()
    padded = dataclasses.replace(SPEC, vocab_size=80)
    draft = jax.tree.map(lambda a: a, params.target)
    for name in ("embed", "lm_head"):
        draft[name] = {"weight": np.pad(params.target[name]["weight"], ((0, 16), (0, 0)), constant_values=9.0)}
    drafter = model_drafter(padded, SPEC, 4, adaptive=False)
    got = decode_all(Models(params.target, draft), make_program(drafter, pages=160), {2: MIX[1]})[2]
    assert got.steps == 4


def test_layer_skip_runs_in_the_engine(tiny_model):
    plain = LLM(str(tiny_model), max_batch=1)
    skipping = LLM(str(tiny_model), max_batch=1, drafter="layer_skip", draft_layers=1)
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.8, seed=3)):
        expected, got = (llm.generate("she sells sea shells", params)[0] for llm in (plain, skipping))
        assert got.token_ids == expected.token_ids
    with pytest.raises(ConfigError, match="draft_layers must be below the model's 2 layers"):
        LLM(str(tiny_model), drafter="layer_skip", draft_layers=2)
