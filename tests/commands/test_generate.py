"""`jaxspec generate` on a tiny model with random weights, and once on the real one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.cli import main

PROMPTS = ["the sea", "she sells", "user"]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> LLM:
    """The same model through the Python door."""
    return LLM(str(tiny_model), max_batch=4)


@pytest.fixture
def run(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    """Run `jaxspec generate`; returns exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["generate", "--model", str(tiny_model), "--max-tokens", "12", *arguments])
        return code, *capsys.readouterr()

    return call


def greedy(oracle: LLM, prompts: list[str]) -> list[str]:
    return [output.text for output in oracle.generate(prompts, SamplingParams(max_tokens=12), progress=False)]


def test_one_prompt_prints_the_text_and_the_figures_go_to_stderr(run, oracle):
    code, out, err = run("--raw", PROMPTS[0])
    assert (code, out) == (0, greedy(oracle, PROMPTS[:1])[0] + "\n")
    assert err.startswith("12 tokens in ")
    for figure in ("tok/s", "12 steps", "tau 1.00", "first token after"):
        assert figure in err
    assert err.count("\n") == 1


def test_a_chat_is_the_default(run, oracle):
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": PROMPTS[0]}]
    expected = oracle.chat(messages, SamplingParams(max_tokens=12), progress=False)[0].text
    assert run("--system", "brief", PROMPTS[0])[:2] == (0, expected + "\n")
    assert run(PROMPTS[0])[1] != expected + "\n"


def test_several_prompts_are_printed_whole_under_headers_in_order(run, oracle, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("\n".join(PROMPTS))
    code, out, _ = run("--raw", "--file", str(file))
    texts = greedy(oracle, PROMPTS)
    assert (code, out) == (0, "".join(f"=== {p}\n{t}\n\n" for p, t in zip(PROMPTS, texts, strict=True)))


def test_json_is_one_object_a_prompt(run, oracle):
    code, out, _ = run("--raw", "--json", "--seed", "3", "--temperature", "0.9", *PROMPTS)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    expected = oracle.generate(PROMPTS, params, progress=False)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["prompt"] for row in found] == PROMPTS
    assert [row["token_ids"] for row in found] == [output.token_ids for output in expected]
    assert [row["text"] for row in found] == [output.text for output in expected]
    for row in found:
        assert set(row) == {"prompt", "text", "token_ids", "finish_reason", "seed", "stats"}
        assert (row["finish_reason"], row["seed"]) == ("length", 3)
        names = {"tokens", "seconds", "tokens_per_second", "steps", "tau", "acceptance_rate", "cached_tokens"}
        assert set(row["stats"]) == names
        assert (row["stats"]["tokens"], row["stats"]["tau"], row["stats"]["acceptance_rate"]) == (12, 1.0, 0.0)


def test_json_with_samples_and_logprobs(run):
    code, out, _ = run("--raw", "--json", "--temperature", "1", "--n", "2", "--logprobs", "2", PROMPTS[0])
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["index"] for row in found] == [0, 1]
    assert found[0]["token_ids"] != found[1]["token_ids"]
    for row in found:
        assert [entry["token_id"] for entry in row["logprobs"]] == row["token_ids"]
        assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in row["logprobs"])


def test_best_of_shows_the_best_at_the_end(run, oracle):
    options = ["--raw", "--temperature", "1.3", "--seed", "4", "--best-of", "3"]
    params = SamplingParams(max_tokens=12, temperature=1.3, seed=4, n=2, best_of=3)
    best = oracle.generate(PROMPTS[0], params, progress=False)[0].outputs
    assert run(*options, PROMPTS[0])[:2] == (0, best[0].text + "\n")
    rows = [json.loads(line) for line in run(*options, "--n", "2", "--json", PROMPTS[0])[1].splitlines()]
    assert [(row["index"], row["text"], "logprobs" in row) for row in rows] == [
        (place, output.text, False) for place, output in enumerate(best)
    ]
    code, out, err = run("--raw", "--best-of", "3", PROMPTS[0])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "best_of 3 of a greedy request" in err


def test_flags_reach_the_sampler(run, oracle):
    first = oracle.generate(PROMPTS[0], SamplingParams(max_tokens=12), progress=False)[0].token_ids
    banned = json.loads(run("--raw", "--json", "--logit-bias", f"{first[0]}:-100", PROMPTS[0])[1])["token_ids"]
    assert first[0] not in banned
    stopped = json.loads(run("--raw", "--json", "--stop-token-ids", str(first[3]), PROMPTS[0])[1])
    assert stopped["token_ids"] == first[: first.index(first[3]) + 1]
    assert stopped["finish_reason"] == "stop"


