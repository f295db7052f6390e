"""The app and its exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer

from regard.cli import (
    bench,
    check,
    convert,
    cost,
    data,
    design,
    doctor,
    eject,
    evaluate,
    export,
    generate,
    grade,
    heads,
    mechanisms,
    plot,
    serve,
    summarize,
    sweep,
    train,
    view,
)
from regard.cli.show import console, print_error, print_warning
from regard.devices import requested_memory
from regard.errors import OptionError, RegardError
from regard.train import Interrupted
from regard.train.distributed import Process
from regard.version import __version__

LOWER = "Lower the batch or the number of tokens, or take a smaller model or a shorter dtype"
HELP = "Build attention mechanisms, check that they are right, train models with them, and see what they attend to."

app = typer.Typer(
    name="regard",
    help=HELP,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run")(train.run)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("eject")(eject.eject)
app.command("predict")(evaluate.predict)
app.command("generate")(generate.generate)
app.command("summarize")(summarize.summarize)
app.command("sweep", cls=sweep.PairListCommand)(sweep.sweep)
app.command("runs")(train.runs)
app.command("report")(train.report)
app.command("world")(data.world)
app.add_typer(data.data, name="data")
app.command("design")(design.design)
app.command("check")(check.check)
app.command("grade")(grade.grade)
app.command("mechanisms")(mechanisms.mechanisms)
app.command("cost")(cost.cost)
app.command("bench")(bench.bench)
app.command("convert")(convert.convert)
app.command("export")(export.export)
app.command("view")(view.view)
app.command("serve")(serve.serve)
app.command("heads", cls=heads.HeadsCommand)(heads.heads)
app.add_typer(plot.plot, name="plot")
app.command("doctor")(doctor.doctor)


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
    processes = Process.from_environment().world_size
    if processes > 1 and context.invoked_subcommand != "train":
        raise OptionError(
            f"`regard {context.invoked_subcommand}` is for one process, torchrun started {processes}: "
            "start it without; `regard train` takes several"
        )


def _drop_warning(*place: Any, **named: Any) -> None:
    """Takes the place of `warnings.showwarning` and prints nothing."""


def main() -> None:
    """Runs the command line and turns errors and warnings into one line, and errors into an exit code."""
    process = Process.from_environment()
    warnings.showwarning = print_warning
    if not process.is_main:
        # Every process warns of the same; one line of it is enough.
        warnings.showwarning = _drop_warning
    try:
        code = app(standalone_mode=False)
    except Interrupted as stopped:
        if process.is_main:
            console(stderr=True).print(str(stopped), soft_wrap=True)
        code = 130
    except RegardError as error:
        message = str(error)
        if not process.is_main:
            message = f"process {process.rank}: {error}"
        print_error(message)
        code = 2
    except KeyboardInterrupt:
        print_error("interrupted")
        code = 130
    except Exception as error:
        # A usage error of the parser knows how to show itself; anything else is a bug, and wants its traceback.
        show = getattr(error, "show", None)
        asked = requested_memory(error)
        if asked is not None:
            print_error(f"out of memory: {asked}. {LOWER}")
            code = 2
        elif show is not None:
            show()
            code = getattr(error, "exit_code", 2)
        elif process.world_size > 1:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
        else:
            raise
    if process.world_size > 1:
        # gloo's threads may still hold tensors, and Python's own way to end would abort with them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code or 0)
