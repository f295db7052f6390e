"""`regard sweep`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.groups import Command
from regard.cli.progress import Bar
from regard.cli.show import console, is_given, print_json, table
from regard.errors import OptionError
from regard.lab.base import Shown
from regard.reading import check_path
from regard.report.markup import duration, number, shorten
from regard.sweep.results import format_settings
from regard.sweep.run import SWEEP_CONFIG, Sweep
from regard.sweep.settings import configure_sweep
from regard.train.progress import Lines, Progress
from regard.train.run import timestamped_path

MAX_ROWS = 20  # trials in the table on the terminal
LINE_SECONDS = 30.0  # seconds between lines about a trial, in a log


class _RareLines(Lines):
    """Lines of progress only of trainings that take longer, so that the log of many trials stays short."""

    def __init__(self, name: str, write: Any) -> None:
        super().__init__(name, write, LINE_SECONDS)
        # As if a line had been written just now, so that a short trial writes none.
        self.last = time.monotonic()

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        if time.monotonic() - self.last >= self.seconds:
            super().show(step, total, values)


class PairListCommand(Command):
    """A command whose --grid and --search take all KEY=VALUES that follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_options(args))


COMMAND = PairListCommand


def repeat_options(words: Sequence[str]) -> list[str]:
    """Returns `--grid a=1,2 b=3,4` as `--grid a=1,2 --grid b=3,4`, which the parser understands."""
    repeated: list[str] = []
    option = ""  # the option that the following pairs belong to
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            if option not in ("--grid", "--search"):
                option = ""
        elif option and "=" in word and repeated[-1] != option:
            repeated.append(option)
        elif "=" not in word:
            option = ""
        repeated.append(word)
    return repeated


def sweep(
    recipe: Annotated[
        str, typer.Argument(help="A recipe, e.g. lm, or a file.toml; or the folder of a sweep to continue.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of all trials, e.g. data.text=FILE.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V...", help="Try all combinations of these values, e.g. train.lr=1e-3,2e-3."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES...", help="Search these values: V,V or LOW..HIGH or LOW..HIGH:log or LOW..HIGH:STEP."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Number of trials of a search.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="The metric that trials are compared by; default: the task's.")
    ] = None,
    maximize: Annotated[
        bool | None,
        typer.Option("--maximize/--minimize", help="Whether more or less is better; default: by the metric's name."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials that run at a time, each in a process.")] = 1,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="A database that several machines share; default: a file.")
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run failed trials again, from their last checkpoints.")
    ] = False,
    variant: Annotated[str | None, typer.Option(help="A variant of the recipe, e.g. full.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; default: runs/sweep-NAME-<time>.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every training (train.seed) and of the search.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to run, e.g. cuda, or several for workers: cuda:0,cuda:1; default: cpu.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train a recipe with many settings, of a grid or chosen by a search; or continue a sweep that was stopped."""
    if (check_path(recipe, OptionError) / SWEEP_CONFIG).is_file():
        if any(map(is_given, (overrides, grid, search, metric, maximize, storage, variant, out, seed))):
            raise OptionError(
                f"{recipe} continues with the options it was started with: leave out all but --workers, --device, "
                "--retry, --json, and --trials for more trials"
            )
        opened = Sweep.open(recipe)
        opened.extend(trials or 0)
    else:
        config = configure_sweep(
            recipe, overrides or (), grid or (), search or (), trials, variant, metric, maximize, seed
        )
        opened = Sweep.create(out or timestamped_path(f"sweep-{Path(recipe).stem}"), config, storage)
    if retry:
        opened.study.retry_failed()
    screen = console(stderr=True)
    say = partial(screen.print, soft_wrap=True)

    def progress(name: str) -> Progress:
        if screen.is_terminal:
            return Bar(name, screen)
        return _RareLines(name, say)

    results = opened.run((device or "cpu").split(","), workers, Shown(say, progress))
    if json:
        print_json(results)
    else:
        _print_results(results, opened.path)
    if results["counts"].get("failed"):
        raise typer.Exit(1)


def _print_results(results: dict[str, Any], path: Path) -> None:
    """Prints the best trials, those that failed, and where the best run and the report are."""
    keys = [parameter["key"] for parameter in results["parameters"]]
    finished = [row for row in results["trials"] if row["state"] == "finished"]
    # `reverse` keeps the order of equal values, so the first of them stays first.
    finished.sort(key=lambda row: row["value"], reverse=results["maximize"])
    out = console()
    if finished:
        made = table("trial", *keys, results["metric"], "train", "at step", "time")
        for row in finished[:MAX_ROWS]:
            cells = [row["settings"][key] for key in keys] + [row["value"], row["train"], row["step"]]
            made.add_row(row["folder"], *map(number, cells), duration(row["seconds"]))
        out.print(made)
    failed = [row for row in results["trials"] if row["state"] == "failed"]
    for row in failed[:MAX_ROWS]:
        error = shorten(row["error"] or "", 160)
        out.print(f"failed: {row['folder']} {format_settings(row['settings'])}: {error}", style="red", soft_wrap=True)
    counts = ", ".join(f"{n:,} {state}" for state, n in results["counts"].items())
    out.print(f"\n{len(results['trials']):,} trials: {counts}", soft_wrap=True)
    if finished:
        word = "Best"
        if len(finished) > 1 and finished[0]["value"] == finished[-1]["value"]:
            word = f"None is best by {results['metric']}; one of them"
        out.print(f"{word}: {results['command']}\nRun: {(path / finished[0]['folder']).resolve()}", soft_wrap=True)
    out.print(f"Report: {(path / 'report.html').resolve()}", soft_wrap=True)
