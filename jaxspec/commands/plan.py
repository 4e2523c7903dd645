"""`jaxspec plan`: count what a model needs before running it."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from jaxspec.config import DRAFT_TOKENS, EngineConfig
from jaxspec.errors import ConfigError


class _Plan(TyperGroup):
    """A plan of its own where no command is named."""

    context_class = typer.Context


app = typer.Typer(cls=_Plan, invoke_without_command=True, no_args_is_help=True, rich_markup_mode="markdown")

DEFAULTS = EngineConfig()
Model = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="A name in configs/models, a Hugging Face folder or its config.json, or a .gguf file: only its shape "
        "is read.",
    ),
]
Topology = Annotated[
    str,
    typer.Option(
        metavar="CHIP:SHAPE",
        help="TPUs and how many each way, of v4, v5e, v5p, v6e or tpu7x, such as v5p:2x2x2; or GPUs, such as h100:8.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens of a sequence, prompt and output; the model's own if not given."),
]
Batch = Annotated[int, typer.Option(metavar="N", help="Sequences at once.")]
KvDtype = Annotated[
    str, typer.Option(metavar="TEXT", help="Format of keys and values: bfloat16 (auto), float32, int8, fp8 or int4.")
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="Format of the weights: bfloat16 (auto), float32, int8, fp8, fp8_block, int4 or int4_symmetric.",
    ),
]
Efficiency = Annotated[
    float | None,
    typer.Option(metavar="X", help="Share of its bandwidth that memory gives; one that was measured if not given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; its sizes are in bytes.")]


@app.callback()
def plan(
    ctx: typer.Context,
    model: Model = DEFAULTS.model,
    topology: Topology = "v6e:1x1",
    batch: Batch = 1,
    context: Context = None,
    prompt: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of it that are the prompt; half if not given.")
    ] = None,
    weights: Weights = "auto",
    kv_dtype: KvDtype = "auto",
    drafter: Annotated[
        str, typer.Option(metavar="NAME", help="none, ngram, medusa, or draft_model:MODEL with the model that drafts.")
    ] = "none",
    draft_tokens: Annotated[
        int | None, typer.Option(metavar="N", help=f"Draft tokens of a round; {DRAFT_TOKENS} if not given.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Chance that a draft is accepted where those before it are; if not given 0.7 of a draft model, 0.5 of "
            "ngram.",
        ),
    ] = None,
    tau: Annotated[
        float | None, typer.Option(metavar="X", help="Tokens of a round as you measured them, instead of --acceptance.")
    ] = None,
    medusa_heads: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="medusa: folder of the heads, whose tree.json tells what they are worth."),
    ] = None,
    draft_parallel: Annotated[
        str, typer.Option(metavar="NAME", help="A draft model is sharded over the devices, or replicated on each.")
    ] = "sharded",
    data_parallel: Annotated[
        int, typer.Option(metavar="N", help="Replicas: groups of devices that have the whole model each.")
    ] = 1,
    prefill_chunk: Annotated[
        int, typer.Option(metavar="N", help="Prompt tokens written between two rounds.")
    ] = DEFAULTS.prefill_chunk,
    efficiency: Efficiency = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="batch|slice", help="Find the largest batch that fits, or the smallest slice of the chip."
        ),
    ] = None,
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the very steps for these TPUs, and print what the compiler says beside the estimate.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Plan a model on chips before you rent them: memory, step times and tokens a second.

    Bytes are those of the arrays that each device has, in the tiles of a TPU; a device is what JAX calls one, half a
    chip of tpu7x. Times are rooflines: what memory, matrix units and links need at least, memory at the share of its
    bandwidth that a published run had. Every assumption is printed. `jaxspec plan kv` counts memory alone, in all
    formats; `jaxspec plan ladder` plays requests through.

    Examples:

    - `jaxspec plan --model llama-3.3-70b --topology v6e:2x4 --batch 32 --context 8192 --weights int8 --kv-dtype int8`

    - `jaxspec plan --model llama-3.3-70b --topology v5p:2x2x2 --drafter draft_model:llama-3.1-8b --acceptance 0.75`

    - `jaxspec plan --model llama-3.1-8b --topology v5e:2x2 --context 8192 --drafter medusa --tau 2.5 --draft-tokens 15`

    - `jaxspec plan --model llama-3.3-70b --topology h100:8 --context 8192 --weights fp8 --fit batch`

    - `jaxspec plan --model llama-3.3-70b --topology v5e:2x4 --batch 32 --context 8192 --fit slice --json`
    """
    if ctx.invoked_subcommand is not None:
        if any(str(ctx.get_parameter_source(name)).endswith("COMMANDLINE") for name in ctx.params):
            raise ConfigError(f"options of plan {ctx.invoked_subcommand} come after its name")
        return 0
    _check_choice("draft-parallel", draft_parallel, "sharded", "replicated")
    if fit is not None:
        _check_choice("fit", fit, "batch", "slice")
    if draft_parallel != "sharded" and not drafter.startswith("draft_model"):
        raise ConfigError("--draft-parallel is of a draft model: give --drafter draft_model:MODEL")
    _without_accelerators()
    from jaxspec.commands.plan_step import plan_step
    from jaxspec.plan.roofline import EFFICIENCY
    from jaxspec.plan.speed import Luck

    options = {
        "model": model,
        "topology": topology,
        "batch": batch,
        "context": context,
        "prompt": prompt,
        "weights": weights,
        "kv_dtype": kv_dtype,
        "replicas": data_parallel,
        "drafter": drafter,
        "draft_tokens": draft_tokens,
        "draft_shared": draft_parallel == "sharded",
        "medusa_heads": medusa_heads,
        "prefill_chunk": prefill_chunk,
    }
    return plan_step(
        options, Luck(acceptance, tau), EFFICIENCY if efficiency is None else efficiency, fit, compiles, as_json
    )


