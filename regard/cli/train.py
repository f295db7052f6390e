"""`regard run`, `train`, `runs` and `report`."""

from __future__ import annotations

from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from regard.cli.plugins import again
from regard.cli.progress import experiment_progress, training_progress
from regard.cli.show import console, is_given, print_json, print_outcome, table
from regard.errors import OptionError, RunError, printable
from regard.lab import experiment
from regard.lab.base import EXPERIMENTS, RunOptions, find_experiment
from regard.lab.experiment import override_text
from regard.lab.runs.listing import list_results
from regard.lab.runs.summary import summarize_run
from regard.reading import check_path
from regard.report.markup import count_noun
from regard.reporting import write_report
from regard.train import Interrupted, stage
from regard.train.distributed import Process
from regard.train.keys import list_keys
from regard.train.recipe import Recipe, recipe_names
from regard.train.recipe import load as load_recipe
from regard.train.run import timestamped_path

DEFAULT_RECIPE = "lm"  # the recipe whose keys are listed if none is named
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, e.g. train.lr=3e-4.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write; default: runs/NAME-<time>.")]
Device = Annotated[str | None, typer.Option(help="Where to run, e.g. cuda; default: cpu.")]
Variant = Annotated[str | None, typer.Option(help="A variant of the recipe, e.g. full.")]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Continue a run that was stopped.")]
Seed = Annotated[int | None, typer.Option(help="Short for train.seed=N.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def run(
    name: Annotated[str | None, typer.Argument(help="The experiment, e.g. knowledge; without it, a list.")] = None,
    overrides: Overrides = None,
    variant: Variant = None,
    out: Out = None,
    resume: Resume = None,
    seed: Seed = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Run a whole experiment: trainings, evaluation, and a report."""
    if resume is not None:
        _check_resumed_alone(name, overrides, out, variant, seed)
    elif name is None:
        about = {key: known.about for key, known in EXPERIMENTS.items() if known.is_runnable}
        return _print_list("experiment", about, "regard run NAME", json)
    progress = experiment_progress()
    folder = resume or out or timestamped_path(name or "")
    try:
        if name is None:
            results = experiment.resume(folder, device, progress)
        else:
            options = RunOptions(variant, seed, device)
            results = find_experiment(name).run(folder, overrides or (), options, progress)
    except (Interrupted, KeyboardInterrupt):
        if not (folder / experiment.ASKED).is_file():  # a measurement cannot be resumed, as it is short
            raise
        command = again(f"regard run --resume {folder}")
        raise Interrupted(f"stopped; what was done is saved. Go on with: {command}") from None
    if json:
        print_json(results)
        return
    print_outcome(results)
    _reported(folder)


def _reported(folder: Path) -> None:
    console().print(f"\nReport: {(folder / 'report.html').resolve()}", soft_wrap=True)


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe, e.g. lm or knowledge/pretrain, or a file.toml; without it, a list.")
    ] = None,
    overrides: Overrides = None,
    variant: Variant = None,
    out: Out = None,
    resume: Resume = None,
    seed: Seed = None,
    device: Device = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List the settings of the recipe: keys, values and meanings.")
    ] = False,
    json: Json = False,
) -> None:
    """Train one model by a recipe."""
    if keys:
        return _print_keys(load_recipe(recipe or DEFAULT_RECIPE, overrides or (), variant), json)
    if resume is not None:
        _check_resumed_alone(recipe, overrides, out, variant, seed)
        done = stage.resume(resume, device, training_progress(resume.resolve().name))
    elif recipe is None:
        about = {name: _describe_recipe(name) for name in recipe_names()}
        return _print_list("recipe", about, "regard train NAME", json)
    else:
        changes = list(overrides or ())
        if seed is not None:
            changes.append(f"train.seed={seed}")
        name = recipe
        if recipe.endswith(".toml"):
            name = Path(recipe).stem
        loaded = load_recipe(recipe, changes, variant)
        done = stage.train(loaded, out, device or "cpu", training_progress(name))
    # Of several processes, only one prints.
    if not Process.from_environment().is_main:
        return
    row = summarize_run(done)
    if json:
        print_json(row)
        return
    measured = row["measured"] or "trained"
    if row["best"] is not None and row["best"]["step"] < row["steps"]:
        measured += f" at step {row['best']['step']}, the best checkpoint"
    console().print(f"{row['status']}: {measured}\nRun: {done.path.resolve()}", soft_wrap=True)


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder with the runs.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs, experiments and measurements in a folder."""
    if folder != Path("runs") and not check_path(folder, RunError).is_dir():
        raise RunError(f"{folder} is no folder; expected one with runs in it")
    rows = list_results(folder)
    if json:
        print_json(rows)
    elif not rows:
        console().print(f"no runs in {folder}; `regard train lm data.text=FILE` makes one", soft_wrap=True)
    else:
        _print_runs(rows, folder)


def _print_runs(rows: list[dict[str, Any]], folder: Path) -> None:
    """Prints a table of runs, or, if it is wider than the terminal, two lines for each, so that no name is cut."""
    out = console()
    made = table("run", "what", "mechanism", "status", "steps", "measured")
    blocks: list[Any] = []
    for row in rows:
        name = str(Path(row["path"]).relative_to(folder))
        cells = [str(row[key]) for key in ("recipe", "mechanism", "status", "steps", "measured")]
        made.add_row(name, *cells)
        status = row["status"]
        if row["steps"]:
            place = " at step {0}" if status == "running" else " after {1}"
            status += place.format(row["steps"], count_noun(row["steps"], "step"))
        about = ", ".join(filter(None, (row["recipe"], row["mechanism"], status, row["measured"])))
        blocks += [Text(printable(name), overflow="fold"), Padding(Text(printable(about)), (0, 0, 0, 2))]
    if out.measure(made, options=out.options.update(width=1000)).maximum <= out.width:
        out.print(made)
        return
    for block in blocks:
        out.print(block)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs or experiments.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page to write.")] = None,
) -> None:
    """Write a page about an experiment, or one that compares runs."""
    console().print(f"Report: {write_report(folders, out).resolve()}", soft_wrap=True)


def _print_keys(recipe: Recipe, json: bool) -> None:
    """Prints every key of a recipe with its value, as it would be typed, and its meaning."""
    known = list_keys(recipe)
    if json:
        print_json([key._asdict() for key in known])
        return
    made = table("key", "value", "what it means")
    made.columns[0].no_wrap = True
    for key in known:
        value = "–"
        if key.default is not None:
            value = override_text(key.default) or '""'
        made.add_row(key.name, value, key.meaning)
    console().print(made)
    name = recipe.name
    console().print(f"\n`regard train {name} KEY=VALUE …` changes them; –: not set.", style="dim")


def _describe_recipe(recipe: str) -> str:
    """Returns the first sentence of a recipe's file."""
    lines = (resources.files("regard") / "recipes" / f"{recipe}.toml").read_text("utf-8").splitlines()
    comment = " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    return comment.partition(". ")[0].removesuffix(".")


def _print_list(what: str, about: dict[str, str], then: str, json: bool) -> None:
    """Prints a list of experiments or recipes, and the command `then` that runs one."""
    if json:
        print_json([{what: name, "about": text} for name, text in about.items()])
        return
    made = table(what, "what it does")
    for name, text in about.items():
        made.add_row(name, text)
    console().print(made)
    console().print(f"\n`{then}` starts one; `{then.rsplit(' ', 1)[0]} --help` has the options.", style="dim")


def _check_resumed_alone(*others: Any) -> None:
    """Raises an OptionError if --resume is given with options that belong to the start of a run."""
    if any(map(is_given, others)):
        raise OptionError(
            "--resume continues with the options the run was started with: leave out all others but --device"
        )
