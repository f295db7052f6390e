"""Other places that metrics can be sent to: `train.saving.log` names them.

A new one is a class here with `@LOGGERS.add(NAME)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from regard.errors import ExtraMissingError, OptionError, did_you_mean
from regard.registry import Registry
from regard.train.progress import Progress
from regard.train.run import Run

LOGGERS: Registry[type[Logger]] = Registry("logger")


class Logger(Progress):
    """Sends the metrics of a run elsewhere. It is opened with the run, and closed when training ends."""

    def __init__(self, run: Run) -> None:
        """Opens the logger; raises ExtraMissingError if its library is not installed."""


def build_loggers(names: Sequence[str], run: Run) -> list[Logger]:
    """Opens the loggers of these names for a run."""
    for name in names:
        if name not in LOGGERS:
            raise OptionError(f"train.saving.log: no '{name}'.{did_you_mean(name, LOGGERS)}")
    return [LOGGERS[name](run) for name in names]


@LOGGERS.add("tensorboard")
class TensorboardLogger(Logger):
    """Writes the files of tensorboard into the run's folder."""

    def __init__(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ExtraMissingError("train.saving.log: tensorboard is not installed: pip install tensorboard") from None
        self.writer = SummaryWriter(str(run.path / "tensorboard"))

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, step)

    def __exit__(self, *raised: Any) -> None:
        self.writer.close()


class TrackerLogger(Logger):
    """Sends metrics through a `library` that has the interface of wandb."""

    library: ClassVar[str]

    def __init__(self, run: Run) -> None:
        try:
            self.tracker = import_module(self.library)
        except ImportError:
            raise ExtraMissingError(
                f"train.saving.log: {self.library} is not installed: pip install {self.library}"
            ) from None
        self.tracker.init(project="regard", name=run.path.name, config=run.config)

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        known = {name: value for name, value in values.items() if name != "step" and value is not None}
        self.tracker.log(known, step=step)

    def __exit__(self, *raised: Any) -> None:
        self.tracker.finish()


@LOGGERS.add("trackio")
class TrackioLogger(TrackerLogger):
    """Sends metrics to trackio."""

    library = "trackio"


@LOGGERS.add("wandb")
class WandbLogger(TrackerLogger):
    """Sends metrics to Weights & Biases."""

    library = "wandb"
