"""Setups: what goes together, what does not, and what follows from it."""

from typing import Any

import pytest

from jaxspec.errors import ConfigError, LoadError
from jaxspec.plan.setup import set_up

MODEL, TOPOLOGY = "llama-3.1-8b", "v5e:2x4"


def test_what_follows() -> None:
    setup = set_up(MODEL, TOPOLOGY, 33, 8192, kv_dtype="int8", replicas=2, drafter="ngram", draft_tokens=3)
    assert (setup.share, setup.rows, setup.drafts, setup.prompt) == (4, 17, 3, 4096)
    assert (setup.page_size, setup.table_width, setup.mean_length) == (
        256,
        33,
        6144,
    )  # drafts begin a page of their own
    assert (setup.pool.num_pages, setup.pool.num_kv_heads) == (17 * 33, 2)
    assert setup.draft_part is None
    assert setup.draft_pool is None


def test_auto_and_defaults() -> None:
    setup = set_up(MODEL, "v6e:1x1")
    assert (setup.weights, setup.kv_dtype, setup.context, setup.drafts) == ("bfloat16", "bfloat16", 131_072, 0)
    assert set_up("llama-3.3-70b", "v6e:2x4", drafter="draft_model:llama-3.1-8b").drafts == 7


@pytest.mark.parametrize(("shared", "heads"), [(True, 1), (False, 8)])
def test_a_draft_model_is_shared_or_not(shared: bool, heads: int) -> None:
    setup = set_up("llama-3.3-70b", "v6e:2x4", drafter="draft_model:llama-3.1-8b", draft_shared=shared, context=8192)
    assert setup.draft_pool is not None
    assert (setup.draft_pool.num_kv_heads, setup.draft_pool.num_layers) == (heads, 32)
    assert setup.draft_pool.num_pages == setup.pool.num_pages  # under the same page ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v5e:2x5"}, "no topology 'v5e:2x5'"),
        ({"topology": "v5e:4x8", "model": "smollm2-135m"}, "smollm2-135m: 9 query heads.*take 1, 3"),
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"context": 1}, "context must be 2 or more"),
        ({"context": 200_000}, "context 200000 is more than the 131072 tokens llama-3.1-8b was trained for"),
        ({"context": 100, "prompt": 100}, "prompt must be 1 to context - 1 tokens, not 100"),
        ({"weights": "int3"}, "no weights named 'int3' .there are: auto, float32, bfloat16, .*int8"),
        ({"kv_dtype": "int3"}, "no kv_dtype named 'int3'"),
        ({"replicas": 3}, "data_parallel must divide the 8 devices of v5e:2x4, not be 3"),
        ({"replicas": 0}, "data_parallel must divide"),
        ({"drafter": "eagle"}, "'eagle' is no drafter .there are: none, ngram, medusa, draft_model"),
        ({"drafter": "layer_skip"}, "'layer_skip' has no plan yet"),
        ({"drafter": "draft_model"}, "named behind a colon: draft_model:llama-3.1-8b"),
        ({"drafter": "ngram:llama-3.1-8b"}, "no other drafter, is named behind a colon"),
        ({"drafter": "none:"}, "named behind a colon"),
        ({"drafter": "draft_model:llama-2-7b"}, "llama-2-7b has a vocabulary of 32000 and llama-3.1-8b one of 128256"),
        ({"drafter": "draft_model:deepseek-v3"}, "deepseek-v3 cannot be run yet"),
        ({"drafter": "ngram", "draft_tokens": 64}, "draft_tokens must be 1 to 63, not 64"),
        ({"drafter": "ngram", "medusa_heads": "heads"}, "medusa_heads is for the drafter medusa, not for ngram"),
        ({"prefill_chunk": 100}, "prefill_chunk must be a multiple of 64, not 100"),
        ({"model": "deepseek-v3"}, "deepseek-v3 cannot be run yet: jaxspec plan kv counts its cache"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_up(**{"model": MODEL, "topology": TOPOLOGY} | options)


def test_a_draft_that_was_trained_for_less() -> None:
    with pytest.raises(ConfigError, match=r"tinyllama-1.1b was trained for 2048 tokens: set context to that"):
        set_up("llama-2-7b", TOPOLOGY, drafter="draft_model:tinyllama-1.1b")


def test_models_that_are_not_there() -> None:
    with pytest.raises(LoadError, match="llama-9"):
        set_up("llama-9", TOPOLOGY)
    with pytest.raises(LoadError, match="llama-9"):
        set_up(MODEL, TOPOLOGY, drafter="draft_model:llama-9")


def test_changes_are_checked() -> None:
    setup = set_up(MODEL, TOPOLOGY, context=4096)
    assert setup.changed(batch=9).pool.num_pages == 9 * setup.pool.num_pages
    assert setup.changed(weights="int8").target.layer_bytes < 0.51 * setup.target.layer_bytes
    with pytest.raises(ConfigError, match="batch must be 1"):
        setup.changed(batch=0)
