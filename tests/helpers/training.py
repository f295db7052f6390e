"""What the tests of training share: recipes of the smallest size, a toy task, ways to stop, and what bits a run has."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import regard
from regard.data.batch import Batch
from regard.data.tokenizers import Characters
from regard.train import Run, Task, TrainConfig, Trainer, recipe
from regard.train.progress import Progress
from regard.train.tasks.base import Order

MODEL = ["model.width=16", "model.layers=1", "model.attention.heads=2", "model.position=learned", "data.block=96"]
WORLD = ["data.world.people=12", "data.world.asked=8", "data.world.held_out=2", "data.world.places=40"]
TINY = [*MODEL, *WORLD, "train.batch=8", "train.lr=0.01"]
TINY += ["train.saving.every=0.5", "train.evaluation.every=0.5"]
SENTENCES = ["data.reviews.sentences=60", "data.reviews.held_out=20", "data.length=32"]
SENTENCES += ["train.batch=8", "train.lr=1e-2"]
NOTICES = [
    "data.notices.people=60",
    "data.notices.held_out=10",
    "data.vocabulary=400",
    "data.source=200",
    "data.target=48",
]
WIDTHS = [f"model.{part}.{key}" for part in ("encoder", "decoder") for key in ("width=16", "attention.heads=2")]
SUMMARIES = [*NOTICES, *WIDTHS, "model.decoder.block.hidden=16", "train.batch=4", "train.saving.every=5"]
SUMMARIES += ["train.evaluation.every=6", "train.steps=12"]
SHORT = {"steps": 8, "batch": 4, "lr": 0.01, "saving": {"every": 0}, "evaluation": {"every": 0}}
CPU = torch.device("cpu")
TIMES = ("seconds", "tokens_per_second", "mfu")


def pretraining(*changes: str) -> recipe.Recipe:
    """Returns the built-in recipe of reading at a toy size; 12 steps unless said."""
    return recipe.load("knowledge/pretrain", [*_usual(changes), "train.steps=12", *changes])


def answering(*changes: str) -> recipe.Recipe:
    """Returns the built-in recipe of answering at a toy size; 12 steps unless said."""
    return recipe.load("knowledge/scratch", [*_usual(changes), "train.steps=12", *changes])


def _usual(changes: tuple[str, ...]) -> list[str]:
    """Returns the toy's settings; no world is invented beside documents."""
    if any(change.startswith("data.documents=") for change in changes):
        return [change for change in TINY if change not in WORLD]
    return TINY


class Toy(Task):
    """A task with rows of digits; what it measures is given beforehand, one dict for each evaluation."""

    highest = True

    def __init__(self, rows: int = 10, measured: list[dict[str, float]] | None = None, metric: str = "") -> None:
        source = torch.Generator().manual_seed(0)
        self.tokenizer = Characters("0123456789")
        self.rows = rows
        self.length = 6
        self.x = torch.randint(0, 10, (rows, self.length + 1), generator=source)
        self.order = Order(rows, 0, CPU)
        self.measured = measured or []
        self.evaluations = 0
        self.metric = metric  # type: ignore[misc]

    def batch(self, step: int, size: int) -> Batch:
        rows = self.x[self.order.at(step, size)]
        return Batch(rows[:, :-1], rows[:, 1:])

    def evaluate(self, model: Any) -> dict[str, float]:
        self.evaluations += 1
        if not self.measured:
            return {}
        return self.measured[self.evaluations - 1]


def gpt(dropout: float = 0.0, **changes: Any) -> regard.GPT:
    """Returns the smallest GPT that reads what Toy gives."""
    torch.manual_seed(0)
    heads = {"heads": 2, "dropout": dropout}
    model = regard.GPT(vocabulary=10, length=6, width=8, layers=1, dropout=dropout, attention=heads, **changes)
    model.tokenizer = Characters("0123456789")
    return model


def trainer(
    folder: Path, task: Task | None = None, model: Any = None, progress: Progress | None = None, **changes: Any
) -> Trainer:
    """Returns a trainer of a toy in a folder, which may hold a run of it already."""
    config = TrainConfig().but(**(SHORT | changes))
    run = Run(folder) if (folder / "config.toml").exists() else Run.create(folder, {"train": config.as_dict()})
    return Trainer(model or gpt(), task or Toy(), config, run, progress or Progress())


class Crash(BaseException):
    """Stands for the end of the process, which saves nothing more."""


class StopAt(Progress):
    """Crashes, or presses Ctrl-C, when a step's line is shown."""

    def __init__(self, step: int, number: int | None = None) -> None:
        self.step, self.signal = step, number

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        if step != self.step:
            return
        if self.signal is None:
            raise Crash
        os.kill(os.getpid(), self.signal)


CTRL_C = signal.SIGINT


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of metrics without how long things took."""
    return {key: value for key, value in row.items() if key not in TIMES}


def bits(run: Run | Path) -> dict[str, Any]:
    """Returns all that must be the same in two runs that did the same: weights, optimiser, metrics, the best."""
    if not isinstance(run, Run):
        run = Run(run)
    found: dict[str, Any] = {"metrics": [timeless(row) for row in run.metrics()], "best": run.best}
    for path in sorted(run.path.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.relative_to(run.path)}:{name}"] = (tensor.dtype, tensor.flatten().view(torch.uint8).tolist())
    return found
