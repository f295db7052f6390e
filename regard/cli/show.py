"""Printing: tables for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for a table in a file."""
    found = Console(stderr=stderr, highlight=False, markup=False)
    if not found.is_terminal:
        found.width = max(found.width, 120)
    return found


def error_line(message: str) -> None:
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def warning_line(message: Warning | str, *place: Any, **named: Any) -> None:
    """In place of `warnings.showwarning`: what is the matter, without the line of Python that noticed it."""
    console(stderr=True).print(Text.assemble(("warning: ", "bold yellow"), str(message)), soft_wrap=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def table(*columns: str, title: str | None = None, **options: Any) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", **options)
    for column in columns:
        made.add_column(column)
    return made
