"""The app and its exit codes. Commands are imported when they are used (`regard.cli.commands`)."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.groups import LazyGroup
from regard.cli.show import console, print_error, print_warning
from regard.errors import Interrupted, OptionError, RegardError
from regard.version import __version__

if TYPE_CHECKING:
    from regard.train.distributed import Process

LOWER = "Lower the batch or the number of tokens, or take a smaller model or a shorter dtype"
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended
HELP = "Build attention mechanisms, check that they are right, train models with them, and see what they attend to."

app = typer.Typer(
    name="regard",
    cls=LazyGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    """Prints the version and exits, if --version was given."""
    if wanted:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Handles options before a command; raises an OptionError if torchrun runs a command that is for one process."""
    process = _torchrun_process()
    if process is not None and process.world_size > 1 and context.invoked_subcommand != "train":
        raise OptionError(
            f"`regard {context.invoked_subcommand}` runs in one process, but torchrun started {process.world_size}: "
            "start it without torchrun; only `regard train` runs in several"
        )


def _torchrun_process() -> Process | None:
    """Returns this process's place among those of torchrun; None without torchrun, and without importing PyTorch."""
    if "WORLD_SIZE" not in os.environ:
        return None
    from regard.train.distributed import Process

    return Process.from_environment()


def _drop_warning(*place: Any, **named: Any) -> None:
    """Takes the place of `warnings.showwarning` and prints nothing."""


def main() -> None:
    """Runs the command line and turns errors and warnings into one line, and errors into an exit code."""
    process = _torchrun_process()
    is_main = process is None or process.is_main
    warnings.showwarning = print_warning
    if not is_main:
        # All processes give the same warnings, so one prints them.
        warnings.showwarning = _drop_warning
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer returns this code for Ctrl-C, without a message
            raise KeyboardInterrupt
    except Interrupted as stopped:
        if is_main:
            console(stderr=True).print(str(stopped), soft_wrap=True)
        code = INTERRUPTED
    except RegardError as error:
        message = str(error)
        if process is not None and not is_main:
            message = f"process {process.rank}: {error}"
        print_error(message)
        code = 2
    except (KeyboardInterrupt, typer.Abort):  # older versions of typer raise Abort for Ctrl-C
        if is_main:
            print_error("interrupted")
        code = INTERRUPTED
    except Exception as error:
        code = _explain_exception(error)
        if code is None and process is not None and process.world_size > 1:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
        elif code is None:
            raise
    if process is not None and process.world_size > 1:
        # A normal exit of Python could abort, as threads of gloo may still hold tensors.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code or 0)


def _explain_exception(error: Exception) -> int | None:
    """Prints an error of the parser or an out-of-memory error, and returns the exit code; None for any other exception,
    which is a bug and keeps its traceback."""
    # Usage errors of the parser have a method that prints them.
    show = getattr(error, "show", None)
    if show is not None:
        show()
        return int(getattr(error, "exit_code", 2))
    from regard.devices import requested_memory  # imports PyTorch, which is loaded already if memory ran out

    asked = requested_memory(error)
    if asked is None:
        return None
    print_error(f"out of memory: {asked}. {LOWER}")
    return 2
