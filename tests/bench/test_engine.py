"""The engine's scenarios, small, on a tiny model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.bench import engine as module
from jaxspec.bench.contiguous import contiguous, serve
from jaxspec.bench.engine import SCENARIOS, Bench, Figures, Measured, Sizes, run
from jaxspec.bench.questions import Question
from jaxspec.bench.summary import make_rows, make_tables
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.llm import load

SIZES = Sizes(
    limit=128,
    crowd=4,
    answer=24,
    document=320,
    readers=12,
    steps=3,
    running=3,
    long=640,
    questions=5,
    batches=(1,),
    visited=160,
    visitors=6,
)
QUESTIONS = [
    Question(i, category, [text])
    for i, (category, text) in enumerate(
        [("a", "the sea is wide"), ("a", "she sells sea shells"), ("b", "the sky is blue, the sea is wide and blue")]
    )
]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context."""
    copy = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return copy


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    config = EngineConfig(model=str(folder), kv_memory=0.002, page_size=16, prefill_chunk=64)
    return Bench(load(config), config, QUESTIONS, 2, SIZES)


def figures(measured: list[Measured], case: str) -> list[Figures]:
    return [one.figures for one in measured if one.case == case]


def test_texts_take_turns_between_categories(bench):
    assert bench.texts == [QUESTIONS[0].turns[0], QUESTIONS[2].turns[0], QUESTIONS[1].turns[0]]
    assert bench.prose(1000)[40:90] == bench.prose(50, 40)


def test_a_contiguous_cache_wastes_what_a_request_does_not_fill(bench):
    engine = bench.engine(128)
    found = serve(contiguous(300, 128), engine, [21] * 6, 10)
    assert (found["peak_concurrency"], found["mean_concurrency"], found["preemptions"]) == (2, 2.0, 0)
    # A row is written, 20 tokens, and then grows by one a round: all two rows alike, at 64 tokens a chunk.
    filled = [20 + i for i in range(10)]
    assert found["rounds"] == 3 * 10
    assert found["waste_share"] == pytest.approx(sum(128 - n for n in filled) / sum(filled))
    assert found["peak_waste_share"] == pytest.approx(108 / 20)