def _without_accelerators() -> None:
    """Plans need none, and are not to look for one; jax reads this when it is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _check_choice(option: str, value: str, *known: str) -> None:
    if value not in known:
        raise ConfigError(f"--{option} must be {' or '.join(known)}, not {value!r}")


@app.command()
def ladder(
    model: Model = "llama-3.3-70b",
    topology: Topology = "v6e:2x4",
    requests: Annotated[int, typer.Option(metavar="N", help="Requests, all there from the start.")] = 100,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence at most.")] = 8192,
    prompt: Annotated[
        int, typer.Option(metavar="N", help="Tokens of every prompt; answers are spread evenly up to the rest.")
    ] = 4096,
    shared: Annotated[float, typer.Option(metavar="X", help="Part of every prompt that all begin with.")] = 0.5,
    weights: Weights = "int8",
    kv_dtype: KvDtype = "int8",
    draft_model: Annotated[str, typer.Option(metavar="TEXT", help="The model that drafts.")] = "llama-3.1-8b",
    draft_tokens: Annotated[
        int, typer.Option(metavar="N", help="Draft tokens of a round at most: as many are taken as are fastest.")
    ] = DRAFT_TOKENS,
    acceptance: Annotated[
        float, typer.Option(metavar="X", help="Chance that a draft is accepted where those before it are.")
    ] = 0.7,
    efficiency: Efficiency = None,
    as_json: AsJson = False,
) -> int:
    """Tell what pages, narrow formats, speculation and the prefix cache are each worth to a batch of requests.

    The first rung is a cache of contiguous rows as long as the context, in bfloat16, whose batches end with their
    longest answer. Each further rung adds one thing to all before it. Times are those of `jaxspec plan`.

    Examples:

    - `jaxspec plan ladder`

    - `jaxspec plan ladder --topology v5p:2x2x2 --requests 500 --prompt 7168 --shared 0.9 --kv-dtype fp8 --json`
    """
    _without_accelerators()
    from jaxspec.commands.plan_step import plan_ladder
    from jaxspec.plan.ladder import Demand
    from jaxspec.plan.roofline import EFFICIENCY

    demand = Demand(
        model=model,
        topology=topology,
        requests=requests,
        context=context,
        prompt=prompt,
        shared=shared,
        kv_dtype=kv_dtype,
        weights=weights,
        draft=draft_model,
        acceptance=acceptance,
        draft_tokens=draft_tokens,
        efficiency=EFFICIENCY if efficiency is None else efficiency,
    )
    return plan_ladder(demand, as_json)


@app.command()
def kv(
    model: Model = DEFAULTS.model,
    context: Context = None,
    batch: Batch = 1,
    kv_dtype: KvDtype = "auto",
    weights: Weights = "auto",
    page_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a cache page; 128 if not given, 256 of int8 and fp8."),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Tell what fits into so many GiB, weights included. Example: --memory 80"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Count the memory of keys, values and weights in every format, and tell what fits into yours.

    Bytes are those of the arrays that the engine has on an accelerator, scales included; no weights are needed.
    Activations and what a compiled program wants for itself come on top. GB are 10⁹ bytes, GiB are 2³⁰.

    Examples:

    - `jaxspec plan kv --model llama-3.3-70b --context 8192 --batch 32`

    - `jaxspec plan kv --model llama-3.3-70b --context 128000 --kv-dtype int8 --weights int4 --memory 80`

    - `jaxspec plan kv --model ./my-model/config.json --batch 64 --json`
    """
    if memory is not None and not 0 < memory * 2**30 < float("inf"):
        raise ConfigError(f"memory must be above 0 GiB, not {memory}")
    _without_accelerators()
    from jaxspec.plan.memory import plan_memory
    from jaxspec.plan.report import GIB, make_fields, make_report
    from jaxspec.plan.shape import read_shape

    plan = plan_memory(read_shape(model), context, batch, kv_dtype, weights, page_size)
    limit = None if memory is None else int(memory * GIB)
    if as_json:
        print(json.dumps(make_fields(plan, limit), indent=1))
        return 0
    console = Console(highlight=False)
    for part in make_report(plan, limit):
        console.print(part)
    return 0
