"""`regard design`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from regard.cli.show import console, print_json, table
from regard.errors import OptionError
from regard.lab import design as lab
from regard.lab.design.page import design_page
from regard.report.canvas import require_matplotlib

Result = lab.Design | lab.Identity | lab.Replacement | lab.Fit


def design(
    keys: Annotated[Path, typer.Option(help="One key a line, numbers with commas between.")],
    select: Annotated[int | None, typer.Option(help="A query that selects this key; the first is 0.")] = None,
    average: Annotated[str | None, typer.Option(help="A query that averages these keys, such as 0,1.")] = None,
    identity: Annotated[bool, typer.Option("--identity", help="A query for every key.")] = False,
    replace: Annotated[int | None, typer.Option(help="A key in place of this one, that --query selects.")] = None,
    fit: Annotated[str | None, typer.Option(help="A query with scores near these, such as 3,3,-2.")] = None,
    query: Annotated[Path | None, typer.Option(help="One query a line, for --replace.")] = None,
    unit: Annotated[bool, typer.Option("--unit", help="The new key has length one.")] = False,
    values: Annotated[Path | None, typer.Option(help="One value a line: what the query reads.")] = None,
    precision: Annotated[float, typer.Option(help="The share of the weight that is wanted.")] = 0.99,
    scale: Annotated[float, typer.Option(help="What the attention multiplies its scores by.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
) -> None:
    """Make a query that attends as wished, or prove that none can.

    Say one of --select, --average, --identity, --replace and --fit.
    """
    rows = read_rows(keys)
    read = None if values is None else read_rows(values)
    wishes: dict[str, Callable[[], Result]] = {}
    if select is not None:
        wishes["--select"] = lambda: lab.select(rows, select, precision, scale, read)
    if average is not None:
        members = [_whole(word) for word in average.split(",")]
        wishes["--average"] = lambda: lab.average(rows, members, precision, scale, read)
    if identity:
        wishes["--identity"] = lambda: lab.identity(rows, precision, scale)
    if replace is not None:
        if query is None:
            raise OptionError("--replace needs --query FILE: the queries that shall select the new key")
        asked = read_rows(query)
        wishes["--replace"] = lambda: lab.replace_key(rows, replace, asked, unit, precision, scale)
    if fit is not None:
        wanted = [_number(word, "--fit") for word in fit.split(",")]
        wishes["--fit"] = lambda: lab.fit(rows, wanted, scale)
    if len(wishes) != 1:
        said = " and ".join(wishes) or "none"
        raise OptionError(
            f"one wish at a time, got {said}: expected --select, --average, --identity, --replace or --fit"
        )
    if (query is not None or unit) and "--replace" not in wishes:
        raise OptionError("--query and --unit belong to --replace")
    if values is not None and not wishes.keys() & {"--select", "--average"}:
        raise OptionError("--values belongs to --select and --average")
    if out is not None:
        if "--fit" in wishes:
            raise OptionError("--out has no page for --fit; use --json")
        require_matplotlib()
    (wish,) = wishes.values()
    found = wish()
    if out is not None and not isinstance(found, lab.Fit):
        design_page(found).write(out)
    if json:
        print_json(found.as_dict())
    else:
        _show(found, out)


def read_rows(path: Path) -> Tensor:
    """One vector a line, all of one length; empty lines are passed over. Errors name the file and the line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise lab.DesignError(f"{path} cannot be read ({reason}); expected lines of numbers with commas") from error
    rows: list[list[float]] = []
    for n, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row = [_number(word, f"{path}, line {n}") for word in line.split(",")]
        if rows and len(row) != len(rows[0]):
            raise lab.DesignError(
                f"{path}, line {n}: {len(row)} numbers; expected {len(rows[0])} as in the lines above"
            )
        rows.append(row)
    if not rows:
        raise lab.DesignError(f"{path} is empty; expected lines of numbers with commas between")
    return torch.tensor(rows, dtype=torch.float64)


def _number(word: str, place: str) -> float:
    try:
        found = float(word)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise lab.DesignError(f"{place}: '{word.strip()}' is not a finite number")
    return found


def _whole(word: str) -> int:
    if not word.strip().isdecimal():
        raise lab.DesignError(f"--average: '{word.strip()}' is not the number of a key; expected such as 0,1")
    return int(word)


def _show(found: Result, out: Path | None) -> None:
    screen = console()
    screen.print(found.explain(), soft_wrap=True)
    if isinstance(found, lab.Identity):
        shown = table("key", "selectable", "margin", "length")
        for d in found.designs:
            shown.add_row(str(d.members[0]), "yes" if d.feasible else "no", f"{d.margin:.4g}", f"{d.beta:.4g}")
        screen.print()
        screen.print(shown)
    elif found.scores is not None and found.weights is not None:
        scores, weights = torch.atleast_2d(found.scores), torch.atleast_2d(found.weights)
        shown = table(*(["query"] if len(scores) > 1 else []), "key", "score", "weight")
        for t in range(len(scores)):
            for j in range(len(found.keys)):
                which = [str(t)] if len(scores) > 1 else []
                shown.add_row(*which, str(j), f"{float(scores[t, j]):.4f}", f"{float(weights[t, j]):.4f}")
        screen.print()
        screen.print(shown)
    if isinstance(found, lab.Design) and found.output is not None:
        screen.print(f"\nreads {', '.join(f'{x:.4f}' for x in found.output.tolist())}", soft_wrap=True)
    if out is not None:
        screen.print(f"\n{out} has pictures and tables", soft_wrap=True)
