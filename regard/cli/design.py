"""`regard design`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from regard.cli.show import console, print_json, table
from regard.data.files import DataError, read_pieces
from regard.errors import OptionError, quote
from regard.lab import design as lab
from regard.lab.design.page import design_page

Result = lab.Design | lab.Identity | lab.Replacement | lab.SharedReplacement | lab.HeadDesign | lab.Fit
_WISHES = "--select, --average, --identity, --replace, --fit or --outputs"


def design(
    keys: Annotated[Path | None, typer.Option(help="A file with one key a line, numbers with commas between.")] = None,
    select: Annotated[int | None, typer.Option(help="Find a query that attends to this key; the first is 0.")] = None,
    average: Annotated[str | None, typer.Option(help="Find a query that averages these keys, such as 0,1.")] = None,
    identity: Annotated[bool, typer.Option("--identity", help="Find a query that selects it for every key.")] = False,
    replace: Annotated[
        int | None,
        typer.Option(help="Find a key in place of this one that --query selects, or averages with --average."),
    ] = None,
    fit: Annotated[str | None, typer.Option(help="Find a query with scores near these, such as 3,3,-2.")] = None,
    query: Annotated[Path | None, typer.Option(help="A file with one query a line, for --replace.")] = None,
    unit: Annotated[bool, typer.Option("--unit", help="With --replace: the new key has length one.")] = False,
    values: Annotated[Path | None, typer.Option(help="A file with one value a line; prints the output, too.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="A file with one token vector a line, for --outputs.")] = None,
    outputs: Annotated[
        Path | None, typer.Option(help="Find Q, K and V of a head with these outputs, one a line; ? for any output.")
    ] = None,
    precision: Annotated[float, typer.Option(help="The share of attention that the chosen keys must get.")] = 0.99,
    scale: Annotated[float, typer.Option(help="The factor of the scores q·k.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file.")] = None,
) -> None:
    """Compute a query, a key or a head that attends to what you choose, or prove that none can.

    Give one of --select, --average, --identity, --replace, --fit and --outputs. --replace 2 --average 0,1,2 finds a key
    with which --query averages a set.
    """
    # Wishes are functions, so that nothing is computed before all options are checked.
    wishes: dict[str, Callable[[], Result]] = {}
    if outputs is not None:
        if tokens is None or keys is not None:
            raise OptionError("--outputs needs --tokens FILE, and no --keys: the keys are made of the tokens")
        wishes["--outputs"] = lambda: lab.design_head(read_rows(tokens), read_rows(outputs, True), precision, scale)
    elif tokens is not None:
        raise OptionError("--tokens belongs to --outputs")
    elif keys is None:
        raise OptionError("--keys FILE is missing: one key a line, numbers with commas between")
    if keys is not None:
        rows = read_rows(keys)
        read = None
        if values is not None:
            read = read_rows(values)
    if select is not None:
        wishes["--select"] = lambda: lab.select(rows, select, precision, scale, read)
    if replace is not None:
        if query is None:
            raise OptionError("--replace needs --query FILE: the queries that shall select the new key")
        queries = read_rows(query)
        wishes["--replace"] = lambda: lab.replace_key(rows, replace, queries, unit, precision, scale)
    if average is not None:
        members = [_parse_key(word) for word in average.split(",")]
        if replace is not None:
            wishes["--replace"] = lambda: lab.share_key(rows, replace, queries, members, unit, precision, scale)
        else:
            wishes["--average"] = lambda: lab.average(rows, members, precision, scale, read)
    if identity:
        wishes["--identity"] = lambda: lab.identity(rows, precision, scale, read)
    if fit is not None:
        wanted = [_parse_number(word, "--fit") for word in fit.split(",")]
        wishes["--fit"] = lambda: lab.fit(rows, wanted, scale)
    _check_wishes(wishes, query is not None or unit, values is not None, out is not None)
    (wish,) = wishes.values()
    result = wish()
    if out is not None and not isinstance(result, lab.Fit):
        design_page(result).write(out)
    if json:
        print_json(result.as_dict())
    else:
        _print_result(result, out)


def _check_wishes(wishes: Collection[str], has_query: bool, has_values: bool, has_page: bool) -> None:
    """Raises an OptionError unless there is exactly one wish, and all other options belong to it."""
    if len(wishes) != 1:
        named = " and ".join(wishes) or "none"
        raise OptionError(f"one wish at a time, got {named}: expected {_WISHES}")
    if has_query and "--replace" not in wishes:
        raise OptionError("--query and --unit belong to --replace")
    if has_values and not {"--select", "--average", "--identity"} & set(wishes):
        raise OptionError("--values belongs to --select, --average and --identity")
    if has_page and "--fit" in wishes:
        raise OptionError("--out has no page for --fit; use --json")


def read_rows(path: Path, open_rows: bool = False) -> Tensor:
    """Returns the vectors of a file [rows, width]: one a line, all of one length; empty lines are skipped.

    With `open_rows` a line may be a question mark: its row is NaN. Errors name the file and the line.
    """
    try:
        text = "".join(read_pieces(path))
    except DataError as error:
        raise lab.DesignError(str(error)) from None
    rows: list[list[float]] = []
    unknown: list[int] = []
    for n, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if open_rows and line.strip() == "?":
            unknown.append(len(rows) + len(unknown))
            continue
        row = [_parse_number(word, f"{path}, line {n}") for word in line.split(",")]
        if rows and len(row) != len(rows[0]):
            raise lab.DesignError(
                f"{path}, line {n}: {len(row)} numbers; expected {len(rows[0])} as in the lines above"
            )
        rows.append(row)
    if not rows:
        raise lab.DesignError(f"{path} is empty; expected lines of numbers with commas between")
    for i in unknown:
        rows.insert(i, [math.nan] * len(rows[0]))
    return torch.tensor(rows, dtype=torch.float64)


def _parse_number(word: str, place: str) -> float:
    """Returns a finite number; raises a DesignError that names the place of any other word."""
    # "nan" and "inf" are numbers to Python; other words are treated like them.
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise lab.DesignError(f"{place}: {quote(word.strip())} is not a finite number")
    return number


def _parse_key(word: str) -> int:
    """Returns the number of a key."""
    if not word.strip().isdecimal():
        raise lab.DesignError(f"--average: {quote(word.strip())} is not the number of a key; expected such as 0,1")
    return int(word)


def _print_result(result: Result, out: Path | None) -> None:
    """Prints the explanation of a result, a table, the output of a designed query, and the path of the page."""
    screen = console()
    screen.print(result.explain(), soft_wrap=True)
    if isinstance(result, lab.Identity):
        screen.print()
        screen.print(_key_table(result))
        _print_matrices(result)
    elif isinstance(result, lab.HeadDesign):
        _print_reached(result)
    elif result.scores is not None and result.weights is not None:
        screen.print()
        screen.print(_weight_table(result.scores, result.weights, len(result.keys)))
    if isinstance(result, lab.Design) and result.output is not None:
        screen.print(f"\nreads {', '.join(f'{x:.4f}' for x in result.output.tolist())}", soft_wrap=True)
    if out is not None:
        screen.print(f"\n{out} has pictures and tables", soft_wrap=True)


def _print_matrices(result: lab.Identity) -> None:
    """Prints the matrix of queries, row by row, and the output of each row if there are values."""
    screen = console()
    for title, matrix in (("Q, a query a row:", result.q), ("reads:", result.output)):
        if matrix is None:
            continue
        screen.print(f"\n{title}", soft_wrap=True)
        for row in matrix.tolist():
            screen.print("  " + ", ".join(f"{x:.4f}" for x in row), soft_wrap=True)


def _print_reached(result: lab.HeadDesign) -> None:
    """Prints the output of each token beside the wanted one."""
    if result.reached is None:
        return
    made = table("token", "reads", "wanted")
    for i, row in enumerate(result.reached.tolist()):
        wanted = "anything"
        if i in result.asked:
            wanted = ", ".join(f"{x:.4g}" for x in result.outputs[i].tolist())
        made.add_row(str(i), ", ".join(f"{x:.3f}" for x in row), wanted)
    screen = console()
    screen.print()
    screen.print(made)


def _key_table(result: lab.Identity) -> Table:
    """Returns a table that says of each key whether some query can select it."""
    answers = {True: "yes", False: "no"}
    made = table("key", "selectable", "margin", "length")
    for d in result.designs:
        made.add_row(str(d.members[0]), answers[d.feasible], f"{d.margin:.4g}", f"{d.beta:.4g}")
    return made


def _weight_table(scores: Tensor, weights: Tensor, keys: int) -> Table:
    """Returns a table of the scores and weights of each key, with the query's number if there are several."""
    scores = torch.atleast_2d(scores)
    weights = torch.atleast_2d(weights)
    several = len(scores) > 1
    made = table("key", "score", "weight")
    if several:
        made = table("query", "key", "score", "weight")
    for t in range(len(scores)):
        for j in range(keys):
            cells = [str(j), f"{float(scores[t, j]):.4f}", f"{float(weights[t, j]):.4f}"]
            if several:
                cells.insert(0, str(t))
            made.add_row(*cells)
    return made
