"""`jaxspec batch`: order, errors by row, and going on after a kill."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.cli import main


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
        ]
    )
    assert (code, [row["index"] for row in out]) == (0, [0, 1, 2, 3])
    assert [row.get("id") for row in out] == ["first", 2, None, None]
    assert "4 rows in" in err
    llm = LLM(str(tiny_model), max_batch=4)
    params = SamplingParams(max_tokens=8)
    assert out[0]["stats"]["tokens"] == 60
    assert out[1]["token_ids"] == llm.chat(chat, params, progress=False)[0].token_ids
    sampled = llm.generate("she", SamplingParams(max_tokens=8, temperature=0.8, seed=5, n=2), progress=False)[0]
    assert [sample["token_ids"] for sample in out[2]["outputs"]] == [output.token_ids for output in sampled.outputs]
    assert len(out[3]["logprobs"]) == 8


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
            {"prompt": "fine too"},
        ]
    )
    assert code == 1
    assert "7 of 9 rows have an error" in err
    assert [("text" in row, row.get("error", "").split(":")[0]) for row in out] == [
        (True, ""),
        *[(False, f"line {line}") for line in range(3, 10)],
        (True, ""),
    ]
    assert "did you mean 'temperature'?" in out[2]["error"]
    assert "top_p must be in (0, 1]" in out[3]["error"]


def test_a_second_run_keeps_what_is_answered_and_does_what_changed(run):
    rows = [{"prompt": p, "temperature": 1.0} for p in ("a", "b", "c")]
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


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_where_it_stopped(kill, tiny_model, tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"the sea {i}", "temperature": 1.0, "max_tokens": 20 + i} for i in range(80)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["batch", str(source), str(out), "--model", str(tiny_model), "--ignore-eos", "--max-batch", "4"]
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
        assert err.splitlines()[-1] == f"interrupted: {len(whole)} of 80 rows are kept; the same command goes on"
    assert main(arguments) == 0
    assert f"{len(whole)} of 80 rows are there already" in capsys.readouterr().err
    done = out.read_bytes().splitlines(keepends=True)
    assert set(whole) <= set(done)
    assert [json.loads(line)["index"] for line in done] == list(range(80))
    assert [json.loads(line)["stats"]["tokens"] for line in done] == [20 + i for i in range(80)]
