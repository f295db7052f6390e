"""The task `lm`: the next token of any text, by character, byte or byte-pair encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError, write_lines
from regard.data.prose import python_prose
from regard.data.seeds import generator
from regard.data.tokenizers import TOKENIZERS, Bytes, Characters, TextError, Tokenizer
from regard.data.tokens import Ids, TokenFile, all_windows, random_windows, window_length, windows, write_tokens
from regard.errors import did_you_mean, quote
from regard.models import Model, token_loss
from regard.train.run import METRICS
from regard.train.tasks.base import Task, task

MOST = 200_000  # tokens that are evaluated
PART = 4096  # tokens that are evaluated at a time
TOKENS = "tokens"  # the folder in a run
PROSE = "prose.txt"  # the text that is read where none is named


@dataclass(frozen=True, kw_only=True)
class LMData(Section):
    """The data of `lm`: a UTF-8 `text`, or the folder `tokens` that `regard data tokens` made of one.

    Without either it is the text of Python's documentation. A text is divided by `tokenizer`: characters, bytes or
    bpe, the last with `vocabulary` tokens. The first `share` of the tokens is trained on, the rest is dev; `block` is
    the length of a window in tokens.
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
        if self.tokenizer not in TOKENIZERS:
            raise ConfigError(f"data.tokenizer = {quote(self.tokenizer)}.{did_you_mean(self.tokenizer, TOKENIZERS)}")
        if self.block < 1:
            raise ConfigError(f"data.block = {self.block}: expected at least 1")
        if not 0 < self.share < 1:
            raise ConfigError(f"data.share = {self.share}: expected more than 0 and less than 1")


@task("lm")
class LanguageModel(Task):
    """Random windows of a text; an epoch is the number of windows that fit into the text without overlap."""

    Config = LMData
    metric = "dev/loss"
    highest = False
    files = ("text", "tokens")

    def __init__(
        self, config: LMData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        self.train, self.dev = token_files(config, folder, tokenizer)
        self.tokenizer = self.train.tokenizer
        self.length = window_length(self.train.tokens, config.block)
        self.rows = max(1, (len(self.train) - 1) // self.length)
        self.seed = seed
        self.device = device
        self.unit = "byte"  # what bits are counted by
        if isinstance(self.tokenizer, Characters):
            self.unit = "character"
        self.per_token = self._units_per_token()

    def batch(self, step: int, size: int) -> Batch:
        """Returns windows of the training text that start anywhere [size,T]."""
        source = generator(self.seed, "windows", step)
        return random_windows(self.train.tokens, size, self.length, source).to(self.device)

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the mean loss of the dev tokens, its exponential, and how many bits a character or byte takes."""
        loss = self.mean_loss(model, self.dev_windows())
        bits = loss / log(2) / self.per_token
        # exp of more than 709 overflows.
        return {"dev/loss": loss, "dev/perplexity": exp(min(loss, 700.0)), f"dev/bits_per_{self.unit}": bits}

    def mean_loss(self, model: Model[Any], parts: Iterable[Batch]) -> float:
        """Returns the mean loss of all targets of the batches."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        weight = 0
        for part in parts:
            weight += int((part.y != IGNORE).sum())
            part = part.to(self.device)
            total += token_loss(model(part.x).float(), part.y, mean=False)
        return float(total) / weight

    def dev_windows(self) -> Iterator[Batch]:
        """Yields the windows of dev text that are evaluated, in batches."""
        return evaluation_windows(self.dev.tokens, self.length, MOST)

    def _units_per_token(self) -> float:
        """Returns the mean number of characters (of `Characters`) or of bytes in a dev token that is evaluated."""
        if isinstance(self.tokenizer, Characters):
            return 1.0
        targets: list[int] = [i for part in self.dev_windows() for i in part.y[part.y != IGNORE].tolist()]
        if isinstance(self.tokenizer, Bytes):
            # Not by decoding: windows cut characters, and each half would become a replacement mark of three bytes.
            sizes = [1] * 256 + [len(name.encode()) for name in self.tokenizer.special]
            return sum(sizes[i] for i in targets) / len(targets)
        return len(self.tokenizer.decode(targets).encode()) / len(targets)


def evaluation_windows(tokens: Ids, length: int, most: int) -> Iterator[Batch]:
    """Yields batches of windows side by side, so that each token is a target once.

    Of more than `most` tokens it yields evenly spaced windows, with about `most` targets together.
    """
    length = window_length(tokens, length)
    rows = max(1, PART // length)
    if len(tokens) - 1 <= most:
        yield from all_windows(tokens, length, rows)
        return
    starts = np.linspace(0, len(tokens) - 1 - length, max(1, most // length)).astype(np.int64)
    for first in range(0, len(starts), rows):
        yield windows(tokens, length, starts[first : first + rows])


def _with_text(config: LMData, folder: Path) -> LMData:
    """Returns the config with a text; if none is named, that of Python's documentation, written into the folder."""
    if config.text or config.tokens:
        return config
    place = folder / PROSE
    if not place.is_file():
        write_lines(place, python_prose())
    return config.but(text=str(place))


def token_files(config: LMData, folder: Path, tokenizer: Tokenizer | None) -> tuple[TokenFile, TokenFile]:
    """Returns the tokens of train and dev: the user's, or those of a text, which are written into the folder once."""
    if config.text and config.tokens:
        raise ConfigError(
            "data.text and data.tokens: both are given; expected one, a text (data.text=FILE) or a folder that "
            "`regard data tokens` made (data.tokens=FOLDER)"
        )
    config = _with_text(config, folder)
    place = folder / TOKENS
    if config.tokens:
        place = Path(config.tokens)
    started = place.is_dir() and (folder / METRICS).is_file()  # a run keeps the tokens that it began with
    if config.text and not started:
        try:
            # In the place of those of a start that failed, maybe with another text.
            write_tokens(config.text, place, tokenizer or config.tokenizer, config.vocabulary, config.share)
        except TextError as error:
            raise DataError(f"{config.text}: {error}") from None
    train = TokenFile.open(place / "train.npy")
    dev = TokenFile.open(place / "dev.npy")
    if tokenizer is not None and tokenizer.as_json() != train.tokenizer.as_json():
        raise ConfigError(
            f"{place} was made by another tokenizer than that of train.init; give data.text, which is read by that one"
        )
    return train, dev
