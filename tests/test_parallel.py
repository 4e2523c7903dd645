"""Laws 1 and 3b where several devices share a model: what they say together is what one says alone."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, parallel
from jaxspec.config import EngineConfig
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.host.request import CompletionOutput
from jaxspec.models.loading import load_model
from tests.driver import write_heads
from tests.oracles.serving import until_a_near_tie
from tests.tiny import write_model

PROMPTS = [
    "the sea is wide and the sky is blue " * 8,
    "she sells sea shells",
    "shells by the shore by the shore by the",
    "a",
]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 12},
    {"temperature": 0.7, "frequency_penalty": 0.4, "logit_bias": {3: -5.0, 300: 4.0}},
]
PARAMS = [SamplingParams(max_tokens=24, seed=i, logprobs=4, ignore_eos=i != 2, **kind) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Eight heads, two of keys and values: they are repeated for more than two devices."""
    return write_model(tmp_path_factory.mktemp("eight-heads"), heads=8, kv_heads=2)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[CompletionOutput]]:
    """What one device says, by the formats of cache and weights."""
    return {}


def said(llm: LLM) -> list[CompletionOutput]:
    return [output for request in llm.generate(PROMPTS, PARAMS, progress=False) for output in request.outputs]


def check(found: list[CompletionOutput], expected: list[CompletionOutput], exact: bool = True) -> None:
    """Up to the first near tie. Where numbers are stored in few bits, another order of sums may round one to its
    neighbour, and a text may be another from there on."""
    compared, atol = 0, 1e-4 if exact else 3e-2
    for ours, theirs in zip(found, expected, strict=True):
        same = until_a_near_tie(theirs)
        if not exact:
            differ = np.array(ours.token_ids) != np.array(theirs.token_ids)
            same = min(same, int(np.argmax(differ)) if differ.any() else same)
        compared += same
        assert ours.token_ids[:same] == theirs.token_ids[:same]
        for mine, other in zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True):
            for token in mine.top.keys() & other.top.keys():
                assert abs(mine.top[token] - other.top[token]) <= atol
            assert not exact or mine.top.keys() == other.top.keys()
            assert abs(mine.logprob - other.logprob) <= atol
    assert compared > (0.75 if exact else 0.5) * sum(len(output.token_ids) for output in expected)


FEW = [
    (2, "draft_model", "float32", {"draft_tokens": 3}),
    (8, "layer_skip", "int8", {"draft_layers": 1}),
    (4, "medusa", "float32", {"draft_tokens": 9}),
    (2, "none", "fp8", {"weights": "int8"}),
]
REST = [
    (2, "ngram_medusa", "int4", {"draft_tokens": 6, "page_size": 64}),
    (2, "none", "float32", {}),
    (8, "none", "float32", {}),
    (4, "ngram", "int8", {}),
    (4, "draft_model", "float32", {"draft_tokens": 3, "draft_parallel": "replicated"}),
    (2, "none", "bfloat16", {"weights": "int4"}),
    (2, "none", "float32", {"kv_policy": "h2o", "kv_heavy": 15, "kv_window": 20}),
]


