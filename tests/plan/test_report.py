"""What people and programs are told of a plan."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from jaxspec.plan.memory import plan_memory
from jaxspec.plan.report import GIB, make_fields, make_report
from jaxspec.plan.shape import read_shape


def text_of(model: str, memory: int | None = None, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    for part in make_report(plan_memory(read_shape(model), **options), memory):
        console.print(part)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_report_holds_the_figures() -> None:
    text = text_of("llama-3.3-70b", context=8192, batch=32)
    assert max(map(len, text.splitlines())) <= 80
    flat = words(text)
    for figure in (
        "GQA, layers 80, heads 64, kv heads 8, head dim 128",
        "32 sequences of 8,192 tokens",
        "64 pages of 128 tokens",
        "▸ bfloat16 327,680 2.68 85.90 80.00 1.000",
        "int8 166,400",
        "int4: a sequence's tail, its newest tokens in full precision, takes 0.021 GB of it.",
        "70,553,706,496 parameters",
        "▸ bfloat16 141.11 131.42 1.000",
        "Together 211.42 GiB (227.01 GB)",
    ):
        assert figure in flat
    assert "fit" not in flat


def test_what_does_not_fit_says_what_would() -> None:
    flat = words(text_of("llama-3.3-70b", 192 * GIB, context=8192, batch=32))
    assert "It does not fit into 192.00 GiB (206.16 GB), by 19.42 GiB (20.85 GB)." in flat
    assert "room for 24 sequences of 8,192 tokens, or for 32 sequences of 6,144 tokens" in flat
    assert "with --batch 24, or with --context 6144, or with --kv-dtype" in flat
    assert "or with --memory 211.5." in flat


def test_no_room_at_all() -> None:
    flat = words(text_of("llama-3.3-70b", 24 * GIB, context=8192))
    assert "no room for keys and values beside the weights. It would fit with --memory 134." in flat


def test_what_fits_says_what_is_left() -> None:
    flat = words(text_of("llama-3.1-8b", 80 * GIB, context=8192, batch=1))
    assert "It fits into 80.00 GiB (85.90 GB), 64.04 GiB (68.77 GB) to spare." in flat
    assert "would" not in flat


def test_a_cache_alone() -> None:
    flat = words(text_of("deepseek-v3", context=4096))
    assert "MLA, layers 61, heads 128, latent dim 512, rope dim 64" in flat
    assert "cannot be run yet" in flat
    assert "kv_dtype int4" in flat
    assert "parameters" not in flat


@pytest.mark.parametrize("model", ["smollm2-135m", "deepseek-v3"])
def test_fields_are_json_and_agree(model: str) -> None:
    plan = plan_memory(read_shape(model), context=1000, batch=3, kv_dtype="int8")
    fields = json.loads(json.dumps(make_fields(plan, 2**30)))
    assert fields["kv_bytes"] == 3 * fields["bytes_per_sequence"]
    assert (fields["page_size"], fields["pages_per_sequence"]) == (256, 4)
    assert fields["bytes_per_sequence"] == fields["tail_bytes"] + 4 * 256 * fields["bytes_per_token"]
    assert fields["total_bytes"] == fields["kv_bytes"] + fields["weight_bytes"]
    assert fields["weight_bytes"] == fields["weight_formats"][fields["weights"]]
    assert fields["kv_formats"]["int8"].items() <= fields.items()
    assert fields["fits"] == (fields["total_bytes"] <= fields["memory_bytes"] == 2**30)
    assert set(make_fields(plan, None)) < set(fields)
