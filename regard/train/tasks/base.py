"""What is learned: a task gives the batch of each step, its loss, and what is measured."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from regard.config import Section
from regard.data.batch import IGNORE, Batch
from regard.data.seeds import generator
from regard.data.tokenizers import Tokenizer
from regard.models import Model, token_loss
from regard.registry import Registry

T = TypeVar("T", bound="Task")
# A task is registered when its module is imported, which happens when it is first looked up.
TASKS: Registry[type[Task]] = Registry(
    "task",
    {
        "lm": "regard.train.tasks.lm",
        "corruption": "regard.train.tasks.knowledge",
        "questions": "regard.train.tasks.knowledge",
        "summarize": "regard.train.tasks.summarize",
        "sentiment": "regard.train.tasks.sentiment",
        "heads": "regard.train.tasks.heads",
        "repeats": "regard.train.tasks.repeats",
        "distil": "regard.convert.distil",
    },
)


class Task(ABC):
    """Data and measure of one training.

    The batch of a step is a pure function of (seed, step): a resumed run sees what it would have seen. `metric` is what
    the best checkpoint is chosen by, "" for the last; `highest` says whether more of it is better. `files` are the keys
    of its config that name files. `varies`: batches differ in shape.
    """

    Config: ClassVar[type[Any]]
    metric: ClassVar[str] = ""
    highest: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ()
    varies: ClassVar[bool] = False

    tokenizer: Tokenizer
    rows: int  # in an epoch
    length: int  # tokens of a row
    source: int | None = None  # tokens of what a row reads first, for a model that reads and then writes
    period: int = 1  # batches that belong together: losses are comparable over so many

    @abstractmethod
    def __init__(
        self, config: Section, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        """Reads the data; what has to be made is written into the run's folder. `tokenizer`: that of the model
        to start from."""

    @abstractmethod
    def batch(self, step: int, size: int) -> Batch:
        """The batch of a step."""

    @property
    def given(self) -> dict[str, Any]:
        """What the data decide about a new model's config."""
        return {"vocabulary": self.tokenizer.size, "length": self.length}

    def prepare(self, model: Model[Any]) -> None:  # noqa: B027
        """Called once before training: the place to say what is not learned."""

    def logits(self, model: Model[Any], batch: Batch) -> Tensor:
        """The model's logits at each place of a batch."""
        out: Tensor = model(batch.x, batch.visible)
        return out

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The sum of the losses of a batch's targets, with labels smoothed where training asks for it."""
        return token_loss(self.logits(model, batch), batch.y, mean=False, smoothing=smoothing)

    def targets(self, batch: Batch) -> Tensor:
        """How many targets a batch has: its weight among others."""
        return (batch.y != IGNORE).sum()

    def more_is_better(self, metric: str) -> bool:
        """Whether the best of a measure is its highest: as `highest` says of the task's own, and of others by name."""
        return self.highest if metric == self.metric else not re.search("loss|perplexity|bits", metric)

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Measures of a model in evaluation mode."""
        return {}


def task(name: str) -> Callable[[type[T]], type[T]]:
    """Registers a task under the name that recipes use."""

    def add(cls: type[T]) -> type[T]:
        TASKS.put(name, cls)
        return cls

    return add


class Order:
    """Rows in a new order each epoch: which ones a step reads depends on (seed, step) alone."""

    def __init__(self, rows: int, seed: int, device: torch.device) -> None:
        self.rows, self.seed, self.device = rows, seed, device
        self._epoch, self._order = -1, torch.empty(0)

    def at(self, step: int, size: int) -> Tensor:
        """The rows of a step. Epochs follow each other without a gap, so every batch is full."""
        start, taken = step * size, []
        while size > 0:
            epoch, place = divmod(start, self.rows)
            part = self._of(epoch)[place : place + size]
            taken.append(part)
            start, size = start + len(part), size - len(part)
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            source = generator(self.seed, "order", epoch, device=self.device)
            self._epoch, self._order = epoch, torch.randperm(self.rows, generator=source, device=self.device)
        return self._order
