"""Printing: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from regard.errors import printable

PROSE = 32  # columns that a wrapped text gets at least, if there is room


class SafeConsole(Console):
    """A console that prints control characters, such as an escape in the name of a token, as \\u001b.

    A table in which words would have to be cut is printed in parts, one below the other, each with the first column.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        parts = [part for printed in objects for part in self._fitting(printed)]
        super().print(*parts, **options)

    def _fitting(self, printed: Any) -> list[Any]:
        """Returns a table in parts that fit this console, with empty lines between; anything else unchanged."""
        if not isinstance(printed, Table) or self._width_of(printed).minimum <= self.width:
            return [printed]
        if any(column.overflow == "fold" for column in printed.columns):  # such a table is broken inside its columns
            return [printed]
        parts: list[Any] = []
        for columns in self._divide(printed):
            part = _with_columns(printed, columns)
            if parts:
                part.title = None
                parts.append("")
            parts.append(part)
        return parts

    def _divide(self, made: Table) -> list[list[Column]]:
        """Returns the columns of each part: the first of the table, and as many of the others as there is room for."""
        first, *others = made.columns
        divided = [[first]]
        for column in others:
            if len(divided[-1]) > 1 and self._needed(made, [*divided[-1], column]) > self.width:
                divided.append([first])
            divided[-1].append(column)
        return divided

    def _needed(self, made: Table, columns: list[Column]) -> int:
        """Returns the width that these columns need: no word is cut, and texts get at least PROSE columns."""
        total = 0
        for column in columns:
            width = self._width_of(_with_columns(made, [column]))
            least = max(width.minimum, min(width.maximum, PROSE))
            if column.no_wrap:
                least = width.maximum
            total += least + 2
        return total

    def _width_of(self, made: Table) -> Measurement:
        """Returns the least and the greatest width of a table, whatever the width of this console."""
        return self.measure(made, options=self.options.update(width=10_000))

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text to print; every string comes through here, those in tables too."""
        return super().render_str(printable(text), **options)


def _with_columns(made: Table, columns: list[Column]) -> Table:
    """Returns a copy of a table with these columns alone, renumbered."""
    part = copy(made)
    part.columns = [replace(column, _index=place) for place, column in enumerate(columns)]
    return part


def console(stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal or as COLUMNS says; without either, 120 columns wide."""
    # No markup, as names of files and models may have brackets.
    made = SafeConsole(stderr=stderr, highlight=False, markup=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120
    return made


def print_error(message: str) -> None:
    """Prints the one line that a failed command ends with."""
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)


def print_warning(message: Warning | str, *place: Any, **named: Any) -> None:
    """Prints a warning in place of `warnings.showwarning`, without the line of Python that noticed it."""
    console(stderr=True).print(Text.assemble(("warning: ", "bold yellow"), printable(str(message))), soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints data as JSON; values that JSON does not have, such as paths, become text."""
    # JSON has the same escapes, so that the data is read back unchanged.
    print(printable(json.dumps(data, indent=2, ensure_ascii=False, default=str)))


def print_text(text: str, end: str = "\n") -> None:
    """Prints a text of a model: unchanged to a file or a pipe; on a terminal, with control characters escaped."""
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
    """Aligns the columns from the `first` on to the right, for numbers, and returns the table."""
    for column in made.columns[first:]:
        column.justify = "right"
    return made


def print_outcome(results: Mapping[str, Any]) -> None:
    """Prints the table of an experiment's outcome, if it has one: columns and rows of text."""
    if "outcome" not in results:
        return
    made = table(*results["outcome"]["columns"])
    for row in results["outcome"]["rows"]:
        made.add_row(*row)
    console().print(made)


def is_given(value: object) -> bool:
    """Returns whether an option was given; a repeatable option is an empty list if it was not."""
    return value is not None and value != []
