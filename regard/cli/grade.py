"""`regard grade`."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from regard.cli.show import align_right, console, print_json, table
from regard.errors import OptionError, printable
from regard.grade import Grade, Grader, ItemOutcome, Spec, load_spec, shipped_specs
from regard.grade.submissions import find_submissions
from regard.reading import check_path
from regard.storage import write_text

SUMMARY = 72  # characters of a fault without a known slip, in the table of a folder
_MARKS = {True: Text("✓", "green"), False: Text("✗", "bold red")}


def grade(
    spec: Annotated[
        str | None, typer.Argument(help="An exercise of regard (see --list), or a TOML file of your own.")
    ] = None,
    path: Annotated[
        Path | None, typer.Argument(help="A Python file, a notebook, or a folder with one submission an entry.")
    ] = None,
    list_specs: Annotated[bool, typer.Option("--list", help="List the specs that come with regard.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Write the file that students fill in (to PATH, else its usual name).")
    ] = False,
    student: Annotated[bool, typer.Option("--student", help="Show only the items that students may see.")] = False,
    gradescope: Annotated[
        Path | None,
        typer.Option(help="Write Gradescope's results.json to this path; for a folder of submissions, NAME.json each."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds for each item; default: the spec's.")] = None,
    memory: Annotated[int | None, typer.Option(help="Megabytes for each submission; default: the spec's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random cases.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Grade students' functions and classes against references, common mistakes, properties and laws."""
    if list_specs:
        _print_specs(json)
        return
    if spec is None:
        raise OptionError("expected a spec: one of `regard grade --list`, or a TOML file of yours")
    wanted = load_spec(spec)
    if template:
        _write_template(wanted, path)
        return
    if path is None:
        raise OptionError(f"expected what to grade: regard grade {spec} FILE, NOTEBOOK or FOLDER")
    keep = None
    if gradescope is not None:
        keep = partial(_write_gradescope, gradescope, path.is_dir())
    grades = _grade_all(wanted, path, seed, {"seconds": seconds, "memory_mb": memory}, keep)
    complete = all(one.full for one in grades)
    if student:
        grades = [one.visible_part() for one in grades]
    if json:
        print_json({"spec": wanted.name, "title": wanted.table.title, "grades": [one.as_json() for one in grades]})
    elif path.is_dir():
        _print_folder(wanted, grades)
    else:
        _print_one(wanted, grades[0])
    raise typer.Exit(0 if complete else 1)


def _grade_all(
    spec: Spec,
    path: Path,
    seed: int,
    limits: dict[str, float | int | None],
    keep: Callable[[Grade], None] | None,
) -> list[Grade]:
    """Returns the grades of all submissions, and shows which one is being graded; `keep` gets each grade at once, so
    that none is lost if the rest is stopped."""
    changes = {name: value for name, value in limits.items() if value is not None}
    allowed = spec.table.limits.but(**changes)
    found = find_submissions(path, spec)
    grades = []
    with console(stderr=True).status("grading") as status, Grader(seed) as grader:
        for n, submission in enumerate(found, 1):
            status.update(f"{n} of {len(found)}: {submission.name}")
            grades.append(grader.grade(spec, submission, allowed))
            if keep is not None:
                keep(grades[-1])
    return grades


def _print_specs(json: bool) -> None:
    specs = [load_spec(name) for name in shipped_specs()]
    if json:
        print_json([{"name": s.name, "title": s.table.title, "points": s.points, "file": s.table.file} for s in specs])
        return
    made = table("spec", "what students write", "names", "points")
    for spec in specs:
        names = "\n".join(export.name for export in spec.exports)
        made.add_row(spec.name, spec.table.title, names, f"{spec.points:g}")
    console().print(align_right(made, 3))


def _write_template(spec: Spec, path: Path | None) -> None:
    """Writes the file that students fill in; raises an OptionError if it exists already."""
    place = check_path(path or spec.table.file, OptionError)
    if not spec.table.template:
        raise OptionError(f"the spec '{spec.name}' has no template")
    if place.is_dir():
        place = place / spec.table.file
    if place.exists():
        raise OptionError(f"{place} is there already; give another name: regard grade {spec.name} OTHER.py --template")
    write_text(place, spec.table.template.lstrip("\n"))
    console().print(f"wrote {place}; then: regard grade {spec.name} {place}", soft_wrap=True)


