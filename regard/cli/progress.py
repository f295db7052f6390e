"""The progress of a training on a terminal: a bar with speed and time left; elsewhere lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from regard.cli.show import console
from regard.errors import printable
from regard.lab.base import Shown
from regard.train.progress import Lines, Progress, format_metrics


class _TwoLineProgress(RichProgress):
    """A bar, and the metrics in a line below it, so that a narrow terminal has room for both."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields the bar, then the metrics of each task that has any."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["metrics"]:
                yield Text(printable(task.fields["metrics"]), style="dim", no_wrap=True, overflow="ellipsis")


class Bar(Progress):
    """The progress of one training as a live bar."""

    def __init__(self, name: str, where: Console) -> None:
        self.bar = _TwoLineProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("·"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=where,
        )
        self.task = self.bar.add_task(escape(printable(name)), total=None, metrics="")
        self.training = ""  # loss and speed of the last steps
        self.evaluation = ""  # metrics of the last evaluation

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        self.bar.console.print(printable(text), style="dim", markup=False)

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        metrics = {key: x for key, x in values.items() if x is not None and not key.startswith("train/")}
        # Training steps have a learning rate; evaluations have none.
        if "lr" in values:
            self.training = format_metrics(metrics)
        else:
            self.evaluation = format_metrics(metrics)
        text = f"{self.training}  {self.evaluation}".strip()
        self.bar.update(self.task, completed=step, total=total, metrics=text)


def training_progress(name: str) -> Progress:
    """Returns a live bar on a terminal, else lines for a log."""
    screen = console(stderr=True)
    if screen.is_terminal:
        return Bar(name, screen)
    return Lines(name, partial(screen.print, soft_wrap=True))


def experiment_progress() -> Shown:
    """Returns the progress of an experiment: messages, and a bar or lines for each training, on stderr."""
    screen = console(stderr=True)
    return Shown(partial(screen.print, soft_wrap=True), training_progress)
