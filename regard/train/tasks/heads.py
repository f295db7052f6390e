"""The task `heads`: a language model that is measured on single sentences too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.config import ConfigError
from regard.data.batch import Batch
from regard.data.tokenizers import TextError, Tokenizer
from regard.data.tokens import window_length, windows
from regard.errors import did_you_mean
from regard.models import Model
from regard.nn import MERGES, POSITIONS
from regard.train.tasks.base import task
from regard.train.tasks.lm import LanguageModel, LMData, evaluation_windows

MOST_SEEDS = 100
PLAIN = "concatenate"
SENTENCES = {
    "normal": "Thank you so much for all your help with this !",
    "weird": "After learning language models model natural language",
    "long": (
        "When the old bridge over the river was closed for the winter, the people of the town had to walk along the "
        "far bank to the mill, then across the fields behind the church and down the long road to the market, which "
        "took them most of an hour on a good day and nearly two when there was snow, so in the end they met one "
        "evening, talked until it was late, and built a ferry from what wood they had, which was small and slow and "
        "leaked a little, but which all of them soon came to love."
    ),
}


@dataclass(frozen=True, kw_only=True)
class HeadsData(LMData):
    """A text as for `lm`, and the models that are compared on it.

    There is one for each of `positions` with each of `merges`, trained with `seeds` seeds from train.seed on. The loss
    of each of `sentences`, which have names, is measured in a pass of its own.
    """

    seeds: int = 3
    positions: tuple[str, ...] = ("learned", "sinusoidal")
    merges: tuple[str, ...] = (PLAIN, "shuffle", "shift", "reweight", "reweight-sequence")
    sentences: dict[str, str] = field(default_factory=lambda: dict(SENTENCES))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ConfigError(f"data.seeds = {self.seeds}: expected 1 to {MOST_SEEDS}")
        for key, known in {"positions": list(POSITIONS), "merges": list(MERGES)}.items():
            names = getattr(self, key)
            if not names or len(set(names)) < len(names):
                raise ConfigError(f"data.{key} = {list(names)}: expected at least one name, and none twice")
            for name in names:
                if name not in known:
                    raise ConfigError(f"data.{key}: no '{name}'.{did_you_mean(name, known)}")
        wrong = set(self.sentences) - set(SENTENCES)
        if wrong:
            raise ConfigError(f"no key '{min(wrong)}' in data.sentences.{did_you_mean(min(wrong), SENTENCES)}")
        # A change to one sentence leaves the others as they are.
        object.__setattr__(self, "sentences", {name: self.sentences.get(name, SENTENCES[name]) for name in SENTENCES})


@task("heads")
class Sentences(LanguageModel):
    """A language model that is measured on single sentences too."""

    Config = HeadsData

    def __init__(
        self, config: HeadsData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(config, seed, device, folder, tokenizer)
        self.sentences = {name: self._encode_sentence(name, text) for name, text in config.sentences.items()}

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the measures of any language model, and the loss of each sentence by itself."""
        alone = {f"{name}/loss": self.mean_loss(model, [rows]) for name, rows in self.sentences.items()}
        return super().evaluate(model) | alone

    def losses(self, model: Model[Any]) -> dict[str, float]:
        """Returns the mean token losses of dev, of as much training text, and of each sentence."""
        most = len(self.dev.tokens)
        parts = {"train": evaluation_windows(self.train.tokens, self.length, most), "dev": self.dev_windows()}
        losses = {name: self.mean_loss(model, rows) for name, rows in parts.items()}
        return losses | {name: self.mean_loss(model, [rows]) for name, rows in self.sentences.items()}

    def windows(self, rows: int) -> Batch:
        """Returns at most `rows` whole windows of dev text, evenly spaced."""
        length = window_length(self.dev.tokens, self.length)
        starts = torch.linspace(0, len(self.dev.tokens) - 1 - length, rows).long().unique()
        return windows(self.dev.tokens, length, starts).to(self.device)

    def _encode_sentence(self, name: str, text: str) -> Batch:
        """Returns a sentence as a batch of one row; raises ConfigError if it does not fit a window."""
        place = f"data.sentences.{name}"
        try:
            ids = self.tokenizer.encode(text)
        except TextError as error:
            raise ConfigError(f"{place}: {error} Or divide the text by data.tokenizer=bytes.") from None
        if not 2 <= len(ids) <= self.length + 1:
            raise ConfigError(
                f"{place} has {len(ids)} tokens, windows have {self.length}: expected 2 to {self.length + 1}; raise "
                "data.block, or give a longer text or another sentence"
            )
        row = torch.tensor([ids])
        return Batch(row[:, :-1], row[:, 1:])
