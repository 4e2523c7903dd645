"""`jaxspec plan`: count what a model needs before running it."""

import json
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError

app = typer.Typer(
    help="Count what a model needs, before running it.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.callback()
def _root() -> None: ...


@app.command()
def kv(
    model: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="A name in configs/models, a Hugging Face folder or its config.json, or a .gguf file: only its shape "
            "is read.",
        ),
    ] = EngineConfig().model,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a sequence, prompt and output; the model's own if not given."),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences at once.")] = 1,
    kv_dtype: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Format of keys and values: bfloat16 (auto), float32, int8, fp8 or int4."),
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Format of the weights: bfloat16 (auto), float32, int8, fp8, fp8_block, int4 or int4_symmetric.",
        ),
    ] = "auto",
    page_size: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a cache page; 128 if not given.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Tell what fits into so many GiB, weights included. Example: --memory 80"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; its sizes are in bytes.")] = False,
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
