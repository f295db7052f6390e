"""Progress of a training: objects that show it, and the meter of its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from regard import cost
from regard.models import Model
from regard.train.tasks.base import Task

HIDDEN = ("step", "tokens", "seconds", "lr", "norm")  # metrics that a line leaves out


class SpeedMeter:
    """Measures tokens a second and the share of the device's peak FLOPs that they need (MFU; None if it is unknown)."""

    def __init__(
        self, model: Model[Any], task: Task, device: torch.device, dtype: torch.dtype | None, devices: int = 1
    ) -> None:
        tokens = task.length + (task.source or 0)
        # Useful FLOPs of a token: the backward pass takes twice those of the forward pass.
        self.flops = 3 * model.summary(task.length, task.source).useful / tokens
        name = device.type
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        peak = cost.peak(name, dtype or torch.float32)
        self.peak: float | None = None
        if peak is not None:
            self.peak = peak * devices
        self.last = (0, 0.0)  # tokens and seconds at the last reading

    def read(self, tokens: int, seconds: float) -> dict[str, float | None]:
        """Returns tokens per second and MFU since the last reading; arguments are totals of the run so far."""
        last_tokens, last_seconds = self.last
        self.last = (tokens, seconds)
        rate = (tokens - last_tokens) / max(seconds - last_seconds, 1e-9)
        mfu: float | None = None
        if self.peak is not None:
            mfu = round(rate * self.flops / self.peak, 4)
        return {"tokens_per_second": round(rate, 1), "mfu": mfu}

    def leave_out(self, seconds: float) -> None:
        """Subtracts seconds in which nothing was trained, as in an evaluation, from the next reading."""
        tokens, last = self.last
        self.last = (tokens, last + seconds)


class Progress:
    """Shows nothing, which is the default for calls from Python; subclasses override `note` and `show`."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, text: str) -> None:
        """Shows a line about the training as a whole."""

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        """Shows what was measured at a step."""


class ProgressGroup(Progress):
    """Passes everything on to several others."""

    def __init__(self, parts: list[Progress]) -> None:
        self.parts = parts

    def __enter__(self) -> Progress:
        for part in self.parts:
            part.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for part in reversed(self.parts):
            part.__exit__(*raised)

    def note(self, text: str) -> None:
        for part in self.parts:
            part.note(text)

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.show(step, total, values)


class Lines(Progress):
    """Writes a line of text at most every few seconds, for logs; evaluations and the last step always get one."""

    def __init__(self, name: str, write: Callable[[str], Any], seconds: float = 10.0) -> None:
        self.name = name
        self.write = write
        self.seconds = seconds
        self.last = -seconds
        self.first: tuple[int, float] | None = None  # step and time of the first line, from which the rest is guessed

    def note(self, text: str) -> None:
        self.write(f"{self.name}: {text}")

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self.first = self.first or (step, now)
        is_training = "lr" in values  # an evaluation has no learning rate
        if is_training and step < total and now - self.last < self.seconds:
            return
        self.last = now
        left = self._time_left(step, total, now)
        known = {name: value for name, value in values.items() if value is not None}
        self.write(f"{self.name}: step {step:,} of {total:,}{left}  {format_metrics(known)}")

    def _time_left(self, step: int, total: int, now: float) -> str:
        """Returns how long the rest will take, in words; "" if it cannot be estimated yet."""
        assert self.first is not None
        first_step, first_time = self.first
        done = step - first_step
        if not done or step >= total:
            return ""
        return f", {(now - first_time) / done * (total - step):,.0f} s left"


def format_metrics(values: Mapping[str, Any]) -> str:
    """Returns the metrics, without those in HIDDEN, as one line of text."""
    return "  ".join(_format_metric(name, value) for name, value in values.items() if name not in HIDDEN)


def _format_metric(name: str, value: Any) -> str:
    if value is None:
        return f"{name.replace('mfu', 'MFU')} unknown"
    if name == "tokens_per_second":
        return f"{value:,.0f} tokens/s"
    if name == "mfu":
        return f"MFU {value:.1%}"
    if "accuracy" in name:
        return f"{name} {value:.1%}"
    return f"{name} {value:.4g}"