@pytest.mark.parametrize(
    ("devices", "drafter", "kv_dtype", "options"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_laws_1_and_3b(unoptimised, model: Path, alone, tmp_path: Path, devices: int, drafter: str, kv_dtype, options):
    """Drafts change nothing, nor do prompts that are found in the cache, nor the devices."""
    options = {"kv_dtype": kv_dtype, "max_batch": 4, "page_size": 16, "prefill_chunk": 64, **options}
    case = f"{kv_dtype} {options.get('weights')} {options.get('kv_policy')}"
    if case not in alone:
        plain = {name: option for name, option in options.items() if not name.startswith("draft")}
        alone[case] = said(LLM(str(model), **plain))
    if drafter == "draft_model":
        options["draft_model"] = str(model)
    if "medusa" in drafter:
        tokens = range(3, 293) if drafter == "medusa" else None
        spec = load_model(str(model), progress=False).spec
        options["medusa_heads"] = str(write_heads(tmp_path / "heads", spec, conditioned=16, tokens=tokens))
    verify = "auto" if drafter in ("none", "ngram", "ngram_medusa") else "coupled"
    llm = LLM(str(model), drafter=drafter, verify=verify, draft_adaptive=False, tensor_parallel=devices, **options)
    for _ in range(2):
        check(said(llm), alone[case], exact=kv_dtype == "float32")
    assert llm.metrics()["hit_tokens"] > 0 or "kv_policy" in options  # then all of these prompts must be computed
    engine = llm.engine
    assert isinstance(engine, Engine)
    shapes = engine.program.pool.shapes()
    for name, array in engine.device.state.pool.items():
        if name in shapes:
            assert array.addressable_shards[0].data.shape == shapes[name].shape
            assert len(array.sharding.device_set) == devices


@pytest.mark.parametrize("drafter", ["draft_model", pytest.param("medusa", marks=pytest.mark.slow)])
def test_rejection_is_that_of_one_device(unoptimised, model: Path, tmp_path: Path, drafter: str):
    """The same drafts are drawn and judged: the same texts come, in as many rounds."""
    options: dict[str, Any] = {"drafter": drafter, "verify": "rejection", "draft_tokens": 4, "max_batch": 4}
    options["draft_adaptive"] = False
    if drafter == "draft_model":
        options |= {"draft_model": str(model), "draft_temperature": 1.3}
    else:
        spec = load_model(str(model), progress=False).spec
        options["medusa_heads"] = str(write_heads(tmp_path / "heads", spec, own_output=True))
    one, four = (said(LLM(str(model), tensor_parallel=devices, **options)) for devices in (1, 4))
    check(four, one)
    assert [output.stats.accepted for output in four] == [output.stats.accepted for output in one]
    assert sum(output.stats.accepted for output in one) > 0


@pytest.mark.slow
def test_replicas_share_the_work_of_a_mesh_of_two_by_four(unoptimised, model: Path):
    """Each of two replicas is on four devices of its own, which have the weights already."""
    llm = LLM(str(model), tensor_parallel=4, data_parallel=2, max_batch=2)
    check(said(llm), said(LLM(str(model), max_batch=2)))
    devices = [{d.id for d in engine.device.state.progress.token.sharding.device_set} for engine in llm.engine.engines]
    assert devices == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    counts = [engine.metrics.as_dict()["requests"] for engine in llm.engine.engines]
    assert min(counts) > 0
    assert llm.metrics()["requests"] == sum(counts) == len(PROMPTS)
    assert llm.metrics()["tokens"] == sum(engine.metrics.tokens for engine in llm.engine.engines)


def test_meshes():
    assert parallel.mesh_of(1) is None
    mesh = parallel.mesh_of(2, 4)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert [dict(one.shape) for one in parallel.meshes_of(mesh)] == [{"data": 1, "model": 2}] * 4
    with pytest.raises(ConfigError, match=r"needs 16 devices, there are 8; on a CPU set JAX_NUM_CPU_DEVICES=16"):
        parallel.mesh_of(16)


def test_heads_that_cannot_be_divided_are_refused(tiny_model: Path):
    with pytest.raises(ConfigError, match=r"4 query heads, 2 key/value heads .* shared by 8 devices: take 1, 2, 4"):
        LLM(str(tiny_model), tensor_parallel=8)


@pytest.mark.parametrize("weights", ["int4", *(pytest.param(w, marks=pytest.mark.slow) for w in ("int8", "fp8_block"))])
def test_packed_weights_are_shared_as_they_are(unoptimised, tmp_path: Path, weights: str):
    """Accelerators multiply with the narrow numbers: each device with those of its slice."""
    folder = write_model(tmp_path / "wide", heads=4, kv_heads=2, embed=256, mlp=256)
    one, two = (load_model(str(folder), weights, progress=False, packed=True, mesh=parallel.mesh_of(n)) for n in (1, 2))
    assert len(jax.tree.leaves(one.params)) == len(jax.tree.leaves(two.params))
    results = []
    for loaded in (one, two):
        engine = Engine(loaded, EngineConfig(max_batch=4))
        for index, prompt in enumerate(PROMPTS):
            engine.add(f"{index}", prompt, PARAMS[index])
        found = {}
        while engine.has_work:
            found |= {(news.request_id, news.index): news.finished for news in engine.step() if news.finished}
        results.append([found[key] for key in sorted(found)])
    check(results[1], results[0], exact=weights != "fp8_block")
