"""The progress of a training on a terminal: a bar with speed and time left; elsewhere lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from regard.cli.show import console
from regard.train.progress import Lines, Progress, described


class Bar(Progress):
    """A live bar."""

    def __init__(self, name: str, where: Console) -> None:
        self.bar = RichProgress(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}", style="dim"),
            console=where,
        )
        self.task = self.bar.add_task(name, total=None, said="")
        self.speed, self.measured = "", ""

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.stop()

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        if "lr" in values:
            self.speed = described(values)
        else:
            self.measured = described(values)
        self.bar.update(self.task, completed=step, total=total, said=f"{self.speed}  {self.measured}".strip())


def shown(name: str) -> Progress:
    """A bar where someone watches, lines in a log."""
    where = console(stderr=True)
    return Bar(name, where) if where.is_terminal else Lines(name, where.print)
