"""`regard sweep`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from regard.cli.progress import Bar
from regard.cli.show import console, print_json, table
from regard.errors import OptionError
from regard.lab.base import Shown
from regard.report.markup import duration, number, shorten
from regard.sweep.run import SWEEP_CONFIG, Sweep, format_settings
from regard.sweep.settings import configure_sweep
from regard.train.progress import Lines, Progress
from regard.train.run import timestamped_path

SHOWN = 20  # trials in the terminal's table
SELDOM = 30.0  # seconds between lines about a trial, in a log


class _Seldom(Lines):
    """Lines about trainings that take longer than a moment."""

    def __init__(self, name: str, write: Any) -> None:
        super().__init__(name, write, SELDOM)
        self.last = time.monotonic()

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        if time.monotonic() - self.last >= self.seconds:
            super().show(step, total, values)


class Spread(TyperCommand):
    """A command whose --grid and --search take all the pairs that follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(words: Sequence[str]) -> list[str]:
    """`--grid a=1,2 b=3,4` as `--grid a=1,2 --grid b=3,4`."""
    made: list[str] = []
    option = ""
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0] if word.partition("=")[0] in ("--grid", "--search") else ""
        elif option and "=" in word and made[-1] != option:
            made.append(option)
        elif "=" not in word:
            option = ""
        made.append(word)
    return made


def sweep(
    recipe: Annotated[
        str, typer.Argument(help="A recipe, e.g. lm, or a file.toml; or the folder of a sweep, which goes on.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes of all trials, e.g. data.text=FILE.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V...", help="All combinations of these values, e.g. train.lr=1e-3,2e-3."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES...", help="Where to search: V,V or LOW..HIGH or LOW..HIGH:log or LOW..HIGH:STEP."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="How many trials a search has.")] = None,
    metric: Annotated[str | None, typer.Option(help="What a trial is judged by; the task's own unless said.")] = None,
    maximize: Annotated[
        bool | None, typer.Option("--maximize/--minimize", help="Which is better; by the metric's name unless said.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="So many trials at a time, each a process.")] = 1,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="A database that several machines share; a file unless said.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try those that failed again, from where they were.")] = False,
    variant: Annotated[str | None, typer.Option(help="A variant of the recipe, e.g. full.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; runs/sweep-NAME-<time> unless said.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every training (train.seed) and what is drawn.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to run, e.g. cuda; several for workers: cuda:0,cuda:1; cpu unless said.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train a recipe with many settings: all of a grid, or what a search draws; go on with a sweep that was stopped."""
    if (Path(recipe) / SWEEP_CONFIG).is_file():
        given = (overrides, grid, search, metric, maximize, storage, variant, out, seed)
        if any(x is not None and x != [] for x in given):
            raise OptionError(
                f"{recipe} goes on with what it was begun with: give nothing beside it but --workers, --device, "
                "--retry, --json, and --trials to search further"
            )
        made = Sweep.open(recipe)
        made.extend(trials or 0)
    else:
        config = configure_sweep(
            recipe, overrides or (), grid or (), search or (), trials, variant, metric, maximize, seed
        )
        made = Sweep.create(out or timestamped_path(f"sweep-{Path(recipe).stem}"), config, storage)
    if retry:
        made.study.retry_failed()
    where = console(stderr=True)
    say = partial(where.print, soft_wrap=True)

    def progress(name: str) -> Progress:
        return Bar(name, where) if where.is_terminal else _Seldom(name, say)

    results = made.run((device or "cpu").split(","), workers, Shown(say, progress))
    if json:
        print_json(results)
    else:
        _print(results, made.path)
    raise typer.Exit(1 if results["counts"].get("failed") else 0)


def _print(results: dict[str, Any], path: Path) -> None:
    keys = [p["key"] for p in results["parameters"]]
    sign = -1 if results["maximize"] else 1
    done = sorted((r for r in results["trials"] if r["state"] == "finished"), key=lambda r: sign * r["value"])
    out = console()
    if done:
        made = table("trial", *keys, results["metric"], "at step", "time")
        for row in done[:SHOWN]:
            cells = [row["settings"][key] for key in keys] + [row["value"], row["step"]]
            made.add_row(row["folder"], *map(number, cells), duration(row["seconds"]))
        out.print(made)
    failed = [row for row in results["trials"] if row["state"] == "failed"]
    for row in failed[:SHOWN]:
        said = shorten(row["error"] or "", 160)
        out.print(f"failed: {row['folder']} {format_settings(row['settings'])}: {said}", style="red", soft_wrap=True)
    counts = ", ".join(f"{n:,} {state}" for state, n in results["counts"].items())
    out.print(f"\n{len(results['trials']):,} trials: {counts}", soft_wrap=True)
    if done:
        out.print(f"Best: {results['command']}\nRun: {(path / done[0]['folder']).resolve()}", soft_wrap=True)
    out.print(f"Report: {(path / 'report.html').resolve()}", soft_wrap=True)