def test_a_prompt_that_does_not_fit_is_named(run):
    code, out, err = run("--raw", "fits", "too long " * 300)
    assert (code, out) == (2, "")
    assert err.startswith("error: prompt 2: ")
    assert err.count("\n") == 1


COPY = "the sea the sea the sea the sea the sea"
GREEN, RED, CYAN, END = "\x1b[32m", "\x1b[31m", "\x1b[36m", "\x1b[0m"


def uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("prompts", [pytest.param([COPY], marks=pytest.mark.slow), [COPY, "she sells"]])
def test_speculation_in_colour(run, monkeypatch, prompts):
    # Random weights repeat nothing: a coin that decides between two letters does.
    coin = ["--temperature", "1", "--seed", "5", "--logit-bias", "70:99", "--logit-bias", "71:99"]
    options = ["--raw", "--drafter", "ngram", "--no-draft-adaptive", "--draft-tokens", "2", *coin]
    told, plain = run(*options, "--json", *prompts)[1], run(*options, *prompts)[1]
    stats = [json.loads(line)["stats"] for line in told.splitlines()]
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = run(*options, "--show-speculation", *prompts)
    assert code == 0
    assert uncoloured(out) == plain
    assert GREEN in out
    legend = uncoloured(err).partition("tokens: ")[2].splitlines()[0]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", legend)}
    assert set(counts) == {"accepted", "corrected", "bonus", "plain"}
    assert sum(counts.values()) == 12 * len(prompts)
    assert counts["accepted"] > 0
    # Every round emits one token that was not accepted, unless it is the last and was cut off.
    rounds = sum(s["steps"] for s in stats)
    assert rounds - len(prompts) <= counts["corrected"] + counts["bonus"] + counts["plain"] <= rounds
    assert (RED in out) == (counts["corrected"] > 0)
    assert (CYAN in out) == (counts["bonus"] > 0)
    assert "note:" not in err


def test_speculation_without_colours_says_so(run, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    options = ["--raw", "--drafter", "ngram", COPY]
    code, out, err = run("--show-speculation", *options)
    assert (code, out) == (0, run(*options)[1])
    assert err.count("FORCE_COLOR=1") == 1
    assert "tokens: " in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, err = run("--show-speculation", "--json", *options)[1:]
    assert json.loads(out)["stats"]["tokens"] == 12
    assert "not in JSON" in err
    assert "no token was drafted" in run("--show-speculation", "--raw", "--drafter", "none", COPY)[2]


@pytest.mark.skipif(
    not Path("/dev/full").exists(),
    reason="only Linux has /dev/full, a file on which every write fails as on a full disk",
)
def test_output_that_cannot_be_written_is_one_line(run, monkeypatch):
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails too
    monkeypatch.setattr(sys, "stdout", full)
    code, _, err = run("--raw", PROMPTS[0])
    with suppress(OSError):
        full.close()
    assert code == 2
    assert err == "error: output: No space left on device\n"


def test_ctrl_c_says_what_was_answered_and_exits_130(tiny_model):
    # Whoever runs the tests may ignore the signal, as shells make their background jobs do.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heeding}; from jaxspec.cli import main; raise SystemExit(main())"]
    options = ["--model", str(tiny_model), "--raw", "--ignore-eos", "--max-tokens", "240", "--max-batch", "1"]
    with subprocess.Popen(
        [*command, "generate", *options, *["the sea"] * 4000],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("=== the sea")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith("of 4000 prompts are answered")
    assert "Traceback" not in err


@pytest.mark.model
def test_the_real_model_answers_from_one_command_and_streams():
    command = [sys.executable, "-m", "jaxspec", "generate", "--max-tokens", "48", "Write a short poem about the sea."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pieces, times = [], []
        while piece := os.read(process.stdout.fileno(), 65536):
            pieces.append(piece)
            times.append(time.perf_counter())
        _, err = process.communicate()
    text = b"".join(pieces).decode()
    assert process.returncode == 0, err
    assert "sea" in text.lower()
    assert len(pieces) > 2, "the answer came in one piece"
    assert times[-1] - times[0] > 0.1
    assert b"48 tokens in" in err
