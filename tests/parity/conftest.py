"""What the comparisons with transformers share. torch and transformers load late: test modules skip without them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.peers import load_transformers
from jaxspec.llm import LLM
from jaxspec.models.loading import find_model

MODEL = "smollm2-135m"
SPEC_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "spec_bench_dev.jsonl"
OWN_QUESTIONS = (
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show your steps.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into German: The weather is fine today and we are going to the beach.",
    "Name three causes of the First World War, and say a word about each.",
)


@pytest.fixture(scope="session")
def smollm2() -> LLM:
    """SmolLM2 in float32, four sequences at a time."""
    return LLM(MODEL, weights="float32", kv_dtype="float32", max_batch=4)


@pytest.fixture(scope="session")
def reference() -> Any:
    """SmolLM2 in float32 as transformers reads it from the same file."""
    # Two threads of torch wait for each other at every operation: on a busy machine that takes ten times as long.
    pytest.importorskip("torch").set_num_threads(1)
    return load_transformers(find_model(MODEL))


@pytest.fixture(scope="session")
def questions() -> list[str]:
    """Questions over all categories of Spec-Bench, 20 of them; a few of our own where its file is not at hand."""
    if not SPEC_BENCH.is_file():
        return list(OWN_QUESTIONS)
    by_category: dict[str, list[str]] = {}
    for line in SPEC_BENCH.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_category.setdefault(row["category"], []).append(row["turns"][0])
    # The first question of every category, then the second of every one.
    return [listed[rank] for rank in range(2) for listed in by_category.values()][:20]
