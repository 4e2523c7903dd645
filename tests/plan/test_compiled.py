"""The very steps of the engine, through the TPU compiler: what they take is what the plan says."""

from typing import Any

import jax
import pytest

from jaxspec.errors import ConfigError
from jaxspec.plan.compiled import Step, _mesh, compile_steps
from jaxspec.plan.held import arguments_of, drafter_of, held
from jaxspec.plan.setup import Setup, set_up

SLICES = [
    ("v5e:2x4", "int8", "int8", 32, 4096),
    ("v6e:2x4", "bfloat16", "bfloat16", 32, 8192),
    ("v5p:2x2x2", "bfloat16", "bfloat16", 64, 8192),
    ("tpu7x:2x2x1", "bfloat16", "fp8", 64, 8192),
]


def steps(**options: Any) -> tuple[Setup, list[Step]]:
    pytest.importorskip("libtpu")
    setup = set_up(**options)
    return setup, compile_steps(setup)


def check(setup: Setup, compiled: list[Step]) -> None:
    expected = arguments_of(setup)
    names = ["plain", "round", "prefill"] if setup.drafts else ["plain", "prefill"]
    for name, step in zip(names, compiled, strict=True):
        assert step.arguments == pytest.approx(expected[name], rel=0.02)
        assert step.temporaries < 0.02 * setup.slice.chip.hbm_bytes
        assert step.all_reduces == (2 if setup.share > 1 else 0)
        assert step.pool_copies == 0
    assert held(setup).total < setup.slice.usable_bytes


def test_compiled_steps_of_a_small_model() -> None:
    options = {"weights": "int8", "kv_dtype": "int8", "batch": 8, "context": 8192}
    check(*steps(model="llama-3.2-1b", topology="v5e:2x2", **options))


@pytest.mark.parametrize("drafter", ["medusa", "ngram", "draft_model:llama-3.2-1b"])
def test_drafts_are_as_wide_as_pays_on_the_slice(drafter: str) -> None:
    pytest.importorskip("libtpu")
    setup = set_up(model="llama-3.2-1b", topology="v5e:2x2", drafter=drafter, draft_tokens=7, batch=8, context=2048)
    with jax.set_mesh(_mesh(setup)):
        assert drafter_of(setup).widths == (1, 8)
    assert drafter_of(setup).widths == (1, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "weights", "kv_dtype"), [("v5e:2x2", "int8", "int8"), ("v6e:1x1", "bfloat16", "bfloat16")]
)
def test_compiled_steps_with_ngrams(topology: str, weights: str, kv_dtype: str) -> None:
    formats = {"weights": weights, "kv_dtype": kv_dtype}
    check(*steps(model="llama-3.1-8b", topology=topology, drafter="ngram", batch=16, context=4096, **formats))


@pytest.mark.slow
def test_compiled_steps_with_a_draft_model_that_every_device_has() -> None:
    drafter = {"drafter": "draft_model:llama-3.2-1b", "draft_tokens": 3, "draft_shared": False}
    check(*steps(model="llama-3.1-8b", topology="v6e:2x2", batch=32, context=8192, **drafter))


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "weights", "kv_dtype", "batch", "context"), SLICES)
def test_compiled_steps_of_70b(topology: str, weights: str, kv_dtype: str, batch: int, context: int) -> None:
    """Plain, a tree of 8 tokens, and a chunk of a prompt."""
    options = {"weights": weights, "kv_dtype": kv_dtype, "batch": batch, "context": context}
    check(*steps(model="llama-3.3-70b", topology=topology, drafter="medusa", draft_tokens=7, **options))


def test_gpus_are_not_compiled_for() -> None:
    with pytest.raises(ConfigError, match="no compiler for h100:8"):
        compile_steps(set_up("llama-3.1-8b", "h100:8", context=8192))
