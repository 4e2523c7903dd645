"""Law 4 through the engine: interpreted Pallas kernels give the texts that XLA gives, with every drafter and format."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.models.loading import LoadedModel, load_model
from tests.driver import SPEC, random_params, write_heads
from tests.oracles.serving import Work, serve

PAGE, CONTEXT = 32, 96
CLOSE = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.05, "fp8": 0.05, "int4": 0.05}
"""How far a log probability may be from XLA's: kernels multiply in bfloat16 where pages are narrower than float32."""
TEXT = [5, 9, 7, 11, 30, 31, 32, 5, 9, 7, 40, 41, 42, 43, 44, 45, 5, 9, 7, 11, 8, 6, 5, 9, 7, 11, 5, 9, 7]
FEW = [("int8", "ngram")]
DRAFTERS = ("none", "ngram", "layer_skip", "draft_model", "medusa", "ngram_medusa")
POLICIES = {"ngram": "sinks", "none": "h2o"}
"""Of the drafters with which something is evicted: a text of 58 tokens goes down to 26."""
REST = [(kv, drafter) for kv in CLOSE for drafter in DRAFTERS if (kv, drafter) not in FEW]


@pytest.fixture
def transformer(tiny_model, drafter: str) -> LoadedModel:
    """Of as few layers as there must be: interpreting takes long."""
    tokenizer, params = load_model(str(tiny_model), progress=False).tokenizer, random_params().target
    layers = params["layers"][: 2 if drafter == "layer_skip" else 1]
    spec = replace(SPEC, max_context=CONTEXT, num_layers=len(layers))
    return LoadedModel(spec, {**params, "layers": layers}, tokenizer, "small")


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> str:
    return str(write_heads(tmp_path_factory.mktemp("heads"), SPEC, conditioned=16))


@pytest.mark.parametrize(
    ("kv_dtype", "drafter"), [*FEW, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)]
)
def test_kernels_give_the_texts_of_xla(unoptimised, monkeypatch, transformer, heads, kv_dtype, drafter) -> None:
    monkeypatch.setattr("jaxspec.drafters.draft_model.load_model", lambda *_, **__: transformer)
    monkeypatch.setattr("jaxspec.config.PREFILL_ROW", 1)
    monkeypatch.setattr("jaxspec.engine.PREFILL_ROW", 16)
    monkeypatch.setattr("jaxspec.engine.BATCH_BUCKETS", ())
    config = EngineConfig(
        kv_dtype=kv_dtype,
        drafter=drafter,
        draft_model="small",
        medusa_heads=heads,
        draft_tokens=3,
        draft_adaptive=False,
        ngram_min=1,
        verify="coupled",
        max_batch=2,
        page_size=64 if kv_dtype == "int4" else PAGE,
        prefill_chunk=16,
        kv_policy="full" if kv_dtype == "int4" else POLICIES.get(drafter, "full"),
        kv_window=20,
        kv_heavy=6,
    )
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, temperature=0.8, seed=3),
    ]
    work = [Work("0", TEXT * (2 if drafter == "none" else 1), params[0]), Work("1", TEXT[:12], params[1], 1)]
    by_xla, by_kernels = (
        serve(Engine(transformer, msgspec.structs.replace(config, implementation=name)), work)
        for name in ("xla", "pallas")
    )
    compared = 0
    for key, expected in by_xla.items():
        gaps = [abs(float(np.subtract(*list(entry.top.values())[:2]))) for entry in expected.logprobs]
        clear = next((i for i, gap in enumerate(gaps) if gap < 2 * CLOSE[kv_dtype]), len(gaps))
        assert by_kernels[key].token_ids[:clear] == expected.token_ids[:clear]
        both = ([entry.logprob for entry in results[key].logprobs[:clear]] for results in (by_xla, by_kernels))
        np.testing.assert_allclose(*both, atol=CLOSE[kv_dtype])
        compared += clear
    assert compared >= 4
