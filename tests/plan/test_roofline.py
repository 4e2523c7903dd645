"""Step times: by hand for a small model, and the published table."""

from typing import Any

import pytest

from jaxspec.models.families import llama
from jaxspec.plan import setup as setups
from jaxspec.plan.roofline import (
    EFFICIENCY,
    SAMPLING_SUMS,
    Cost,
    Work,
    draft_cost,
    prefill_costs,
    verify_cost,
    verify_work,
)
from jaxspec.plan.setup import Setup, set_up
from jaxspec.plan.shape import Shape

E, F, L, H, K, D, V = 256, 512, 3, 8, 4, 32, 1024
CONFIG: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
}
PUBLISHED = {
    1: {8: 159, 16: 135, 32: 108, 64: 68.7, 128: 39.3},
    2: {8: 84.4, 16: 80.2, 32: 74.5, 64: 58.4, 128: 50.2},
}
"""Tokens a second of each sequence by replicas and batch, context 2,048: Llama 3.1 70B on v5e-16 in int8
(github.com/jax-ml/jax-llm-examples, llama3/README.md)."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = llama.spec(CONFIG, V)
    shape = Shape("tiny", spec, llama.parameters(spec), family=llama)
    monkeypatch.setattr(setups, "read_shape", lambda model: shape)


def published(batch: int, replicas: int = 1) -> Setup:
    return set_up("llama-3.1-70b", "v5e:4x4", batch, 2048, weights="int8", kv_dtype="int8", replicas=replicas)


def per_second(batch: int, replicas: int, length: float) -> float:
    setup = published(batch, replicas)
    return 1 / verify_cost(setup, 0, setup.rows, length, EFFICIENCY).seconds


def implied(batch: int, length: float) -> float:
    """The efficiency with which the published figure would be met."""
    setup = published(batch)
    cost = verify_cost(setup, 0, setup.rows, length, 1.0)
    return cost.hbm / (1 / PUBLISHED[1][batch] - cost.mxu - cost.ici)


@pytest.mark.parametrize(("replicas", "batch"), [(r, b) for r, table in PUBLISHED.items() for b in table])
def test_the_published_table_with_half_full_caches(replicas: int, batch: int) -> None:
    error = per_second(batch, replicas, 1024) / PUBLISHED[replicas][batch] - 1
    assert abs(error) < (0.19 if (replicas, batch) == (1, 128) else 0.09)


def test_what_the_published_points_imply() -> None:
    """The figures that every report tells."""
    assert [round(per_second(batch, 1, 1024)) for batch in (8, 32)] == [150, 104]
    assert [round(implied(batch, 0.001), 2) for batch in (8, 32)] == [0.98, 0.87]
    assert [round(implied(batch, 1024), 2) for batch in (8, 32)] == [1.02, 1.01]


@pytest.mark.usefixtures("tiny")
def test_work_by_hand() -> None:
    """Two devices, 3 sequences of 100 tokens, 2 drafts each."""
    setup = set_up("tiny", "h100:2", 3, 200, drafter="ngram")
    work, tokens = verify_work(setup, 2, 3, 100), 3 * 3
    matrices = L * ((H + 2 * K) * D * E + H * D * E + 3 * F * E) / 2
    norms = (2 * L + 1) * E
    token = L * 2 * K * D * 2 / 2  # bytes of a cached token on a device
    assert work.read == 2 * (matrices + norms) + (3 * 100 + tokens) * token + V * E / 2 * 2 + 2 * tokens * V / 2 * 4
    assert work.products == tokens * (matrices + V * E / 2 + 2 * L * H * D / 2 * 100)
    assert work.summed == (2 * L + 1) * tokens * E * 2
    assert work.sums == 2 * L + 1 + SAMPLING_SUMS


@pytest.mark.usefixtures("tiny")
def test_a_draft_model_runs_two_tokens_for_each_draft() -> None:
    setup = set_up("tiny", "h100:1", 2, 200, drafter="draft_model:tiny")
    one, three = (draft_cost(setup, n, 2, 100, 1.0) for n in (1, 3))
    assert three == one.times(3)
    plain = verify_work(setup, 0, 2, 100)  # one token each, of the same model
    token = L * 2 * K * D * 2
    assert one.hbm == pytest.approx((plain.read + 2 * token) / 3.35e12)


@pytest.mark.usefixtures("tiny")
def test_a_replicated_draft_model_sums_up_embeddings_only() -> None:
    options: dict[str, Any] = {"batch": 2, "context": 200, "drafter": "draft_model:tiny"}
    shared, whole = (set_up("tiny", "h100:2", **options, draft_shared=shared) for shared in (True, False))
    layers = shared.draft_part.local.num_layers
    sums = [draft_cost(setup, 1, 2, 100, 1.0).ici for setup in (shared, whole)]
    assert sums[0] == pytest.approx((2 * layers + 1) * sums[1])
    assert draft_cost(shared, 1, 2, 100, 1.0).hbm < draft_cost(whole, 1, 2, 100, 1.0).hbm


@pytest.mark.usefixtures("tiny")
def test_chunks_read_the_cache_once_for_each_row() -> None:
    setup = set_up("tiny", "h100:1", 1, 2000, 1024, prefill_chunk=256)
    (cost,) = prefill_costs(setup, 1.0)
    layers, token = setup.target.layer_bytes, L * 2 * K * D * 2
    assert cost.hbm == pytest.approx((layers + (4 * 512 + 256) * token) / 3.35e12)
    assert len(prefill_costs(set_up("tiny", "h100:1", context=200, drafter="draft_model:tiny"), 1.0)) == 2


def test_heads_are_as_many_as_the_tree_is_deep() -> None:
    setup = set_up("smollm2-135m", "h100:1", context=512, drafter="medusa")
    embed, inner, vocab = 576, 768, 8192
    cost = draft_cost(setup, 2, 1, 100, 1.0)  # nodes (0) and (0, 0): two heads
    blocks = inner * embed * (2 + 1) + inner * embed * (3 + 1)
    assert cost.hbm == pytest.approx(((blocks + 2 * vocab * embed) * 2 + 2 * 2 * vocab * 4) / 3.35e12)


def test_seconds_add_up_but_for_the_hops() -> None:
    assert Cost(4.0, 2.0, 1.0, 3.0).seconds == 7
    assert Cost(4.0, 2.0, 1.0, 5.0).seconds == 8
    assert Work(1, 2, 3, 4).plus(Work(1, 1, 1, 1)) == (2, 3, 4, 5)


def test_int8_weights_are_multiplied_in_bfloat16() -> None:
    wide, narrow = (set_up("llama-3.1-8b", "v5e:2x2", 8, 4096, weights=w) for w in ("bfloat16", "int8"))
    costs = [verify_cost(setup, 0, 8, 1000, 1.0) for setup in (wide, narrow)]
    assert costs[0].mxu == costs[1].mxu
    assert costs[1].hbm < 0.6 * costs[0].hbm


def test_memory_is_slower_where_it_gives_less() -> None:
    setup = published(8)
    full, less = (verify_cost(setup, 0, 8, 1024, efficiency) for efficiency in (1.0, 0.5))
    assert (less.hbm, less.mxu, less.ici) == (2 * full.hbm, full.mxu, full.ici)
