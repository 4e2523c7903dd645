"""The `jaxspec` command. Errors are one line on stderr and exit 2; an interrupted run exits 130."""

from importlib.metadata import version
from typing import Annotated

import typer

from jaxspec import commandline
from jaxspec.commands import bench, plan
from jaxspec.commands.batch import batch
from jaxspec.commands.convert import convert
from jaxspec.commands.generate import generate

app = typer.Typer(
    help="Exact, memory-lean text generation in JAX. `jaxspec COMMAND --help` explains every option.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
)
app.command()(generate)
app.command()(batch)
app.command()(convert)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(version("jaxspec"))
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 rows with errors, 2 bad usage or input, 130 interrupted."""
    return commandline.run(app, "jaxspec", arguments)
