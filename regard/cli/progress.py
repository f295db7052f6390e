"""The progress of a training on a terminal: a bar with speed and time left; elsewhere lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from regard.cli.show import console
from regard.train.progress import Lines, Progress, format_metrics


class _Below(RichProgress):
    """A bar, and what was measured in a line below it, so that a narrow terminal has room for both."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["said"]:
                yield Text(task.fields["said"], style="dim", no_wrap=True, overflow="ellipsis")


class Bar(Progress):
    """A live bar."""

    def __init__(self, name: str, where: Console) -> None:
        self.bar = _Below(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("·"),
            TimeRemainingColumn(),
            TextColumn("left"),
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
        telling = {k: x for k, x in values.items() if x is not None and not k.startswith("train/")}
        known = format_metrics(telling)
        if "lr" in values:
            self.speed = known
        else:
            self.measured = known
        self.bar.update(self.task, completed=step, total=total, said=f"{self.speed}  {self.measured}".strip())


def shown(name: str) -> Progress:
    """A bar where someone watches, lines in a log."""
    where = console(stderr=True)
    return Bar(name, where) if where.is_terminal else Lines(name, partial(where.print, soft_wrap=True))
