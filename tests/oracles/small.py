"""Models and engines that are small: what tests of whole engines share."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.kv.formats import get_format
from jaxspec.kv.formats.int4 import grouped
from jaxspec.models.loading import LoadedModel
from jaxspec.tokenizer import Tokenizer
from tests.driver import SPEC, random_params
from tests.oracles import toy_forward

DRAFTS: dict[str, Any] = {
    "draft_model": "small",
    "draft_tokens": 3,
    "draft_adaptive": False,
    "ngram_min": 1,
    "verify": "coupled",
}
"""Options with which every drafter drafts whenever it can, a draft model as `shrink` has it."""


def transformer_of(tokenizer: Tokenizer, context: int) -> LoadedModel:
    """A transformer whose text varies with the context."""
    return LoadedModel(replace(SPEC, max_context=context), random_params().target, tokenizer, "small")


def toy_of(tokenizer: Tokenizer) -> LoadedModel:
    """The model of exact integers, for `on_integers`."""
    layers = (jnp.zeros(1),) * toy_forward.SPEC.num_layers
    return LoadedModel(toy_forward.SPEC, {"layers": layers, "norm": {"weight": jnp.ones(2)}}, tokenizer, "toy")


def on_integers(monkeypatch: pytest.MonkeyPatch, toy: LoadedModel) -> None:
    """The toy in place of the transformer."""
    monkeypatch.setattr("jaxspec.drafters.draft_model.load_model", lambda *_, **__: toy)
    for module in ("decode", "round", "drafters._model"):
        monkeypatch.setattr(f"jaxspec.{module}.forward", toy_forward.forward)
    for module in ("round", "drafters._model"):
        monkeypatch.setattr(f"jaxspec.{module}.logits_of", toy_forward.logits_of)


def shrink(
    monkeypatch: pytest.MonkeyPatch, row: int, draft: LoadedModel | None = None, group: int | None = None
) -> None:
    """Engines that are made now have rows of prompts of `row` tokens, one batch bucket, that draft model, and int4 with
    groups of so many slots."""
    monkeypatch.setattr("jaxspec.config.PREFILL_ROW", 1)
    monkeypatch.setattr("jaxspec.engine.PREFILL_ROW", row)
    monkeypatch.setattr("jaxspec.engine.BATCH_BUCKETS", ())
    if draft is not None:
        monkeypatch.setattr("jaxspec.drafters.draft_model.load_model", lambda *_, **__: draft)
    if group is not None:
        small = grouped(group)
        monkeypatch.setattr("jaxspec.sizes.get_format", lambda name: small if name == "int4" else get_format(name))
