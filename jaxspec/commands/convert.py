"""`jaxspec convert`: write a model to a new folder, in another layout, another type or fewer bits."""

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.commands.running import interruptible


def convert(
    model: Annotated[str, typer.Argument(metavar="SRC", help="The model, given like --model of other commands.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; there must be none yet.")],
    layout: Annotated[
        str, typer.Option("--format", metavar="TEXT", help="safetensors, as on the Hugging Face hub, or orbax.")
    ] = "safetensors",
    weights: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="As for other commands, such as bfloat16 or int8; auto is the type that each tensor has, and float32 "
            "for a GGUF file.",
        ),
    ] = "auto",
    max_shard_size: Annotated[float, typer.Option(metavar="GB", help="Size of a safetensors file at most.")] = 5.0,
) -> int:
    """Write a model to a new folder, which --model takes, tensor by tensor.

    The folder is complete or not there at all. In safetensors and not quantised it is one that transformers loads too.

    Examples:

    - `jaxspec convert smollm2-135m smollm2 --weights bfloat16`

    - `jaxspec convert meta-llama/Llama-3.1-8B-Instruct llama-int8 --weights int8 --max-shard-size 2`

    - `jaxspec convert model.gguf checkpoint --format orbax`
    """
    with interruptible(lambda: f"{destination} was not made"):
        from jaxspec.models import saving

        written = saving.convert(model, destination, layout, weights, max_shard_size)
    types = " + ".join(written.types)
    print(f"{written.tensors} tensors, {written.bytes / saving.GB:.3f} GB, {types}: {destination}")
    return 0
