"""What a training shows while it runs: on a terminal a bar, elsewhere a line now and then; and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import Any

import torch

from regard import cost
from regard.errors import ExtraMissingError, OptionError, did_you_mean
from regard.models import Model
from regard.train.run import Run
from regard.train.tasks.base import Task


class Meter:
    """Tokens a second and the share of the device's peak that they need (MFU); None where its peak is not known."""

    def __init__(
        self, model: Model[Any], task: Task, device: torch.device, dtype: torch.dtype | None, devices: int = 1
    ) -> None:
        T, S = task.length, task.source
        self.flops = 3 * model.summary(T, S).useful / (T + (S or 0))  # a token, forward and backward
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = cost.peak(name, dtype or torch.float32)
        self.peak = None if peak is None else peak * devices
        self.seen: tuple[int, float] | None = None

    def read(self, tokens: int, seconds: float) -> dict[str, float | None]:
        """The speed since the last reading."""
        before, self.seen = self.seen or (0, 0.0), (tokens, seconds)
        rate = (tokens - before[0]) / max(seconds - before[1], 1e-9)
        mfu = None if self.peak is None else round(rate * self.flops / self.peak, 4)
        return {"tokens_per_second": round(rate, 1), "mfu": mfu}


class Progress:
    """Shows nothing; what a library call wants. Subclasses show."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        """Something was measured."""


class Several(Progress):
    """Several at once."""

    def __init__(self, parts: list[Progress]) -> None:
        self.parts = parts

    def __enter__(self) -> Progress:
        for part in self.parts:
            part.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for part in reversed(self.parts):
            part.__exit__(*raised)

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.show(step, total, values)


class Lines(Progress):
    """A line at most every few seconds, for logs."""

    def __init__(self, name: str, write: Any, seconds: float = 10.0) -> None:
        self.name, self.write, self.seconds = name, write, seconds
        self.last = -seconds
        self.first: tuple[int, float] | None = None  # step and time of the first line, from which the rest is guessed

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self.first = self.first or (step, now)
        if "lr" in values and step < total and now - self.last < self.seconds:
            return
        self.last = now
        self.write(f"{self.name}: step {step:,} of {total:,}{self._left(step, total, now)}  {format_metrics(values)}")

    def _left(self, step: int, total: int, now: float) -> str:
        assert self.first is not None
        done = step - self.first[0]
        return f", {(now - self.first[1]) / done * (total - step):,.0f} s left" if done and step < total else ""


def format_metrics(values: Mapping[str, Any]) -> str:
    """Metrics in words, the most telling ones."""
    shown = []
    for name, value in values.items():
        if name in ("step", "tokens", "seconds", "lr", "norm"):
            continue
        if name == "tokens_per_second":
            shown.append(f"{value:,.0f} tokens/s")
        elif name == "mfu":
            shown.append("MFU unknown" if value is None else f"MFU {value:.1%}")
        elif "accuracy" in name:
            shown.append(f"{name} {value:.1%}")
        else:
            shown.append(f"{name} {value:.4g}")
    return "  ".join(shown)


class _Tensorboard(Progress):
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


class _Tracker(Progress):
    """trackio and wandb have one interface."""

    def __init__(self, library: str, run: Run) -> None:
        try:
            self.library = import_module(library)
        except ImportError:
            raise ExtraMissingError(f"train.saving.log: {library} is not installed: pip install {library}") from None
        self.library.init(project="regard", name=run.path.name, config=run.config)

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        self.library.log(
            {name: value for name, value in values.items() if name != "step" and value is not None}, step=step
        )

    def __exit__(self, *raised: Any) -> None:
        self.library.finish()


LOGS = ("tensorboard", "trackio", "wandb")


def logs(names: tuple[str, ...], run: Run) -> list[Progress]:
    """The other places that metrics are sent to."""
    for name in names:
        if name not in LOGS:
            raise OptionError(f"train.saving.log: no '{name}'.{did_you_mean(name, LOGS)}")
    return [_Tensorboard(run) if name == "tensorboard" else _Tracker(name, run) for name in names]
