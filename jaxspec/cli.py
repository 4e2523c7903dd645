"""The `jaxspec` command. Errors are one line on stderr and exit 2; an interrupted run exits 130."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from jaxspec.commands import bench, plan
from jaxspec.commands.batch import batch
from jaxspec.commands.convert import convert
from jaxspec.commands.generate import generate
from jaxspec.errors import JaxspecError

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
    try:
        return app(arguments, prog_name="jaxspec", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _fail(f"{error.format_message()} (see jaxspec --help)")
    except JaxspecError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror}")


def _fail(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2