def _write_gradescope(place: Path, is_folder: bool, grade: Grade) -> None:
    """Writes Gradescope's results of one submission to `place`, or for a folder to NAME.json in it."""
    if is_folder:
        place = place / f"{grade.submission}.json"
    write_text(place, jsonlib.dumps(grade.as_gradescope(), indent=2, ensure_ascii=False))


# Tables


def _print_one(spec: Spec, grade: Grade) -> None:
    """Prints the items of one submission; advice is printed only once."""
    out = console()
    out.print(f"{spec.table.title}: {grade.submission}", style="bold")
    made = table("", "points", "", padding=(0, 1, 0, 0))
    made.columns[1].justify = "right"
    made.columns[1].no_wrap = True
    given: dict[str, str] = {}
    for outcome in grade.outcomes:
        made.add_row(_MARKS[outcome.passed], f"{outcome.score:g}/{outcome.points:g}", _describe(outcome, given))
    out.print(made)
    for note in grade.notes:
        out.print(Text(printable(note), "yellow"))
    if grade.printed.strip():
        out.print(Text(printable(f"It printed:\n{grade.printed.strip()}"), "dim"))
    out.print(f"{grade.score:g} of {grade.points:g} points", style="bold")


def _describe(outcome: ItemOutcome, given: dict[str, str]) -> Text:
    """Returns the name of an item and what is wrong with it; `given` maps words printed before to their item."""
    text = Text(printable(outcome.item))
    if outcome.visibility != "visible":
        text.append(f" ({outcome.visibility.replace('_', ' ')})", "dim")
    for words, mark, style in ((outcome.words, "", "dim"), (outcome.advice, "→ ", "bold")):
        if words in given:
            text.append(f"\n{mark}as at '{given[words]}'", style)
        elif words:
            given[words] = outcome.item
            text.append(f"\n{mark}{printable(words)}", style)
    return text


def _print_folder(spec: Spec, grades: list[Grade]) -> None:
    """Prints a table with a row for each submission and a column for each item, and what the columns are."""
    out = console()
    out.print(_folder_table(grades))
    legend = table("", "item", "points", title="\nItems")
    shown = grades[0].outcomes
    for number, outcome in enumerate(shown, 1):
        hidden = ""
        if outcome.visibility != "visible":
            hidden = f" ({outcome.visibility.replace('_', ' ')})"
        legend.add_row(str(number), outcome.item + hidden, f"{outcome.points:g}")
    out.print(align_right(legend, 2))
    for note in sorted({note for one in grades for note in one.notes if "network" in note}):
        out.print(Text(note, "yellow"))
    full = sum(one.full for one in grades)
    mean = sum(one.score for one in grades) / len(grades)
    out.print(f"\n{len(grades)} submissions, {full} with all points; mean {mean:.1f} of {grades[0].points:g}")


def _folder_table(grades: list[Grade]) -> Table:
    numbers = [str(n) for n in range(1, len(grades[0].outcomes) + 1)]
    made = table("submission", *numbers, "points", "mend first", padding=(0, 1, 0, 0))
    for column in made.columns[1:-1]:
        column.justify = "right"
        column.no_wrap = True
    made.columns[0].overflow = "fold"
    for one in grades:
        cells = [Text(f"{o.score:g}", "green" if o.passed else "bold red") for o in one.outcomes]
        fault = one.first_fault
        words = ""
        if fault is not None:
            words = fault.slip or _summary(fault)
        made.add_row(one.submission, *cells, f"{one.score:g}", printable(words))
    return made


def _summary(fault: ItemOutcome) -> str:
    """Returns in a few words what is wrong: for an error its name and message, without the call."""
    words = fault.words.rpartition(" ends with ")[2] or fault.advice
    return shorten(f"{fault.status}: {words}", SUMMARY, placeholder=" …")