def test_memory(bench):
    measured = list(run("memory", bench))
    (base,), (paged,) = figures(measured, "128 slots each"), figures(measured, "pages of 16")
    slots = bench.engine(128, page_size=1, max_batch=10**6).program.pool.num_pages
    assert base["peak_concurrency"] == slots // 128
    assert base["requests"] == paged["requests"] == 4 * (slots // 128)
    assert paged["peak_concurrency"] >= 1.5 * base["peak_concurrency"]
    assert paged["peak_concurrency"] <= slots // 24
    assert paged["rounds"] < base["rounds"]
    assert paged["waste_share"] < 0.25 * base["waste_share"]


@pytest.mark.slow
def test_prefix_hits_all_but_the_first_readers(bench):
    measured = [one for one in run("prefix", bench) if one.scenario == "prefix"]
    assert [one.case for one in measured] == ["cache off", "cache on"] * 2
    for off, on in zip(figures(measured, "cache off"), figures(measured, "cache on"), strict=True):
        assert off["prompt_tokens"] == on["prompt_tokens"] > 12 * 320
        assert off["hit_tokens"] == 0
        assert off["computed_tokens"] == off["prompt_tokens"] - 12
        # Each repeat begins with an empty cache: some reader writes the document again.
        assert 320 + 12 <= on["computed_tokens"] < off["computed_tokens"]
        assert on["hit_tokens"] == on["prompt_tokens"] - 12 - on["computed_tokens"]


@pytest.mark.slow
def test_conversations_recompute_little(bench):
    measured = [one for one in run("prefix", bench) if one.scenario == "growing"]
    assert [one.case for one in measured] == ["agent", "chat"]
    for one in measured:
        found = one.figures
        assert found["recomputed_tokens"] <= found["computed_tokens"] < found["prompt_tokens"]
        assert found["recomputed_share"] == found["recomputed_tokens"] / found["prompt_tokens"]


def test_what_was_known_is_recomputed_without_a_cache(bench, monkeypatch):
    real = module.Bench.engine
    monkeypatch.setattr(module.Bench, "engine", lambda self, n, **o: real(self, n, **o | {"prefix_cache": False}))
    for one in module.growing(bench):
        assert one.figures["computed_share"] == 1.0
        assert one.figures["recomputed_share"] > 0.3


def test_chunks_shorten_the_wait(bench, monkeypatch):
    calls = []
    real = module.Engine._prefill
    monkeypatch.setattr(
        module.Engine,
        "_prefill",
        lambda self, parts: (calls.append(sum(len(c.tokens) for c in parts)), real(self, parts))[1],
    )
    measured = list(run("chunks", bench))
    assert [one.case for one in measured] == ["whole prompt", "chunks of 64"] * 2
    assert max(calls) == 639
    for one in measured:
        assert 0 < one.figures["longest_gap"] < one.figures["ttft_of_long"] + 60
        assert one.figures["tokens_per_second"] > 0


@pytest.mark.slow
def test_throughput(bench):
    measured = list(run("throughput", bench))
    assert [one.case for one in measured] == [
        f"batch {batch}, {name}" for batch in (1,) for _ in range(2) for name in ("none", "ngram")
    ]
    for one in measured:
        assert one.figures["tokens"] == 5 * 24
        assert one.figures["tokens_per_second"] == pytest.approx(120 / one.figures["seconds"])
        assert one.figures["tau"] >= 1.0


@pytest.mark.slow
def test_formats_of_fewer_bits_run_more_at_once(bench):
    little = Sizes(limit=512, answer=150, little=2**17, eager=5, crowded=5, formats=("bfloat16", "int8"))
    rows = {row["case"]: row for row in make_rows(list(run("formats", replace(bench, repeats=1, sizes=little))))}
    assert rows["int8"]["kv_bytes_per_token"] < rows["bfloat16"]["kv_bytes_per_token"]
    assert rows["int8"]["peak_concurrency"] > rows["bfloat16"]["peak_concurrency"]
    assert rows["int8"]["preemptions"] < rows["bfloat16"]["preemptions"]


def test_second_visits_restore_what_had_to_leave(bench):
    measured = list(run("offload", replace(bench, repeats=1)))
    assert [one.case for one in measured] == ["computed again", "host memory", "disk"]
    again, memory, disk = (one.figures for one in measured)
    first = 6 * (160 + 32 - 1)
    assert again["restored_tokens"] == 0
    assert again["computed_tokens"] > 1.8 * first
    for found in (memory, disk):
        # A second visit writes 191 tokens, the document's 160 have all been away.
        assert 4 * 160 <= found["restored_tokens"] <= found["hit_tokens"]
        assert found["computed_tokens"] <= first + 6 * 31


def test_rows_are_medians_and_ratios_within_a_repeat():
    def one(case: str, speed: float) -> Measured:
        return Measured("s", case, "off", {"tokens_per_second": speed, "computed_share": 0.5})

    measured = [one("off", 1.0), one("on", 6.0), one("off", 10.0), one("on", 20.0), one("off", 2.0), one("on", 8.0)]
    off, on = make_rows(measured)
    assert (off["tokens_per_second"], on["tokens_per_second"]) == (2.0, 8.0)
    assert (off["tokens_per_second_ratio"], on["tokens_per_second_ratio"]) == (1.0, 4.0)
    assert on["repeats"] == 3
    assert make_rows(measured[:3])[1]["tokens_per_second_ratio"] == 6.0
    (table,) = make_tables([off, on])
    assert (table.title, [column.header for column in table.columns]) == ("s", ["", "off", "on"])
    assert [list(column.cells) for column in table.columns[1:]] == [
        ["2.00", "1.00", "50.0%"],
        ["8.00", "4.00", "50.0%"],
    ]


def test_a_model_with_too_short_a_context_is_named(tiny_model: Path):
    config = EngineConfig(model=str(tiny_model))
    short = Bench(load(config), config, QUESTIONS)
    for name, wanted in (("memory", 1024), ("prefix", 2072), ("chunks", 6008), ("offload", 4168)):
        with pytest.raises(ConfigError, match=f"takes a context of {wanted} tokens"):
            list(run(name, short))


def test_questions_without_room_are_refused(bench):
    full = Bench(bench.loaded, bench.config, [Question(1, "a", ["wide " * 200])], 1, SIZES)
    with pytest.raises(ConfigError, match="no question of --prompts has room for 24 tokens within 128"):
        list(run("memory", full))


def test_scenarios_are_those_of_the_command():
    from jaxspec.commands.bench import SCENARIO_NAMES

    assert tuple(SCENARIOS) == SCENARIO_NAMES
