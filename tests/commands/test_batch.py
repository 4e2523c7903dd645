"""`jaxspec batch`: order, errors by row, and going on after a kill."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.cli import main
from jaxspec.commands import batch, meter
from jaxspec.config import EngineConfig


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Write the rows to IN.jsonl and run `jaxspec batch`; returns exit code, rows of OUT.jsonl, and stderr."""

    def call(rows: list[dict | str], *options: str) -> tuple[int, list[dict], str]:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        out = tmp_path / "out.jsonl"
        common = ["--model", str(tiny_model), "--max-tokens", "8", "--max-batch", "4"]
        code = main(["batch", str(tmp_path / "in.jsonl"), str(out), *common, *options])
        return code, [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().err

    return call


def test_answers_come_in_input_order_with_each_row_its_own_options(run, tiny_model):
    chat = [{"role": "user", "content": "hello"}]
    code, out, err = run(
        [
            {"prompt": "the sea", "id": "first", "max_tokens": 60, "ignore_eos": True},
            {"messages": chat, "id": 2},
            {"prompt": "she", "temperature": 0.8, "seed": 5, "n": 2},
            {"prompt": "user", "logprobs": 1, "stop": "zzz"},
            {"prompt": "she", "temperature": 1.2, "seed": 5, "n": 2, "best_of": 4},
            {"prompt": "she", "temperature": 1.2, "seed": 5, "best_of": 4, "cache_ttl": 60},
        ]
    )
    assert (code, [row["index"] for row in out]) == (0, [*range(6)])
    assert [row.get("id") for row in out[:3]] == ["first", 2, None]
    assert "6 rows in" in err
    llm = LLM(str(tiny_model), max_batch=4)
    params = SamplingParams(max_tokens=8)
    assert out[0]["stats"]["tokens"] == 60
    assert out[1]["token_ids"] == llm.chat(chat, params, progress=False)[0].token_ids
    sampled = llm.generate("she", SamplingParams(max_tokens=8, temperature=0.8, seed=5, n=2), progress=False)[0]
    assert [sample["token_ids"] for sample in out[2]["outputs"]] == [output.token_ids for output in sampled.outputs]
    assert len(out[3]["logprobs"]) == 8
    best = llm.generate("she", SamplingParams(max_tokens=8, temperature=1.2, seed=5, n=2, best_of=4), progress=False)[0]
    assert [sample["token_ids"] for sample in out[4]["outputs"]] == [output.token_ids for output in best.outputs]
    assert (out[5]["token_ids"], out[5]["stats"]["pinned_tokens"]) == (best.token_ids, 0)
    assert not any("logprobs" in row for row in (*out[4]["outputs"], out[5]))


def test_a_row_in_error_is_named_and_the_others_go_on(run):
    code, out, err = run(
        [
            {"prompt": "fine"},
            "",
            '{"prompt": "cut',
            {"prompt": "a", "temprature": 1},
            {"prompt": "a", "top_p": 0},
            {"prompt": "a", "messages": []},
            {"prompt": "long " * 400},
            {"prompt": ""},
            {"prompt": "a", "max_tokens": "many"},
            {"prompt": "a", "best_of": 2},
            {"prompt": "a", "temperature": 1, "n": 3, "best_of": 2},
            {"prompt": "a", "cache_ttl": 0},
            {"prompt": "fine too"},
        ]
    )
    assert code == 1
    assert "10 of 12 rows have an error" in err
    assert [("text" in row, row.get("error", "").split(":")[0]) for row in out] == [
        (True, ""),
        *[(False, f"line {line}") for line in range(3, 13)],
        (True, ""),
    ]
    assert "did you mean 'temperature'?" in out[2]["error"]
    assert "top_p must be in (0, 1]" in out[3]["error"]
    assert "greedy" in out[8]["error"]


def test_a_second_run_keeps_what_is_answered_and_does_what_changed(run):
    rows = [{"prompt": p, "temperature": 1.0, "ignore_eos": True} for p in ("a", "b", "c")]
    _, before, _ = run([*rows[:2], {"prompt": "c", "top_p": 3}])
    code, after, err = run(rows)
    assert (code, after[:2]) == (0, before[:2])
    assert "2 of 3 rows are there already" in err
    assert run(rows)[1] == after
    code, other, err = run(rows, "--max-tokens", "5")
    assert "3 rows" in err
    assert "they go" in err
    assert [row["stats"]["tokens"] for row in other] == [5, 5, 5]
    assert run(rows, "--max-tokens", "5", "--max-batch", "2", "--kv-memory", "0.5")[1] == other
    again = run(rows, "--max-tokens", "5", "--overwrite")[1]
    assert [row["seed"] for row in again] != [row["seed"] for row in other]


def test_nothing_is_run_for_outputs_that_are_not_ours_or_inputs_that_are_empty(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "notes.jsonl").write_text('{"precious": 1}\n')
    for source, target, said in (
        ("in.jsonl", "notes.jsonl", "--overwrite"),
        ("in.jsonl", "nowhere/out.jsonl", "cannot write"),
        ("empty.jsonl", "out.jsonl", "empty"),
    ):
        assert main(["batch", str(tmp_path / source), str(tmp_path / target)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    assert (tmp_path / "notes.jsonl").read_text() == '{"precious": 1}\n'
    assert not (tmp_path / "out.jsonl").exists()


def test_a_summary_tells_of_this_run(run, tmp_path):
    rows = [{"prompt": "the sea is wide and the sky is blue " * 3, "ignore_eos": True, "cache_ttl": 9}] * 6
    summary = tmp_path / "figures.json"
    code, out, _ = run([*rows, {"prompt": "", "n": 3}], "--summary", str(summary), "--page-size", "16")
    figures = json.loads(summary.read_text())
    assert code == 1
    assert (figures["requests"], figures["tokens"], figures["tau"]) == (6, 48, 1.0)
    assert figures["hit_tokens"] == sum(row["stats"]["cached_tokens"] for row in out[:6]) > 0
    assert {row["stats"]["pinned_tokens"] % 16 for row in out[:6]} == {0}
    assert min(row["stats"]["pinned_tokens"] for row in out[:6]) > 0
    assert figures["prompt_tokens"] == figures["hit_tokens"] + figures["computed_tokens"] + 6
    assert figures["tokens_per_second"] == pytest.approx(48 / figures["seconds"])
    assert figures["ttft"]["max"] >= figures["ttft"]["p99"] >= figures["ttft"]["p50"] > 0
    assert set(figures["inter_token"]) == {"p50", "p99", "max"}
    assert set(figures["waste"]) == {"mean", "peak", "look_ahead"}
    assert (figures["peak_concurrency"], figures["preemptions"]) == (4, 0)
    run(rows)
    run(rows, "--summary", str(summary), "--page-size", "16")
    assert json.loads(summary.read_text())["requests"] == 0


def test_a_summary_that_cannot_be_written_is_said_before_any_work(run, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    for place in (tmp_path / "nowhere" / "f.json", tmp_path, source, out):
        assert main(["batch", str(source), str(out), "--summary", str(place)]) == 2
        assert not out.exists()
    assert source.read_text() == '{"prompt": "a"}\n'


SAMPLED = SamplingParams(temperature=0.7, seed=1)


@pytest.mark.parametrize(
    ("params", "engine", "other", "same"),
    [
        (SAMPLED, {}, {"prefill_chunk": 64, "prefix_cache": False, "max_batch": 2, "page_size": 16}, True),
        (SAMPLED, {}, {"drafter": "ngram", "draft_tokens": 3, "draft_adaptive": False, "verify": "coupled"}, True),
        (SAMPLED, {}, {"drafter": "layer_skip", "draft_layers": 1, "verify": "coupled"}, True),
        (SAMPLED, {}, {"drafter": "layer_skip"}, False),
        (SAMPLED, {"drafter": "layer_skip"}, {"drafter": "layer_skip", "verify": "coupled"}, False),
        *[
            (SAMPLED, {"drafter": "layer_skip"}, {"drafter": "layer_skip", name: value}, False)
            for name, value in {
                "draft_layers": 1,
                "draft_tokens": 3,
                "draft_adaptive": False,
                "draft_temperature": 0.5,
                "verify": "rejection",
            }.items()
        ],
        (SAMPLED, {}, {"kv_dtype": "bfloat16"}, False),
        (SamplingParams(), {}, {"drafter": "layer_skip", "draft_temperature": 0.5, "verify": "rejection"}, True),
        (SamplingParams(), {}, {"weights": "bfloat16"}, False),
    ],
)
def test_answers_are_kept_where_the_text_would_be_the_same(params, engine, other, same):
    digests = [batch._digest({}, "a", params, EngineConfig(**options)) for options in (engine, other)]
    assert (digests[0] == digests[1]) == same


def test_place_in_line_and_salt_decide_no_text():
    plain, moved, longer = (
        batch._digest({}, "a", SamplingParams(**options), EngineConfig())
        for options in ({}, {"priority": 3, "cache_salt": "mine", "cache_ttl": 5.0}, {"max_tokens": 7})
    )
    assert plain == moved != longer


def test_off_a_terminal_a_line_now_and_then(run, monkeypatch):
    monkeypatch.setattr(meter, "SECONDS_A_LINE", 0.0)
    err = run([{"prompt": "the sea"}] * 5, "--page-size", "16")[2]
    first = r"^0/5 rows, [\d.]+ tok/s, \? left, 4 running, 1 waiting, pages 4 used 0 cached of 80, hits 0%$"
    assert re.search(first, err, re.MULTILINE)
    assert re.search(r"^5/5 rows, .* 0:00:00 left, 0 running, 0 waiting, pages 0 .* τ 1.00$", err, re.MULTILINE)


def test_the_display_of_a_terminal(tiny_model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "the sea is wide and the sky is blue"}\n' * 40)
    options = ["--model", str(tiny_model), "--max-tokens", "100", "--ignore-eos", "--max-batch", "2"]
    command = [sys.executable, "-m", "jaxspec", "batch", str(source), str(tmp_path / "out.jsonl"), *options]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen(command, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # which is how the other end of a terminal says that it is closed
            while piece := os.read(ours, 4096):
                shown += piece
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "40/40 rows" in text
    assert re.search(r"2 running, \d+ waiting, pages \d+ used \d+ cached of \d+, hits \d+%", text)
    assert "τ 1.00" in text


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_where_it_stopped(kill, tiny_model, tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"the sea {i}", "temperature": 1.0, "max_tokens": 20 + i} for i in range(80)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["batch", str(source), str(out), "--model", str(tiny_model), "--ignore-eos", "--max-batch", "4"]
    arguments += ["--summary", str(tmp_path / "figures.json")]
    with subprocess.Popen([sys.executable, "-m", "jaxspec", *arguments], stderr=subprocess.PIPE, text=True) as run:
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert run.poll() is None, run.communicate()
            time.sleep(0.01)
        run.send_signal(kill)
        _, err = run.communicate(timeout=60)
    whole = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 3 <= len(whole) < len(rows)
    if kill == signal.SIGKILL:
        assert run.returncode == -kill
    else:
        assert run.returncode == 130
        assert json.loads((tmp_path / "figures.json").read_text())["requests"] >= len(whole)
        assert err.splitlines()[-1] == f"interrupted: {len(whole)} of 80 rows are kept; the same command goes on"
    assert main(arguments) == 0
    assert f"{len(whole)} of 80 rows are there already" in capsys.readouterr().err
    done = out.read_bytes().splitlines(keepends=True)
    assert set(whole) <= set(done)
    assert [json.loads(line)["index"] for line in done] == list(range(80))
    assert [json.loads(line)["stats"]["tokens"] for line in done] == [20 + i for i in range(80)]
