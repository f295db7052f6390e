"""The app and its exit codes. Commands are imported when they are asked for (`regard.cli.commands`)."""

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
    """Prints the version and ends, where --version was given."""
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
    """Takes the options before any command, and refuses commands that are not for several processes."""
    process = _torchrun_process()
    if process is not None and process.world_size > 1 and context.invoked_subcommand != "train":
        raise OptionError(
            f"`regard {context.invoked_subcommand}` is for one process, torchrun started {process.world_size}: "
            "start it without; `regard train` takes several"
        )


def _torchrun_process() -> Process | None:
    """Returns this process among those that torchrun started; None where it did not, and PyTorch is not needed yet."""
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
        # Every process warns of the same; one line of it is enough.
        warnings.showwarning = _drop_warning
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C, without a word
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
    except (KeyboardInterrupt, typer.Abort):  # the second is what older ones of typer make of it
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
        # gloo's threads may still hold tensors, and Python's own way to end would abort with them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code or 0)


def _explain_exception(error: Exception) -> int | None:
    """Prints what an exception of the parser or of the memory says, and returns the exit code; None for any other: it
    is a bug, and wants its traceback."""
    # A usage error of the parser knows how to show itself.
    show = getattr(error, "show", None)
    if show is not None:
        show()
        return int(getattr(error, "exit_code", 2))
    from regard.devices import requested_memory  # it needs PyTorch, which has been imported where memory ran out

    asked = requested_memory(error)
    if asked is None:
        return None
    print_error(f"out of memory: {asked}. {LOWER}")
    return 2
