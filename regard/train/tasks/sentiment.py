"""The task of judging sentences: is a text positive or negative?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError, read_lines
from regard.data.reviews import ReviewsConfig, reviews
from regard.data.sentences import Sentence, Split, read_sentences, seen_before, write_sentences
from regard.data.splits import completed
from regard.data.tokenizers import Tokenizer
from regard.errors import did_you_mean
from regard.hub.classifier import Classifier, HubTokenizer
from regard.models import Model, token_loss
from regard.train.run import write_text
from regard.train.tasks.base import Order, Task, task

PADDINGS = ("longest", "length")
PART = 8192  # tokens evaluated at a time


@dataclass(frozen=True, kw_only=True)
class SentimentData(Section):
    r"""Files of sentences, `text\t0` or `text\t1` a line; without `train`, generated ones. What of dev and test is not
    given is cut off from train, `held_out` of it each.

    A text of more than `length` tokens, special ones counted, is cut; without `truncation` it is an error. `padding`:
    rows are as long as the "longest" of their batch, or all of them `length`. `workers`: threads that make the batches
    of the coming steps while one is computed (0: none). Which sentences a batch has depends on seed and step alone.
    """

    place = "data"

    train: str = ""
    dev: str = ""
    test: str = ""
    held_out: float = 0.1
    length: int = 128
    padding: str = "longest"
    truncation: bool = True
    workers: int = 0
    reviews: ReviewsConfig = field(default_factory=ReviewsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding not in PADDINGS:
            raise ConfigError(f"data.padding = {self.padding!r}.{did_you_mean(self.padding, PADDINGS)}")
        if self.length < 3:
            raise ConfigError(f"data.length = {self.length}: expected at least 3, a word between two special tokens")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(f"data.held_out = {self.held_out}: expected more than 0 and less than 0.5")
        if not 0 <= self.workers <= 64:
            raise ConfigError(f"data.workers = {self.workers}: expected 0 to 64")


def load_sentences(config: SentimentData, folder: Path) -> Split:
    """The sentences of a config; generated ones are written into the folder unless they are there."""
    given = {name: getattr(config, name) for name in Split._fields}
    if not config.train:
        named = next((name for name, path in given.items() if path), None)
        if named is not None:
            raise ConfigError(f"data.{named} is given without data.train: say which sentences to learn from")
        return _generated(config.reviews, folder / "data")
    sets = {name: read_sentences(path) for name, path in given.items() if path}
    sets = completed(sets, config.held_out, config.train, "sentences")
    if len({sentence.label for sentence in sets["train"]}) < 2:
        raise DataError(f"{config.train}: every label is {sets['train'][0].label}; expected sentences of both, 0 and 1")
    for name in ("dev", "test"):
        again = seen_before(sets["train"], sets[name])
        if again:
            warnings.warn(f"{again:,} of {len(sets[name]):,} {name} sentences stand in train too", stacklevel=2)
    return Split(**sets)


def _generated(config: ReviewsConfig, folder: Path) -> Split:
    """Generated sentences, and the files of them in the folder, which people may want to read."""
    made, stamp, asked = reviews(config), folder / "reviews.txt", str(config)
    if stamp.is_file() and read_lines(stamp) != [asked]:
        raise ConfigError(f"{folder} holds other sentences than data.reviews asks for: choose another --out")
    if not stamp.is_file():
        for name, sentences in made._asdict().items():
            write_sentences(folder / f"{name}.tsv", sentences)
        write_text(stamp, asked + "\n")
    return made


class SentenceRows(NamedTuple):
    """Encoded sentences, one below the other: ids, padded; how many there are of each; labels; how many were cut."""

    ids: Int[Tensor, "N L"]
    lengths: Int[Tensor, "N"]
    labels: Int[Tensor, "N"]
    cut: int

    def batch(self, chosen: Int[Tensor, "B"], whole: bool = False) -> Batch:
        """Some of them, no longer than the longest, or `whole`. The label is the target at the first place, whose token
        is the one that a classifier looks at; no other place has a target."""
        lengths = self.lengths[chosen]
        x = self.ids[chosen, : self.ids.shape[1] if whole else int(lengths.max())].long()
        y = torch.full_like(x, IGNORE)
        y[:, 0] = self.labels[chosen]
        return Batch(x, y, torch.arange(x.shape[1]) < lengths[:, None])


def encode_sentences(
    tokenizer: HubTokenizer, sentences: Sequence[Sentence], config: SentimentData, name: str
) -> SentenceRows:
    """Sentences as ids. `name`: what they are called where one is too long and may not be cut."""
    texts = [sentence.text for sentence in sentences]
    ids = tokenizer.many(texts)
    long = [n for n, own in enumerate(ids) if len(own) > config.length]
    if long and not config.truncation:
        n = long[0]
        raise DataError(
            f"{name}, sentence {n + 1}: {len(ids[n])} tokens, data.length is {config.length}; raise it or set "
            f"data.truncation=true: {texts[n]!r:.60}"
        )
    for n in long:
        ids[n] = tokenizer.many([texts[n]], config.length)[0]
    most = config.length if config.padding == "length" else max(map(len, ids))
    rows = torch.full((len(ids), most), tokenizer.pad, dtype=torch.int32)
    for row, own in zip(rows, ids, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    labels = torch.tensor([sentence.label for sentence in sentences])
    return SentenceRows(rows, torch.tensor([len(own) for own in ids]), labels, len(long))


@task("sentiment")
class Sentiment(Task):
    """Cross-entropy of the label of each sentence; the best checkpoint is the one that is right most often on dev."""

    Config = SentimentData
    metric = "dev/accuracy"
    files = ("train", "dev", "test")
    varies = True
    tokenizer: HubTokenizer

    def __init__(
        self, config: SentimentData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        if not isinstance(tokenizer, HubTokenizer):
            raise ConfigError("the task sentiment fine-tunes a Hugging Face encoder: expected model.class=Classifier")
        if tokenizer.limit is not None and config.length > tokenizer.limit:
            raise ConfigError(
                f"data.length = {config.length}: that encoder reads at most {tokenizer.limit} tokens; lower it"
            )
        self.config, self.seed, self.device, self.tokenizer = config, seed, device, tokenizer
        self.sentences = load_sentences(config, folder)
        named = {name: getattr(config, name) or f"data/{name}.tsv" for name in Split._fields}
        self.train = encode_sentences(tokenizer, self.sentences.train, config, named["train"])
        self.dev = encode_sentences(tokenizer, self.sentences.dev, config, named["dev"])
        if self.train.cut:
            warnings.warn(
                f"{named['train']}: {self.train.cut:,} of {len(self.train.ids):,} sentences have more than "
                f"{config.length} tokens and are cut there (data.length)",
                stacklevel=2,
            )
        self.rows, self.length = self.train.ids.shape
        self.order, self._lock = Order(self.rows, seed, torch.device("cpu")), Lock()
        self._pool = ThreadPoolExecutor(config.workers, "batches") if config.workers else None
        self._coming: dict[tuple[int, int], Future[Batch]] = {}

    def batch(self, step: int, size: int) -> Batch:
        """The batch of a step; with workers, those of the next steps are begun."""
        if self._pool is None:
            return self._made(step, size)
        wanted = [(step + n, size) for n in range(self.config.workers + 1)]
        self._coming = {place: self._coming.get(place) or self._pool.submit(self._made, *place) for place in wanted}
        return self._coming.pop((step, size)).result()

    def _made(self, step: int, size: int) -> Batch:
        with self._lock:  # the order of an epoch is kept from one step to the next
            chosen = self.order.at(step, size)
        return self.train.batch(chosen, self.config.padding == "length").to(self.device)

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        return token_loss(self.logits(model, batch).float(), batch.y[:, 0], mean=False, smoothing=smoothing)

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Loss and accuracy of the dev sentences, and of as many training sentences, evenly spaced."""
        some = min(len(self.dev.ids), self.rows)
        chosen = torch.arange(some) * self.rows // some
        train = SentenceRows(self.train.ids[chosen], self.train.lengths[chosen], self.train.labels[chosen], 0)
        found = {}
        for name, rows in {"dev": self.dev, "train": train}.items():
            logits = classify(model, rows)
            found[f"{name}/loss"] = float(token_loss(logits, rows.labels))
            found[f"{name}/accuracy"] = float((logits.argmax(1) == rows.labels).double().mean())
        return found


def classify(model: Model[Any], rows: SentenceRows) -> Float[Tensor, "N classes"]:
    """The logits of all rows in their order, on the CPU; they are read in parts of like length."""
    order = rows.lengths.argsort(stable=True)
    parts = order.split(max(1, PART // int(rows.lengths.max())))
    batches = (rows.batch(part).to(model.device) for part in parts)
    return torch.cat([model(batch.x, batch.visible).double().cpu() for batch in batches])[order.argsort()]


@torch.no_grad()
def positive_probabilities(model: Classifier, texts: Sequence[str]) -> list[float]:
    """The probability that each text is positive; of a long one the model reads as much as it can."""
    most = model.tokenizer.limit
    sentences = [Sentence(text, 0) for text in texts]
    rows = encode_sentences(
        model.tokenizer, sentences, SentimentData() if most is None else SentimentData(length=most), "texts"
    )
    found: list[float] = classify(model, rows).softmax(1)[:, 1].tolist()
    return found
