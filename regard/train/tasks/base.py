"""What a task is, and the registry of all tasks.

A task is one file of this folder: its name is the file's, and it is found without being listed anywhere.
"""

from __future__ import annotations

import pkgutil
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
from regard.models import GPT, Model, token_loss
from regard.registry import Registry

T = TypeVar("T", bound="Task")


def _task_modules() -> dict[str, str]:
    """Returns the module of each task by the task's name, without importing any: some need optional libraries."""
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    modules = {file.name: f"{__package__}.{file.name}" for file in files if file.name != "base"}
    # Conversion has a task of its own, which needs the rest of its package.
    return modules | {"distil": "regard.convert.distil"}


TASKS: Registry[type[Task]] = Registry("task", _task_modules())


def task(name: str) -> Callable[[type[T]], type[T]]:
    """Registers a task under the name that recipes use."""
    return TASKS.add(name)


class Task(ABC):
    """The data, the loss and the metrics of one training.

    The batch of a step is a pure function of (seed, step): a resumed run sees what it would have seen. `metric` is what
    the best checkpoint is chosen by, "" for the last; `highest` says whether more of it is better. `files` are the keys
    of its config that name files, `generated` those that describe data which are generated in place of the first.
    `varies`: batches differ in shape.
    """

    Config: ClassVar[type[Any]]
    metric: ClassVar[str] = ""
    highest: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ()
    generated: ClassVar[tuple[str, ...]] = ()
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
        """Returns the batch of a step, with `size` rows."""

    @property
    def given(self) -> dict[str, Any]:
        """Returns the settings of a new model that the data decide, such as its vocabulary."""
        return {"vocabulary": self.tokenizer.size, "length": self.length}

    def lengths(self, model: Model[Any]) -> dict[str, tuple[int | None, int]]:
        """Maps keys of `data` to the most tokens that the model can read (None: any), and the tokens of a row."""
        return {"block": (getattr(model, "limit", None), self.length)}

    def prepare(self, model: Model[Any]) -> None:  # noqa: B027
        """Changes a model before training, e.g. freezes what is not learned; does nothing by default."""

    def logits(self, model: Model[Any], batch: Batch) -> Tensor:
        """Returns the model's logits at each place of a batch [B,T,V]."""
        out: Tensor = model(batch.x, batch.visible)
        return out

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Returns the sum of the losses of a batch's targets, with labels smoothed where training asks for it."""
        if isinstance(model, GPT) and type(self).logits is Task.logits:
            # Without the logits of all tokens at the same time, where they are many.
            return model.loss(batch.x, batch.y, batch.visible, mean=False, smoothing=smoothing)
        return token_loss(self.logits(model, batch), batch.y, mean=False, smoothing=smoothing)

    def targets(self, batch: Batch) -> Tensor:
        """Returns how many targets a batch has, by which the sum of its losses is divided."""
        return (batch.y != IGNORE).sum()

    def more_is_better(self, metric: str) -> bool:
        """Tells whether higher is better for a metric: by `highest` for the task's own, otherwise by its name."""
        if metric == self.metric:
            return self.highest
        return not re.search("loss|perplexity|bits", metric)

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the metrics of a model in evaluation mode; none by default."""
        return {}


class Order:
    """Chooses the rows that a step reads, in a new order in each epoch; they depend on seed, step and size alone.

    Without `shuffle` every epoch reads them in the order of their file.
    """

    def __init__(self, rows: int, seed: int, device: torch.device, shuffle: bool = True) -> None:
        self.rows = rows
        self.seed = seed
        self.device = device
        self.shuffle = shuffle
        self._epoch = -1
        self._order = torch.empty(0)

    def at(self, step: int, size: int) -> Tensor:
        """Returns the rows of a step [size]. Epochs follow each other without a gap, so every batch is full."""
        start = step * size
        stop = start + size
        parts = []
        while start < stop:
            epoch, place = divmod(start, self.rows)
            part = self._permutation(epoch)[place : place + stop - start]
            parts.append(part)
            start += len(part)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> Tensor:
        """Returns the order of an epoch, which is kept until another epoch is asked for."""
        if not self.shuffle:
            return torch.arange(self.rows, device=self.device)
        if epoch != self._epoch:
            source = generator(self.seed, "order", epoch, device=self.device)
            self._order = torch.randperm(self.rows, generator=source, device=self.device)
            self._epoch = epoch
        return self._order
