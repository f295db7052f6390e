"""The app and its exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import regard
from regard.cli import check, generate, mechanisms
from regard.cli.show import error_line
from regard.errors import RegardError

app = typer.Typer(
    name="regard",
    help="Build attention mechanisms and check that they are right.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("check")(check.check)
app.command("generate")(generate.generate)
app.command("mechanisms")(mechanisms.mechanisms)


def _version(asked: bool) -> None:
    if asked:
        print(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build attention mechanisms and check that they are right."""


def main() -> None:
    """Runs the command line and turns errors into one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except RegardError as error:
        error_line(str(error))
        code = 2
    except KeyboardInterrupt:
        error_line("interrupted")
        code = 130
    except Exception as error:
        show = getattr(error, "show", None)  # a usage error of the parser knows how to show itself
        if show is None:
            raise
        show()
        code = getattr(error, "exit_code", 2)
    sys.exit(code or 0)
