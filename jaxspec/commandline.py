"""How every command line of the project ends: an error is one line on stderr and exit 2."""

import sys

import typer

from jaxspec.errors import JaxspecError


def run(app: typer.Typer, name: str, arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0, what it returned, or 2 for bad usage or input.

    `name` is how it was called; `arguments` None takes those of the process.
    """
    try:
        return app(arguments, prog_name=name, standalone_mode=False) or 0
    except typer.TyperException as error:
        message = f"{error.format_message()} (see {name} --help)"
    except JaxspecError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or 'output'}: {error.strerror}"
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2
