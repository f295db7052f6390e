"""The task `repeats`: a language model that is also taught to repeat, as the small model that comes with the lens.

Some rows are text; the others repeat a sequence of tokens, which can be predicted from its first occurrence. To look up
what followed last time is what an induction head does, and it needs a head that attends to the token before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.config import ConfigError
from regard.data.batch import IGNORE, Batch
from regard.data.files import write_lines
from regard.data.seeds import generator
from regard.data.tokenizers import Tokenizer
from regard.data.world import WorldConfig, make_world
from regard.models import Model
from regard.train.tasks.base import task
from regard.train.tasks.lm import LanguageModel, LMData

DOCUMENTS = "documents.txt"
SHORTEST = 8  # the smallest number of tokens that are repeated
ROWS = 64  # rows of random tokens that are evaluated


@dataclass(frozen=True, kw_only=True)
class RepeatsData(LMData):
    """A text as for `lm`, or none for the documents of an invented `world`.

    A share `again` of the rows repeats a passage of the text, a share `random` repeats random tokens. The `first` steps
    have rows of random tokens only: beside text, which is easier, looking back is learned much later.
    """

    tokenizer: str = "bytes"
    again: float = 0.2
    random: float = 0.4
    first: int = 0
    world: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.again, self.random) < 0 or self.again + self.random > 1:
            raise ConfigError(
                f"data.again = {self.again}, data.random = {self.random}: expected shares of rows, 0 or more, together "
                "at most 1"
            )
        if self.block < 2 * SHORTEST:
            raise ConfigError(f"data.block = {self.block}: expected at least {2 * SHORTEST}, to say something twice")


@task("repeats")
class Repeats(LanguageModel):
    """Windows of a text, and rows that repeat themselves."""

    Config = RepeatsData
    generated = ("world",)

    def __init__(
        self, config: RepeatsData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(_with_text(config, folder), seed, device, folder, tokenizer)
        self.again = config.again
        self.random = config.random
        self.first = config.first

    def batch(self, step: int, size: int) -> Batch:
        """Returns windows of text [size,T]; some are replaced by text or random tokens that repeat their beginning."""
        source = generator(self.seed, "repeats", step)
        text = super().batch(step, size)
        rows = torch.cat([text.x, text.y[:, -1:]], 1)
        for n, kind in enumerate(torch.rand(size, generator=source).tolist()):
            if kind < self.random or step < self.first:
                drawn = torch.randint(self.tokenizer.size, rows[n].shape, generator=source).to(rows.device)
                # A short part is repeated more often, and is learned sooner.
                rows[n] = _repeat_start(drawn, 2 * SHORTEST, source)
            elif kind < self.random + self.again:
                rows[n] = _repeat_start(rows[n], self.length // 2, source)
        return Batch(rows[:, :-1], rows[:, 1:])

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the metrics of any language model, and the loss of random tokens in their second occurrence."""
        source = generator(self.seed, "repeats", "dev")
        half = (self.length + 1) // 2
        rows = torch.randint(self.tokenizer.size, (ROWS, half), generator=source).repeat(1, 2)
        y = rows[:, 1:].clone()
        y[:, :half] = IGNORE  # the first time, and the first token of the second, cannot be known
        return super().evaluate(model) | {"repeats/loss": self.mean_loss(model, [Batch(rows[:, :-1], y)])}


def _repeat_start(row: Int[Tensor, " T"], longest: int, source: torch.Generator) -> Int[Tensor, " T"]:
    """Returns a row that repeats the beginning of the given one, of a random length from SHORTEST to `longest`."""
    part = int(torch.randint(SHORTEST, longest + 1, (), generator=source))
    return row[torch.arange(len(row), device=row.device) % part]


def _with_text(config: RepeatsData, folder: Path) -> RepeatsData:
    """Returns the config with a text: where none is named, documents that are written into the folder unless there."""
    if config.text or config.tokens:
        return config
    place = folder / DOCUMENTS
    if not place.is_file():
        write_lines(place, make_world(config.world).documents)
    return config.but(text=str(place))
