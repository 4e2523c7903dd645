"""The script that measures vLLM: its arithmetic and its errors, with a stand-in for vLLM; that it needs no jaxspec."""

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxspec.bench import vllm_cpu
from jaxspec.bench.vllm_cpu import Answers, Question, ScriptError, grouped, main, make_rows, read_questions

QUESTIONS = [Question("qa", "a"), Question("rag", "b"), Question("qa", "c"), Question("qa", "d")]


class StandIn(ModuleType):
    """A module `vllm` whose model answers with 5 tokens, 2 s after the first, having accepted 2 of 6 drafts."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.asked: list[list[str]] = []
        self.settings: dict[str, Any] = {}
        self.SamplingParams = SimpleNamespace

    def LLM(self, model: str, **settings: Any) -> Any:  # noqa: N802 (vLLM's name)
        self.settings = settings
        return SimpleNamespace(chat=self.chat)

    def chat(self, chats: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append([chat[0]["content"] for chat in chats])
        counts = None
        if "speculative_config" in self.settings:
            counts = SimpleNamespace(num_draft_tokens=6, histogram=[1, 0, 1])
        sample = SimpleNamespace(token_ids=[1, 2, 3, 4, 5], spec_decode_metrics=counts)
        clocks = [SimpleNamespace(first_token_ts=10.0 + i, last_token_ts=12.0 + i) for i in range(len(chats))]
        return [SimpleNamespace(outputs=[sample], metrics=clock) for clock in clocks]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The options that name a model folder and three questions."""
    (tmp_path / "config.json").write_text("{}")
    prompts = tmp_path / "questions.jsonl"
    rows = [{"category": category, "turns": [text]} for category, text in QUESTIONS[:3]]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return ["--model", str(tmp_path), "--prompts", str(prompts)]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """In place of vLLM, which wants an environment of its own."""
    vllm = StandIn()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(vllm_cpu, "version", lambda name: "9.9")
    for name in vllm_cpu.SETTINGS:
        monkeypatch.setenv(name, "as found")
    return vllm


def test_runs_where_there_is_no_jaxspec() -> None:
    tree = ast.parse(Path(vllm_cpu.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"vllm"}


def test_groups_hold_one_category_and_the_first_questions() -> None:
    assert grouped(QUESTIONS, [], 2, 8) == [[QUESTIONS[0], QUESTIONS[2]], [QUESTIONS[1]]]
    assert grouped(QUESTIONS, ["qa"], None, 2) == [[QUESTIONS[0], QUESTIONS[2]], [QUESTIONS[3]]]
    with pytest.raises(ScriptError, match=r"'q' \(there are: qa, rag\)"):
        grouped(QUESTIONS, ["q"], None, 1)


def test_rates_are_of_sums_and_leave_the_first_tokens_out() -> None:
    slow = Answers("qa", [[0] * 11], decode=1.0, whole=2.0, drafted=0, accepted=0)
    fast = Answers("rag", [[0] * 21, [0] * 11], decode=1.0, whole=2.0, drafted=30, accepted=15)
    qa, rag, both = make_rows([slow, fast], "ngram")
    assert [row["category"] for row in (qa, rag, both)] == ["qa", "rag", "all"]
    assert (qa["tokens_per_second"], qa["whole_tokens_per_second"], qa["tau"]) == (10.0, 5.5, 1.0)
    assert (rag["tokens_per_second"], rag["tau"], rag["acceptance_rate"]) == (30.0, 2.0, 0.5)
    assert (both["tokens_per_second"], both["tokens"], both["questions"]) == (20.0, 43, 3)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_writes_the_rows(
    drafter: str, files: list[str], tmp_path: Path, vllm: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert main([*files, "--drafter", drafter, "--batch", "2", "--json", str(file)]) == 0
    assert vllm.asked == [["a", "c"], ["b"], ["a", "c"], ["b"]], "a warm-up for each size, then all"
    rows = json.loads(file.read_text())
    assert [row["category"] for row in rows] == ["qa", "rag", "all"]
    # The pair decodes 8 tokens from 10 s to 13 s, the single one 4 from 10 s to 12 s.
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([8 / 3, 2.0, 12 / 5])
    assert rows[-1]["tau"] == (2.0 if drafter == "ngram" else 1.0)
    assert rows[-1]["acceptance_rate"] == pytest.approx(1 / 3 if drafter == "ngram" else 0.0)
    assert "9.9, float32" in capsys.readouterr().out


def test_together_asks_all_categories_in_turn_in_one_call(files: list[str], tmp_path: Path, vllm: StandIn) -> None:
    file = tmp_path / "rows.json"
    assert main([*files, "--together", "5", "--batch", "2", "--json", str(file)]) == 0
    assert vllm.asked == [["a", "b"], ["a", "b", "c", "a", "b"]], "a warm-up of a batch, then all"
    (row,) = json.loads(file.read_text())
    assert (row["category"], row["questions"], row["tokens"]) == ("all", 5, 25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch: must be 1 or more"),
        (["--max-tokens", "1"], "--max-tokens: must be 2 or more"),
        (["--drafter", "medusa"], "medusa"),
        (["--categories", "poetry"], "there are: qa, rag"),
        (["--model", "no-such-folder"], "no-such-folder is no model folder"),
        (["--prompts", "no-such.jsonl"], "no-such.jsonl: No such file"),
        (["--json", "no-such-folder/rows.json"], "there is no folder no-such-folder"),
        ([], "this needs vLLM in an environment of its own"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("LD_PRELOAD", "libiomp5.so")
    for name in vllm_cpu.SETTINGS:
        monkeypatch.setenv(name, "as found")
    assert main([*files, *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"category": "qa"}', '{"category": "qa", "turns": []}', '{"category": "qa", "turns": "Why?"}']
)
def test_a_bad_question_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"category": "qa", "turns": ["Why?"]}\n\n' + line + "\n")
    with pytest.raises(ScriptError, match="line 3 is not like"):
        read_questions(file)
    file.write_text("\n")
    with pytest.raises(ScriptError, match="is empty"):
        read_questions(file)
