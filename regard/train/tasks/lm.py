"""Language models: the next token of any text, by character, byte or byte-pair encoding."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError
from regard.data.seeds import generator
from regard.data.tokenizers import Characters, TextError, Tokenizer
from regard.data.tokens import KINDS, Ids, TokenFile, all_windows, fitted, random_windows, windows, write_tokens
from regard.errors import did_you_mean
from regard.models import Model, token_loss
from regard.train.run import METRICS
from regard.train.tasks.base import Task, task

MOST = 200_000  # tokens that are evaluated
PART = 4096  # of them at a time
TOKENS = "tokens"  # the folder in a run


@dataclass(frozen=True, kw_only=True)
class LMData(Section):
    """A UTF-8 `text`, or the folder of `tokens` that `regard data tokens` made of one.

    A text is divided by `tokenizer`: characters, bytes or bpe, the last with `vocabulary` tokens. The first `share` of
    the tokens is trained on, the rest is dev; `block` is the window in tokens.
    """

    place = "data"

    text: str = ""
    tokens: str = ""
    tokenizer: str = "characters"
    vocabulary: int = 8192
    block: int = 128
    share: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer not in KINDS:
            raise ConfigError(f"data.tokenizer = {self.tokenizer!r}.{did_you_mean(self.tokenizer, KINDS)}")
        if self.block < 1:
            raise ConfigError(f"data.block = {self.block}: expected at least 1")
        if not 0 < self.share < 1:
            raise ConfigError(f"data.share = {self.share}: expected more than 0 and less than 1")


@task("lm")
class LanguageModel(Task):
    """Windows of a text that start anywhere; an epoch is as many of them as would stand side by side."""

    Config = LMData
    metric = "dev/loss"
    highest = False
    files = ("text", "tokens")

    def __init__(
        self, config: LMData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        self.train, self.dev = token_files(config, folder, tokenizer)
        self.tokenizer = self.train.tokenizer
        self.length = fitted(self.train.tokens, config.block)
        self.rows = max(1, (len(self.train) - 1) // self.length)
        self.seed, self.device = seed, device
        self.unit, self.per_token = self._unit()

    def batch(self, step: int, size: int) -> Batch:
        source = generator(self.seed, "windows", step)
        return self._here(random_windows(self.train.tokens, size, self.length, source))

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Mean loss of the dev tokens, its exponential, and how many bits a character or byte takes."""
        loss = self.mean_loss(model, self._dev())
        bits = loss / log(2) / self.per_token
        return {"dev/loss": loss, "dev/perplexity": exp(min(loss, 700.0)), f"dev/bits_per_{self.unit}": bits}

    def mean_loss(self, model: Model[Any], parts: Iterable[Batch]) -> float:
        """The mean loss of all targets."""
        total, weight = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for part in parts:
            weight += int((part.y != IGNORE).sum())
            part = self._here(part)
            total += token_loss(model(part.x).float(), part.y, mean=False)
        return float(total) / weight

    def _dev(self) -> Iterator[Batch]:
        return evaluation_windows(self.dev.tokens, self.length, MOST)

    def _unit(self) -> tuple[str, float]:
        """What a token is made of, and how many of these it has on average in dev."""
        if isinstance(self.tokenizer, Characters):
            return "character", 1.0
        targets = [row[row != IGNORE].tolist() for part in self._dev() for row in part.y]
        return "byte", len(self.tokenizer.decode(i for row in targets for i in row).encode()) / sum(map(len, targets))

    def _here(self, batch: Batch) -> Batch:
        return batch.to(self.device)


def evaluation_windows(tokens: Ids, length: int, most: int) -> Iterator[Batch]:
    """Windows side by side, each token a target once; of more than `most` tokens as many windows, evenly spaced."""
    length = fitted(tokens, length)
    rows = max(1, PART // length)
    if len(tokens) - 1 <= most:
        yield from all_windows(tokens, length, rows)
        return
    starts = np.linspace(0, len(tokens) - 1 - length, max(1, most // length)).astype(np.int64)
    for at in range(0, len(starts), rows):
        yield windows(tokens, length, starts[at : at + rows])


def token_files(config: LMData, folder: Path, tokenizer: Tokenizer | None) -> tuple[TokenFile, TokenFile]:
    """Tokens to train on and for dev: the user's, or those of a text, which are written into the folder once."""
    if bool(config.text) == bool(config.tokens):
        found = "both are given" if config.text else "neither is given"
        raise ConfigError(
            f"data.text and data.tokens: {found}; expected one, a text (data.text=FILE) or a folder that "
            "`regard data tokens` made (data.tokens=FOLDER)"
        )
    place = Path(config.tokens) if config.tokens else folder / TOKENS
    if config.text and not (place.is_dir() and (folder / METRICS).is_file()):  # else the run has begun with them
        stage = folder / f".{TOKENS}"
        try:
            write_tokens(config.text, stage, tokenizer or config.tokenizer, config.vocabulary, config.share)
        except TextError as error:
            raise DataError(f"{config.text}: {error}") from None
        shutil.rmtree(place, ignore_errors=True)  # of a start that failed, maybe with another text
        stage.rename(place)
    train, dev = (TokenFile.open(place / f"{name}.npy") for name in ("train", "dev"))
    if tokenizer is not None and tokenizer.as_json() != train.tokenizer.as_json():
        raise ConfigError(
            f"{place} was made by another tokenizer than that of train.init; give data.text, which is read by that one"
        )
    return train, dev
