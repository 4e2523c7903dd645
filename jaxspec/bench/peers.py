"""Our speed against transformers on the CPU: same model file, prompts and number of new tokens, in one run.

Run as `python -m jaxspec.bench.peers`. All are measured over the same span: the whole generate call, prefill included,
after a warm-up call each. The systems take turns, and a ratio is the median of those within one turn: a machine that is
busy for a while then slows both sides of it.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxspec import commandline
from jaxspec.bench.questions import mixed, read_questions
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM
from jaxspec.models.loading import find_model, load_model

OURS, PEER, PEER_BF16 = "jaxspec", "transformers f32", "transformers bf16"
SPAN = "whole generate call, prefill included"
PROMPT = "Write a short poem about the sea."

Generate = Callable[[], int]
"""Answers the prompts; returns the tokens generated in all."""


def load_transformers(path: Path, dtype: str = "float32") -> Any:
    """The causal language model of a Hugging Face folder or .gguf file on the CPU, as transformers loads it.

    ConfigError where torch or transformers (for a .gguf file also accelerate) is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"this needs torch and transformers ({error}): pip install 'jaxspec[parity]'") from error
    transformers.utils.logging.disable_progress_bar()
    source = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **source)
    except ImportError as error:
        raise ConfigError(f"transformers cannot load {path.name} ({error}): pip install 'jaxspec[parity]'") from error
    return model.eval()


def ours(model: str, prompts: list[list[int]], batch: int, tokens: int) -> Generate:
    """Our generate call, in float32 whatever the backend."""
    llm = LLM(
        model,
        drafter="none",
        weights="float32",
        kv_dtype="float32",
        max_batch=batch,
        max_context=max(map(len, prompts)) + tokens,
        kv_memory=8.0,
        prefix_cache=False,
    )
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def generate() -> int:
        return sum(len(answer.token_ids) for answer in llm.generate(prompts, params, progress=False))

    return generate


def theirs(model: Any, prompts: list[list[int]], batch: int, tokens: int) -> Generate:
    """The generate call of a transformers model, once a batch, padded to its longest prompt: greedy, and with no end of
    sequence."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    # What a checkpoint recommends (an end of sequence, sampling, penalties) would else fill the gaps of ours.
    model.generation_config = config

    def generate() -> int:
        made = 0
        for at in range(0, len(prompts), batch):
            rows = prompts[at : at + batch]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            answer = model.generate(ids, attention_mask=mask, generation_config=config)
            made += len(rows) * (answer.shape[1] - width)
        return made

    return generate


def measure(systems: dict[str, Generate], expected: int, repeats: int) -> dict[str, list[float]]:
    """Tokens a second of every system in `repeats` turns, after a warm-up call each.

    ConfigError when a system generates another number of tokens than `expected`: its speed would not compare.
    """
    for name, generate in systems.items():
        if (made := generate()) != expected:
            raise ConfigError(
                f"{name} generated {made} tokens, not {expected}: take fewer --tokens or a shorter --prompt"
            )
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, generate in systems.items():
            start = time.perf_counter()
            generate()
            speeds[name].append(expected / (time.perf_counter() - start))
    return speeds


def summary(batch: int, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """One row of the table: median tokens a second of each system, and how many times each peer's speed ours is."""
    ratios = {
        peer: statistics.median(a / b for a, b in zip(speeds[OURS], speeds[peer], strict=True))
        for peer in speeds
        if peer != OURS
    }
    return {"batch": batch, "tok/s": {name: statistics.median(s) for name, s in speeds.items()}, "ratio": ratios}


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows as people read them."""
    peers = list(rows[0]["ratio"])
    shown = Table(title=title, caption=f"tok/s, {SPAN}; × is ours over theirs")
    for name in ("batch", OURS, *(column for peer in peers for column in (peer, "×"))):
        shown.add_column(name, justify="right")
    for row in rows:
        speed, ratio = row["tok/s"], row["ratio"]
        cells = [part for peer in peers for part in (f"{speed[peer]:.1f}", f"{ratio[peer]:.2f}")]
        shown.add_row(str(row["batch"]), f"{speed[OURS]:.1f}", *cells)
    return shown


def _batches(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--batches must be numbers from 1 up with commas between, not {text!r}")
    return sizes


def _about(model: str, prompt_tokens: list[int], tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    """What a reader of the JSON must know to compare its figures with others."""
    return {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "new_tokens": tokens,
        "repeats": repeats,
        "torch_threads": threads,
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "span": SPAN,
        "versions": {name: version(name) for name in ("jax", "torch", "transformers")},
    }


def run(
    model: Annotated[str, typer.Option(help="As `jaxspec generate` takes it.")] = "smollm2-135m",
    prompt: Annotated[str, typer.Option(help="The user's message, in every row of the batch.")] = PROMPT,
    prompts: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.jsonl", help="Questions instead, of all categories in turn.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, metavar="N", help="With --prompts: how many.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens a row; the end of sequence is ignored.")] = 128,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(min=1, help="Measured turns a batch size.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; ours takes all cores.")] = os.cpu_count() or 1,
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="Measure transformers in bfloat16 too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Print our float32 speed beside that of transformers on the CPU."""
    sizes, path = _batches(batches), find_model(model)
    peers = {PEER: load_transformers(path)}
    if bfloat16:
        peers[PEER_BF16] = load_transformers(path, "bfloat16")
    _set_threads(threads)
    texts = [q.turns[0] for q in mixed(read_questions(prompts))[:questions]] if prompts else [prompt]
    ids = _tokenised(model, texts)
    rows = []
    for batch in sizes:
        asked = ids if prompts else ids * batch
        systems = {OURS: ours(model, asked, batch, tokens)}
        systems |= {name: theirs(peer, asked, batch, tokens) for name, peer in peers.items()}
        rows.append(summary(batch, measure(systems, len(asked) * tokens, repeats)))
    of = (
        f"{len(ids)} prompts of {min(map(len, ids))} to {max(map(len, ids))}"
        if prompts
        else f"a prompt of {len(ids[0])}"
    )
    title = f"{model}, greedy, {of} tokens, {tokens} new ones, {threads} torch threads"
    Console().print(table(rows, title))
    if json_file is not None:
        about = _about(model, list(map(len, ids)), tokens, repeats, threads)
        json_file.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


def _tokenised(model: str, texts: list[str]) -> list[list[int]]:
    """User's messages as prompts."""
    tokenizer = load_model(model).tokenizer
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def main(arguments: list[str] | None = None) -> int:
    """Run the script and return its exit code: 0, or 2 after one line on stderr that says what was wrong."""
    app = typer.Typer(add_completion=False)
    app.command()(run)
    return commandline.run(app, "python -m jaxspec.bench.peers", arguments)


if __name__ == "__main__":
    sys.exit(main())
