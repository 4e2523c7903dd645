"""Memory plans: the mission's examples, and what fits is the most that fits."""

import random
from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.families import llama
from jaxspec.plan.memory import MemoryPlan, plan_memory
from jaxspec.plan.shape import Shape, read_shape

CONTEXT = 4096
SPEC = llama.spec(
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
    },
    96,
)
TINY = Shape("tiny", SPEC, llama.parameters(SPEC))


def tiny_plan(**changes: Any) -> MemoryPlan:
    return plan_memory(TINY, **{"context": 1000, "batch": 7, "page_size": 64} | changes)


@pytest.mark.parametrize(("context", "batch", "gigabytes"), [(8192, 32, 85.9), (128_000, 1, 41.9)])
def test_llama_70b_in_bfloat16(context: int, batch: int, gigabytes: float) -> None:
    plan = plan_memory(read_shape("llama-3.3-70b"), context, batch, "bfloat16")
    assert plan.cache.token_bytes == 327_680
    assert plan.kv_bytes("bfloat16") == 327_680 * context * batch
    assert round(plan.kv_bytes("bfloat16") / 1e9, 1) == gigabytes


def test_deepseek_v3_by_its_cache_alone() -> None:
    plan = plan_memory(read_shape("deepseek-v3"), 128_000, 2)
    assert plan.total_bytes == plan.kv_bytes("bfloat16") == 70_272 * 256_000
    assert plan.room(2**40).max_batch == 2**40 // (70_272 * 128_000)
    assert plan.remedies(2**30) == [{"context": 7552}]


def test_auto_is_what_accelerators_have() -> None:
    plan = tiny_plan(page_size=None, context=None)
    assert (plan.kv_dtype, plan.weights, plan.cache.page_size, plan.context) == ("bfloat16", "bfloat16", 128, CONTEXT)
    pages = {name: cache.page_size for name, cache in plan.caches.items()}
    assert pages == {"float32": 128, "bfloat16": 128, "int8": 256, "fp8": 256, "int4": 128}


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_what_fits_is_the_most_that_fits(kv_dtype: str) -> None:
    """Against plans of one more: a memory at random, and the very bytes of a plan."""
    rng = random.Random(kv_dtype)
    weights = tiny_plan().weight_bytes["int8"]
    for _ in range(25):
        options: dict[str, Any] = {"context": rng.randint(1, CONTEXT), "batch": rng.randint(1, 20)}
        options |= {"kv_dtype": kv_dtype, "weights": "int8", "page_size": 64 * rng.randint(1, 3)}
        plan = tiny_plan(**options)
        memory = rng.choice([plan.total_bytes, plan.total_bytes - 1, weights + rng.randint(-99, 10**8)])
        room, fits = plan.room(memory), plan.total_bytes <= memory
        assert fits == (room.max_batch >= plan.batch) == (room.max_context >= plan.context)
        for option, most, limit in (("batch", room.max_batch, 10**9), ("context", room.max_context, CONTEXT)):
            assert most <= limit
            if most:
                assert tiny_plan(**options | {option: most}).total_bytes <= memory
            if most < limit:
                assert tiny_plan(**options | {option: most + 1}).total_bytes > memory
        if memory > weights:
            pages = (memory - weights - plan.batch * plan.cache.tail_bytes) // plan.cache.page_bytes
            assert room.max_tokens == max(pages, 0) * plan.cache.page_size


def test_every_remedy_is_one() -> None:
    given = {"kv_dtype": "float32", "weights": "float32", "batch": 2}
    plan = tiny_plan(**given)
    least = tiny_plan(kv_dtype="int4", weights="int4_symmetric", batch=2, context=1).total_bytes
    sizes = {plan.kv_bytes(k) + w for k in plan.caches for w in plan.weight_bytes.values()}
    seen = set()
    edges = {size + more for size in sizes | {least} for more in (-1, 0)}
    for memory in sorted(edges | set(range(least, min(sizes), 10**5))):
        remedies = plan.remedies(memory)
        assert bool(remedies) == (least <= memory < plan.total_bytes)
        for change in remedies:
            assert tiny_plan(**given | change).total_bytes <= memory
            seen.add(tuple(change))
        if min(sizes) <= memory < plan.total_bytes:
            assert any({"batch", "context"}.isdisjoint(change) for change in remedies)
    both = ("kv_dtype", "weights")
    assert seen == {("batch",), ("context",), *((one,) for one in both), both, (*both, "batch"), (*both, "context")}


def test_the_largest_format_that_fits_is_told() -> None:
    plan = tiny_plan(kv_dtype="float32")
    memory = plan.kv_bytes("bfloat16") + plan.weight_bytes["bfloat16"]
    assert {"kv_dtype": "bfloat16"} in plan.remedies(memory)
    assert {"kv_dtype": "bfloat16"} not in plan.remedies(memory - 1)
    assert {"kv_dtype": "int8"} in plan.remedies(memory - 1)


def test_what_is_chosen_already_is_no_remedy() -> None:
    plan = plan_memory(read_shape("deepseek-v3"), 128_000, page_size=128)
    assert plan.remedies(6 * 10**6) == [{"kv_dtype": "int8", "context": 128}]
    plan = plan_memory(read_shape("deepseek-v3"), 128_000, 4, "int8")
    assert plan.remedies(plan.total_bytes // 2) == [{"batch": 2}, {"context": 64_000}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int3"}, "no kv_dtype named 'int3' .there are: auto, float32, bfloat16, .*int4"),
        ({"weights": "q4"}, "no weights named 'q4' .there are: auto, float32, bfloat16, .*int4"),
        ({"kv_dtype": "int4", "page_size": 16}, "kv_dtype int4 needs pages of a multiple of 64"),
        ({"context": CONTEXT + 1}, "context 4097 is more than the 4096 tokens tiny was trained for"),
        ({"context": 0}, "context must be 1 or more, not 0"),
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"page_size": -1}, "page_size must be 1 or more, not -1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_plan(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype int4 .*latent attention"),
        ({"weights": "int8"}, "weights int8: only the cache of deepseek-v3 is counted"),
    ],
)
def test_what_latent_attention_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(read_shape("deepseek-v3"), **options)
