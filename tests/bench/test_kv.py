"""`bench kv` on a tiny model: what is measured of each case, and what is made of it."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxspec.bench import kv
from jaxspec.bench.kv import Bench, Case, Sizes, make_cases, read_text
from jaxspec.bench.kv_report import make_onward, make_rows, make_table
from jaxspec.bench.passkey import Try
from jaxspec.bench.quality import Marks, Subject, compare
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError

SIZES = Sizes(tokens=250, window=128, repeats=2, batch=2, context=40, answer=12, lengths=(240,), depths=(0.0, 1.0))
CASES = make_cases(["float32", "int8"], ["float32", "bfloat16"])
TEXT = "the sea is wide and the sky is blue, she sells sea shells by the shore. " * 40


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_model))


@pytest.fixture(scope="module")
def bench(config: EngineConfig) -> Bench:
    bench = Bench(config, CASES, TEXT, SIZES)
    told: list[int] = []
    bench.warm_up()
    bench.measure(told.append)
    assert len(told) == bench.steps
    # Two turns of 24 tokens, a passkey prompt at two depths, and two windows, of three cases.
    assert sum(told) == 3 * (2 * 24 + 2 * 240 + 2 * 128)
    return bench


def test_cases_are_formats_of_the_first_weights_and_the_other_weights() -> None:
    assert make_cases(["float32", "int8"], ["float32", "bfloat16"]) == [
        Case("float32", "float32"),
        Case("float32", "bfloat16"),
        Case("int8", "float32"),
    ]
    assert make_cases(["float32", "int8"], ["bfloat16", "int8"], ["full", "sinks"])[2:] == [
        Case("float32", "bfloat16", "sinks"),
        Case("int8", "bfloat16", "full"),
    ]


def test_rows_say_what_was_measured(bench: Bench) -> None:
    rows = make_rows(bench)
    assert [(row["weights"], row["kv_dtype"], row["kv_policy"]) for row in rows] == CASES
    full = 2 * 2 * 2 * 16 * 4  # layers, heads, keys and values, dimension, bytes
    assert [row["bytes_per_token"] for row in rows] == [full, full / 2, full]
    assert [row["compression"] for row in rows] == [0.5, 1.0, 0.5]
    reference, kv_row, weights_row = rows
    assert (reference["perplexity_change"], reference["agreement"], reference["kl"]) == (0.0, 1.0, 0.0)
    assert (reference["speedup"], reference["tokens"]) == (1.0, 254)
    for row in (kv_row, weights_row):
        assert 0 < row["kl"] < 0.1
        assert 0.8 < row["agreement"] <= 1
        assert row["perplexity"] == pytest.approx(reference["perplexity"] * (1 + row["perplexity_change"]))
        assert row["tokens_per_second"] > 0
    assert kv_row["perplexity"] != reference["perplexity"] != weights_row["perplexity"]
    assert [cell["tries"] for cell in reference["passkey_places"]] == [1, 1]
    assert 0 <= reference["passkey"] <= 1


def test_bytes_count_scales_and_tell_tails_apart(config: EngineConfig) -> None:
    rows = make_rows(Bench(config, make_cases(["float32"], ["bfloat16", "int8", "int4"]), TEXT, SIZES))
    vectors = 2 * 2 * 2  # layers, heads, keys and values, of 16 numbers each
    half, byte, nibble = vectors * 16 * 2, vectors * (16 + 2), vectors * 8 + 2 * 2 * (2 * 16 * 2 / 64 + 2 * 2)
    assert [row["bytes_per_token"] for row in rows] == [half, byte, nibble]
    assert [row["compression"] for row in rows] == [1.0, half / byte, half / nibble]
    assert [row["tail_bytes"] for row in rows] == [0, 0, 64 * half]
    assert "int4 16,384" in str(make_table(rows, "title").caption)


def test_windows_follow_one_another(bench: Bench) -> None:
    engine = bench.engines[CASES[0]]
    subject = Subject(engine.device.params.target, engine.spec, engine.program.pool)
    for index, found in enumerate(bench.findings.marks[CASES[0]]):
        [alone] = compare([subject], bench.ids[128 * index : 128 * (index + 1)])
        np.testing.assert_array_equal(found.surprise, alone.surprise)


def test_decoding_takes_all_prompts_from_the_text(bench: Bench) -> None:
    engine = next(iter(bench.engines.values()))
    seen: list[list[int]] = []
    add, engine.add = engine.add, lambda name, prompt, params: (seen.append(prompt), add(name, prompt, params))[1]
    before = engine.metrics.tokens
    assert bench._speed(engine) > 0
    del engine.add
    assert seen == [bench.ids[:40], bench.ids[40:80]]
    assert engine.metrics.tokens - before == 2 * 12


def test_rows_take_medians_and_ratios_of_one_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*speeds: list[float]) -> kv.Findings:
        return kv.Findings(dict(zip(CASES, speeds, strict=True)), *({case: [] for case in CASES} for _ in range(3)))

    monkeypatch.setattr(bench, "findings", found([10.0, 1.0, 4.0], [20.0, 3.0, 4.0], [5.0]))
    first, second, third = make_rows(bench)
    assert (first["tokens_per_second"], second["tokens_per_second"], third["tokens_per_second"]) == (4.0, 4.0, 5.0)
    assert (first["speedup"], second["speedup"], third["speedup"]) == (1.0, 2.0, 0.5)
    assert first["perplexity"] is first["kl"] is first["passkey"] is None
    monkeypatch.setattr(bench, "findings", found([], [], []))
    assert not bench.findings
    assert make_rows(bench)[0]["tokens_per_second"] is None


def test_the_table_holds_what_there_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    nats = np.ones(4, np.float32)
    empty = {case: [] for case in CASES}
    marks = {case: [Marks(nats * (1 + i / 100), nats > 0, nats * i / 1000)] for i, case in enumerate(CASES)}
    monkeypatch.setattr(bench, "findings", kv.Findings(empty, empty | {CASES[0]: [Try(9, 0.0, True)]}, marks, empty))
    table = make_table(make_rows(bench), "title")
    assert [list(column.cells) for column in table.columns[4:]] == [
        ["", "", ""],
        ["2.718", "2.746", "2.773"],
        ["+0.00%", "+1.01%", "+2.02%"],
        ["100.0%"] * 3,
        ["0.0e+00", "1.0e-03", "2.0e-03"],
        ["100%", "", ""],
    ]


def test_what_cannot_work_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match=r"no kv_dtype named 'int3' \(there are: auto, bfloat16"):
        make_cases(["float32"], ["float32", "int3"])
    with pytest.raises(ConfigError, match=r"no quantised weights named 'int3' \(there are: .*int8"):
        make_cases(["float32", "int3"], ["float32"])
    with pytest.raises(ConfigError, match=r"no kv_policy named 'h3o' \(there are: full"):
        Bench(config, make_cases(["float32"], ["float32"], ["h3o"]), TEXT, SIZES)
    for names in (([], ["float32"]), (["float32"], []), (["float32"], ["float32"], [])):
        with pytest.raises(ConfigError, match="need a name each"):
            make_cases(*names)
    with pytest.raises(ConfigError, match="must be a multiple of 64, not 100"):
        Sizes(window=100)
    for sizes, said in (
        (Sizes(window=512, context=40, lengths=()), "--window: 512 tokens of context, but .* was trained for 256"),
        (Sizes(window=128), "speed and passkeys: 1032 tokens of context"),
        (
            Sizes(tokens=10**6, window=128, context=40, lengths=()),
            r"takes a text of 1008000 tokens and this one has 721: ",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            Bench(config, CASES[:1], TEXT, sizes)


def test_one_text_is_read_beyond_what_was_trained(config: EngineConfig) -> None:
    """What a policy lets go of changes nothing before the window is full, and something after."""
    few = Sizes(tokens=1, window=128, repeats=0, batch=1, context=40, answer=12, lengths=(), reach=640)
    own = msgspec.structs.replace(config, kv_window=64)
    bench = Bench(own, make_cases(["float32"], ["float32"], ["full", "window", "sinks"]), TEXT * 2, few)
    bench.measure()
    full, window, sinks = (one.surprise for [one] in bench.findings.onward.values())
    for found, seen in ((window, 64), (sinks, 68)):
        np.testing.assert_allclose(found[:seen], full[:seen], atol=1e-4)
        assert len(found) == 639
        assert np.abs(found[seen:] - full[seen:]).max() > 1e-3
    first, last = make_rows(bench)[0], make_rows(bench)[2]
    assert [part["tokens"] for part in last["onward"]] == [81 + 80 * i for i in range(7)] + [640]
    logs = [np.log(part["perplexity"]) for part in last["onward"]]
    assert np.average(logs, weights=[80] * 7 + [79]) == pytest.approx(float(sinks.mean()), rel=1e-5)
    assert (first["held"], last["held"]) == (1, 68 / 640)
    assert "sinks" in str(list(make_onward(make_rows(bench)).columns[0].cells))


def test_the_text_is_pythons_own_or_a_file(tmp_path: Path) -> None:
    text = read_text(None)
    assert text == read_text(None)
    assert len(text) > 400_000
    assert "assert_stmt" in text
    path = tmp_path / "text.txt"
    path.write_text("Ähren\n", encoding="utf-8")
    assert read_text(path) == "Ähren\n"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text: invalid start byte at byte 2"):
        read_text(path)
