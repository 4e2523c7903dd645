"""What fits is the most that fits, and every remedy is one."""

from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.plan.fit import fits, largest_batch, longest_context, remedies, smallest_slice
from jaxspec.plan.setup import Setup, set_up
from jaxspec.plan.slices import slice_of


def setup(**options: Any) -> Setup:
    given: dict[str, Any] = {"model": "llama-3.3-70b", "topology": "v5e:2x4", "batch": 32, "context": 8192}
    return set_up(**given | options)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int8"},
        {"weights": "int8", "kv_dtype": "int8", "drafter": "ngram"},
        {"weights": "int4", "kv_dtype": "int4", "topology": "v5e:4x4", "replicas": 2},
        {"topology": "h200:4", "drafter": "draft_model:llama-3.1-8b"},
    ],
)
def test_one_more_does_not_fit(options: dict[str, Any]) -> None:
    plan = setup(**options)
    batch, context = largest_batch(plan), longest_context(plan)
    assert batch % plan.replicas == 0
    assert fits(plan.changed(batch=batch))
    assert not fits(plan.changed(batch=batch + plan.replicas))
    assert context >= 2
    assert fits(plan.changed(context=context, prompt=1))
    if context < plan.shape.spec.max_context:
        assert not fits(plan.changed(context=context + 1, prompt=1))


def test_a_short_context_may_be_the_model_s_own() -> None:
    plan = setup(model="llama-3.2-1b", topology="v6e:1x1", batch=1, weights="int8")
    assert longest_context(plan) == 131_072


def test_a_larger_batch_takes_more() -> None:
    fitting = [fits(setup(weights="int8", kv_dtype="int8", batch=batch)) for batch in range(1, 100, 7)]
    assert fitting == sorted(fitting, reverse=True)
    assert {True, False} == set(fitting)


def test_the_smallest_slice() -> None:
    assert smallest_slice(setup(weights="int8", kv_dtype="int8", topology="v5e:4x4")).topology == "v5e:2x4"
    assert smallest_slice(setup(weights="int8", kv_dtype="int8", batch=64)).topology == "v5e:4x4"
    assert smallest_slice(setup(topology="h100:8", weights="fp8", kv_dtype="fp8", batch=1)).topology == "h100:2"
    assert smallest_slice(setup(topology="v5p:2x2x4", batch=8)).topology == "v5p:2x2x1"


def test_a_slice_that_the_heads_cannot_share_is_none() -> None:
    """SmolLM2's 9 heads: one device of v5e, not two."""
    assert smallest_slice(setup(model="smollm2-135m", topology="v5e:1x1", batch=1)).topology == "v5e:1x1"
    with pytest.raises(ConfigError, match="no slice up to v5e:16x16 holds 1000 sequences of 8192 tokens"):
        smallest_slice(setup(model="smollm2-135m", topology="v5e:1x1", batch=1000))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "int8"},
        {"weights": "int8", "batch": 100},
        {"batch": 60, "drafter": "ngram"},
        {"model": "llama-3.1-8b", "topology": "v6e:1x1", "batch": 64},
    ],
)
def test_every_remedy_is_one(options: dict[str, Any]) -> None:
    plan = setup(**options)
    assert not fits(plan)
    found = remedies(plan)
    assert found
    for change in found:
        changed = {name: slice_of(value) if name == "topology" else value for name, value in change.items()}
        if "topology" in changed:
            changed["slice"] = changed.pop("topology")
        if "context" in changed:
            changed["prompt"] = 1
        assert fits(plan.changed(**changed))


def test_the_70b_in_bfloat16_on_eight_v5e() -> None:
    """141 GB of weights on 8 x 15.75 GiB: no batch and no context would do."""
    plan = setup(batch=1, context=128)
    assert largest_batch(plan) == longest_context(plan) == 0
    changes = remedies(plan)
    assert [set(change) for change in changes] == [{"weights"}, {"topology"}]
    assert changes[1] == {"topology": "v5e:4x4"}


def test_where_it_fits_nothing_is_to_change() -> None:
    assert remedies(setup(weights="int8", kv_dtype="int8", batch=1)) == []
