"""`jaxspec bench`: measure."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.bench.questions import choose, read_questions
from jaxspec.commands.options import ENGINE, ConfigOption, read_settings, with_engine_and_sampling
from jaxspec.config import PREFILL_ROW, EngineConfig
from jaxspec.errors import ConfigError

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True, rich_markup_mode="markdown")


DEFAULTS = EngineConfig()
Prompts = Annotated[
    str, typer.Option(metavar="NAME|FILE.jsonl", help="Questions: configs/prompts/NAME.jsonl or a Spec-Bench file.")
]
Model = Annotated[str, typer.Option(metavar="TEXT", help=ENGINE["model"].help)]
KvMemory = Annotated[float, typer.Option(metavar="X", help=ENGINE["kv_memory"].help)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the rows of the table, and more, to a file.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the table; needs pip install 'jaxspec[plots]'.")
]
SCENARIO_NAMES = ("memory", "prefix", "chunks", "throughput", "formats", "offload")


@app.callback()
def _root() -> None: ...


@app.command()
@with_engine_and_sampling
def decode(
    prompts: Prompts = "default",
    drafter: Annotated[
        str, typer.Option(metavar="NAMES", help="Drafters to compare; the others are measured against the first.")
    ] = "none,ngram",
    categories: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these categories. Example: --categories rag,qa")
    ] = None,
    limit_per_category: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N questions of each category.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Measured answers to each question.")] = 5,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of an answer at most. Default: 128.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="Questions of a category answered at once. Default: 1.")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    config: ConfigOption = None,
    **options: Any,
) -> int:
    """Compare the decoding speed of drafters on the same questions.

    Every question is asked `--repeats` times of every drafter, in turns; only decode time counts, from the first round
    to the last token. τ is tokens a round. Predicted is τ over the measured costs of drafting and verifying; in
    Leviathan's formula verification costs a plain step. Ctrl-C prints what is measured so far.

    Examples:

    - `jaxspec bench decode --limit-per-category 1 --repeats 3`

    - `jaxspec bench decode --drafter none,ngram --categories summarization,rag --json rows.json --plot speedup.png`
    """
    own = {"drafter": "none", "max_tokens": max_tokens, "max_batch": max_batch}
    settings = read_settings(config, options | own, max_tokens=128, max_batch=1, seed=0)
    if settings.sampling.samples != 1:
        raise ConfigError("bench takes one sample of each question: leave out --n and --best-of")
    drafters = _names(drafter)
    if not drafters:
        raise ConfigError("--drafter needs a name, such as none,ngram")
    questions = choose(read_questions(prompts), _names(categories or ""), limit_per_category)
    _check_files(json_file, plot_file)
    from jaxspec.commands.bench_decode import compare

    return compare(settings, drafters, questions, repeats, json_file, plot_file)


@app.command()
def engine(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO|all", help="memory, prefix, chunks, throughput, formats, offload or all.")
    ],
    model: Model = DEFAULTS.model,
    prompts: Prompts = "default",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each timed case.")] = 3,
    kv_memory: KvMemory = DEFAULTS.kv_memory,
    json_file: JsonFile = None,
) -> int:
    """Measure what the parts of the engine are worth: pages, prefix cache, chunked prefill, and the whole of it.

    - `memory`: requests that the same memory holds at once, in pages and in a contiguous cache that gives each request
      1,024 slots. Prompts of the lengths of `--prompts`, 128 new tokens. Counted on the books: no model runs.

    - `prefix`: 32 questions over one document of 2,000 tokens, answers of 8, with the prefix cache and without; and two
      conversations, of an agent and a chat, in which each prompt holds all before it: the share of prompt tokens that
      were computed, and that were computed again.

    - `chunks`: 8 requests decode when a prompt of 6,000 tokens comes: the longest wait of any of them for its next
      tokens, and the throughput of all from then on, with the prompt in chunks of 256 and whole.

    - `throughput`: 64 of the questions at once, 128 new tokens, greedy, at batch 1, 8 and 32, plain and with n-gram
      drafts; whole runs, prefill included.

    - `formats`: 48 questions share 64 MiB of cache: how many run at once, and the throughput of all, by `--kv-dtype`.

    - `offload`: 6 documents of 4,096 tokens are asked about twice, one after the other, and the cache holds one:
      the wait for the first token of the second time, computed again, restored from host memory, and from disk.

    Compared cases take turns, and × is over the first of them in the same turn. Ctrl-C prints what is measured so far.

    Examples:

    - `jaxspec bench engine memory --prompts spec_bench.jsonl`

    - `jaxspec bench engine all --repeats 1 --json rows.json`
    """
    if scenario not in ("all", *SCENARIO_NAMES):
        raise ConfigError(f"no scenario named {scenario!r} (there are: all, {', '.join(SCENARIO_NAMES)})")
    config = EngineConfig(model=model, kv_memory=kv_memory, max_batch=8)
    questions = read_questions(prompts)
    _check_files(json_file, None)
    from jaxspec.commands.bench_engine import play

    return play(SCENARIO_NAMES if scenario == "all" else [scenario], config, questions, repeats, json_file)


@app.command()
def kv(
    formats: Annotated[
        str, typer.Option(metavar="NAMES", help="Formats of keys and values; the first is the reference.")
    ] = "float32,bfloat16,int8,fp8,int4",
    policies: Annotated[
        str,
        typer.Option(metavar="NAMES", help="What stays in the cache; all but the first are run with the first format."),
    ] = "full",
    weights: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Formats of weights; all but the first are run with the first KV format."),
    ] = "float32",
    model: Model = DEFAULTS.model,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to score. Default: Python's own documentation.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of it that are scored.")] = 20_000,
    window: Annotated[
        int, typer.Option(min=PREFILL_ROW, metavar="N", help="Tokens read before the cache is emptied.")
    ] = 1024,
    passkey: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Tokens of the passkey prompts; '' leaves them out.")
    ] = "256,1024",
    reach: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Tokens of one text to read on and on, however long; 0 leaves it out."),
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of the timed cases.")] = 3,
    kv_window: Annotated[int, typer.Option(metavar="N", help=ENGINE["kv_window"].help)] = DEFAULTS.kv_window,
    kv_heavy: Annotated[int, typer.Option(metavar="N", help=ENGINE["kv_heavy"].help)] = DEFAULTS.kv_heavy,
    kv_sinks: Annotated[int, typer.Option(metavar="N", help=ENGINE["kv_sinks"].help)] = DEFAULTS.kv_sinks,
    kv_positions: Annotated[str, typer.Option(metavar="TEXT", help=ENGINE["kv_positions"].help)] = (
        DEFAULTS.kv_positions
    ),
    kv_memory: KvMemory = DEFAULTS.kv_memory,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> int:
    """Compare formats of keys and values, what stays of them, and formats of weights: what they save and what they
    change.

    - Bytes a token has in the cache, scales included, and tokens a second of 8 requests decoding at once.

    - Perplexity of a text, read in windows as prompts are: tokens attend to what the format has stored. Beside it how
      often the likeliest token is the reference's, and the divergence KL(reference || format).

    - Passkeys: the share of five-digit numbers, hidden at five depths of prompts of each length, that the model finds.

    - With `--reach`, perplexity along one text, which may be longer than what the model was trained for.

    Cases take turns. Ctrl-C prints what is measured so far.

    Examples:

    - `jaxspec bench kv --json rows.json --plot formats.png`

    - `jaxspec bench kv --formats float32,int8 --weights float32,int8,int4 --tokens 5000 --passkey ''`

    - `jaxspec bench kv --formats float32 --policies full,window,sinks --kv-window 512 --reach 16384 --plot p.png`
    """
    _check_files(json_file, plot_file)
    from jaxspec.bench.kv import Sizes
    from jaxspec.commands.bench_kv import compare

    sizes = Sizes(tokens=tokens, window=window, repeats=repeats, lengths=_lengths(passkey), reach=reach)
    config = EngineConfig(
        model=model,
        kv_memory=kv_memory,
        kv_window=kv_window,
        kv_heavy=kv_heavy,
        kv_sinks=kv_sinks,
        kv_positions=kv_positions,
    )
    return compare(config, _names(weights), _names(formats), _names(policies), text, sizes, json_file, plot_file)


@app.command()
def kernels(
    topology: Annotated[
        str,
        typer.Option(metavar="CHIP:SHAPE", help="TPUs to compile for: v4, v5e, v5p, v6e or tpu7x, such as v5p:2x2x2."),
    ] = "v6e:2x4",
    kernel: Annotated[
        str, typer.Option("--kernels", metavar="NAMES", help="The first three are jaxspec's, the others come with JAX.")
    ] = "attention,append,commit,paged_attention,ragged_paged_attention",
    shape: Annotated[
        str, typer.Option(metavar="NAMES", help="Models whose heads they are compiled for.")
    ] = "llama-70b-tp8,llama-8b,smollm2,gemma",
    dtype: Annotated[
        str, typer.Option(metavar="NAMES", help="Formats of keys and values.")
    ] = "float32,bfloat16,int8,fp8",
    queries: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Query tokens of a row: 1 decodes, others verify, prefill is 64.")
    ] = "1,4,8,16,prefill",
    json_file: JsonFile = None,
) -> int:
    """Compile the TPU kernels with no TPU, and count what the compiler made of them; needs pip install 'jaxspec[tpu]'.

    A TensorCore issues a bundle of instructions a cycle. Where attention has fewer bundles than memory takes cycles to
    hand over the keys and values (HBM), it costs no more than those, however many query tokens there are. Counted are
    the compiler's final programs: each loop's bundles times its trips in a context of 8,192 tokens, vector registers
    spilled, fast memory (VMEM) and copies from HBM (DMAs). Nothing runs, and what waits for what is not known.

    The kernels that JAX publishes are compiled beside, in blocks of 1,024 tokens. They know no draft trees: several
    queries are a chain.

    Ctrl-C prints what is compiled so far.

    Examples:

    - `jaxspec bench kernels --topology v5e:2x4 --shape llama-70b-tp8 --dtype bfloat16 --queries 1,4,8`

    - `jaxspec bench kernels --topology v6e:2x4 --kernels attention --json rows.json`
    """
    _check_files(json_file, None)
    from jaxspec.commands.bench_kernels import compile_all

    return compile_all(topology, _names(kernel), _names(shape), _names(dtype), _names(queries), json_file)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _names(text))
    except ValueError as error:
        raise ConfigError(f"--passkey takes numbers of tokens, such as 256,1024, not {text!r}") from error


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """ConfigError where they could not be written: better said before a long run than after it."""
    for file in (json_file, plot_file):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")
    if plot_file is not None:
        from jaxspec.bench.report import check_plot

        check_plot(plot_file)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
