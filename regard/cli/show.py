"""Printing: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import printable


class SafeConsole(Console):
    """A console that writes what a terminal would act on, such as an escape in the name of a token, as \\u001b."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text to print; every string comes through here, those in tables too."""
        return super().render_str(printable(text), **options)


def console(stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal, or wide enough for a table in a file."""
    # Names of files and models may hold brackets, which rich would take for markup.
    made = SafeConsole(stderr=stderr, highlight=False, markup=False)
    if not made.is_terminal:
        made.width = max(made.width, 120)
    return made


def print_error(message: str) -> None:
    """Prints the one line that a failed command ends with."""
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)


def print_warning(message: Warning | str, *place: Any, **named: Any) -> None:
    """Prints a warning in place of `warnings.showwarning`, without the line of Python that noticed it."""
    console(stderr=True).print(Text.assemble(("warning: ", "bold yellow"), printable(str(message))), soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints data as JSON; what JSON has no form for, such as a path, becomes text."""
    # JSON has the same escapes, so that what is read back is what was printed.
    print(printable(json.dumps(data, indent=2, ensure_ascii=False, default=str)))


def print_text(text: str, end: str = "\n") -> None:
    """Prints a text of a model: as it is to a file or a pipe, and with escapes to a terminal that would act on them."""
    if sys.stdout.isatty():
        text = printable(text)
    else:
        text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair has no UTF-8
    print(text, end=end, flush=True)


def table(*columns: str, title: str | None = None, **options: Any) -> Table:
    """Returns an empty table without borders."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", **options)
    for column in columns:
        made.add_column(column)
    return made


def align_right(made: Table, first: int) -> Table:
    """Aligns the columns from the `first` on to the right, as numbers want it, and returns the table."""
    for column in made.columns[first:]:
        column.justify = "right"
    return made


def print_outcome(results: Mapping[str, Any]) -> None:
    """Prints the table of what came out of an experiment, where it has one: columns and rows of text."""
    if "outcome" not in results:
        return
    made = table(*results["outcome"]["columns"])
    for row in results["outcome"]["rows"]:
        made.add_row(*row)
    console().print(made)


def is_given(value: object) -> bool:
    """Returns whether an option was given; a list that may be repeated is empty where it was not."""
    return value is not None and value != []
