"""The task `sentiment`: classifying texts as positive or negative."""

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
from regard.data.batch import Batch
from regard.data.files import DataError, read_lines
from regard.data.reviews import ReviewsConfig, reviews
from regard.data.sentences import Sentence, SentenceSplit, count_seen, read_sentences, write_sentences
from regard.data.splits import add_held_out
from regard.data.tokenizers import Tokenizer
from regard.errors import did_you_mean, quote
from regard.hub.classifier import Classifier, HubTokenizer
from regard.models import Model, token_loss
from regard.storage import write_text
from regard.train.tasks.base import Order, Task, task

PADDINGS = ("longest", "length")
PART = 8192  # tokens evaluated at a time


@dataclass(frozen=True, kw_only=True)
class SentimentData(Section):
    r"""Files of sentences, `text\t0` or `text\t1` a line; without `train`, sentences are generated.

    Without `dev` or `test`, the share `held_out` of train is taken for each. A text of more than `length` tokens,
    special ones counted, is cut; without `truncation` it is an error. With `padding` = "longest" rows are as long as
    the longest of their batch, with "length" all have `length` tokens. `workers` is the number of threads that make the
    batches of the coming steps; with 0 the training makes each itself. Without `shuffle` every epoch reads the
    sentences in the order of their file.
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
    shuffle: bool = True
    reviews: ReviewsConfig = field(default_factory=ReviewsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding not in PADDINGS:
            raise ConfigError(f"data.padding = {quote(self.padding)}.{did_you_mean(self.padding, PADDINGS)}")
        if self.length < 3:
            raise ConfigError(f"data.length = {self.length}: expected at least 3, a word between two special tokens")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(f"data.held_out = {self.held_out}: expected more than 0 and less than 0.5")
        if not 0 <= self.workers <= 64:
            raise ConfigError(f"data.workers = {self.workers}: expected 0 to 64")


def load_sentences(config: SentimentData, folder: Path) -> SentenceSplit:
    """Returns the sentences of a config; generated ones are written into the folder unless they are there."""
    files = {name: getattr(config, name) for name in SentenceSplit._fields}
    if not config.train:
        name = next((name for name, path in files.items() if path), None)
        if name is not None:
            raise ConfigError(f"data.{name} is given without data.train: say which sentences to learn from")
        return _generate_sentences(config.reviews, folder / "data")
    sets = {name: read_sentences(path) for name, path in files.items() if path}
    sets = add_held_out(sets, config.held_out, config.train, "sentences")
    if len({sentence.label for sentence in sets["train"]}) < 2:
        raise DataError(f"{config.train}: every label is {sets['train'][0].label}; expected sentences of both, 0 and 1")
    for name in ("dev", "test"):
        repeated = count_seen(sets["train"], sets[name])
        if repeated:
            warnings.warn(f"{repeated:,} of {len(sets[name]):,} {name} sentences stand in train too", stacklevel=2)
    return SentenceSplit(**sets)


def _generate_sentences(config: ReviewsConfig, folder: Path) -> SentenceSplit:
    """Returns generated sentences, and writes them into the folder, where people may want to read them.

    The file reviews.txt holds the settings that they were made with. It is written last: without it, all are written
    again.
    """
    sentences = reviews(config)
    stamp = folder / "reviews.txt"
    settings = str(config)
    if stamp.is_file() and read_lines(stamp) != [settings]:
        raise ConfigError(f"{folder} holds other sentences than data.reviews asks for: choose another --out")
    if not stamp.is_file():
        for name, part in sentences._asdict().items():
            write_sentences(folder / f"{name}.tsv", part)
        write_text(stamp, settings + "\n")
    return sentences


class SentenceRows(NamedTuple):
    """Encoded sentences as padded rows: their ids, their lengths, their labels, and how many of them were cut."""

    ids: Int[Tensor, "N L"]
    lengths: Int[Tensor, "N"]
    labels: Int[Tensor, "N"]
    cut: int

    def batch(self, chosen: Int[Tensor, "B"], whole: bool = False) -> Batch:
        """Returns the chosen rows as a batch, cut to the longest of them unless `whole`; y [B] is their labels."""
        lengths = self.lengths[chosen]
        width = self.ids.shape[1]
        if not whole:
            width = int(lengths.max())
        x = self.ids[chosen, :width].long()
        return Batch(x, self.labels[chosen], torch.arange(x.shape[1]) < lengths[:, None])


def encode_sentences(
    tokenizer: HubTokenizer, sentences: Sequence[Sentence], config: SentimentData, name: str
) -> SentenceRows:
    """Returns sentences as rows of ids. `name`: what errors call them, where one is too long and may not be cut."""
    texts = [sentence.text for sentence in sentences]
    ids = tokenizer.encode_batch(texts)
    long = [n for n, row in enumerate(ids) if len(row) > config.length]
    if long and not config.truncation:
        n = long[0]
        raise DataError(
            f"{name}, sentence {n + 1}: {len(ids[n])} tokens, data.length is {config.length}; raise it or set "
            f"data.truncation=true: {texts[n]!r:.60}"
        )
    for n in long:
        ids[n] = tokenizer.encode_batch([texts[n]], config.length)[0]
    width = config.length
    if config.padding == "longest":
        width = max(map(len, ids))
    padded = torch.full((len(ids), width), tokenizer.pad, dtype=torch.int32)
    for n, row in enumerate(ids):
        padded[n, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in ids])
    labels = torch.tensor([sentence.label for sentence in sentences])
    return SentenceRows(padded, lengths, labels, len(long))


@task("sentiment")
class Sentiment(Task):
    """Cross-entropy of the label of each sentence; the best checkpoint is the one that is right most often on dev."""

    Config = SentimentData
    metric = "dev/accuracy"
    files = ("train", "dev", "test")
    generated = ("reviews",)
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
        self.config = config
        self.seed = seed
        self.device = device
        self.tokenizer = tokenizer
        self.sentences = load_sentences(config, folder)
        train_name = config.train or "data/train.tsv"
        self.train = encode_sentences(tokenizer, self.sentences.train, config, train_name)
        self.dev = encode_sentences(tokenizer, self.sentences.dev, config, config.dev or "data/dev.tsv")
        if self.train.cut:
            warnings.warn(
                f"{train_name}: {self.train.cut:,} of {len(self.train.ids):,} sentences have more than "
                f"{config.length} tokens and are cut there (data.length)",
                stacklevel=2,
            )
        self.rows, self.length = self.train.ids.shape
        self.order = Order(self.rows, seed, torch.device("cpu"), config.shuffle)
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        if config.workers:
            self._pool = ThreadPoolExecutor(config.workers, "batches")
        self._prefetched: dict[tuple[int, int], Future[Batch]] = {}

    def batch(self, step: int, size: int) -> Batch:
        """Returns the batch of a step; with workers, it also starts to make those of the next steps."""
        if self._pool is None:
            return self._make_batch(step, size)
        prefetched: dict[tuple[int, int], Future[Batch]] = {}
        for n in range(self.config.workers + 1):
            key = (step + n, size)
            prefetched[key] = self._prefetched.get(key) or self._pool.submit(self._make_batch, *key)
        self._prefetched = prefetched
        return self._prefetched.pop((step, size)).result()

    def _make_batch(self, step: int, size: int) -> Batch:
        with self._lock:  # the order of an epoch is kept from one step to the next
            chosen = self.order.at(step, size)
        return self.train.batch(chosen, self.config.padding == "length").to(self.device)

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Returns the sum of the losses of a batch's labels."""
        return token_loss(self.logits(model, batch).float(), batch.y, mean=False, smoothing=smoothing)

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns loss and accuracy of the dev sentences, and of as many training sentences, evenly spaced."""
        count = min(len(self.dev.ids), self.rows)
        chosen = torch.arange(count) * self.rows // count
        train = SentenceRows(self.train.ids[chosen], self.train.lengths[chosen], self.train.labels[chosen], 0)
        measured = {}
        for name, rows in {"dev": self.dev, "train": train}.items():
            logits = classify(model, rows)
            measured[f"{name}/loss"] = float(token_loss(logits, rows.labels))
            measured[f"{name}/accuracy"] = float((logits.argmax(1) == rows.labels).double().mean())
        return measured


def classify(model: Model[Any], rows: SentenceRows) -> Float[Tensor, "N classes"]:
    """Returns the logits [N,classes] of rows, in their order, on the CPU; a batch has rows of similar length."""
    order = rows.lengths.argsort(stable=True)
    parts = order.split(max(1, PART // int(rows.lengths.max())))
    batches = (rows.batch(part).to(model.device) for part in parts)
    return torch.cat([model(batch.x, batch.visible).double().cpu() for batch in batches])[order.argsort()]


@torch.no_grad()
def positive_probabilities(model: Classifier, texts: Sequence[str]) -> list[float]:
    """Returns the probability that each text is positive; of a long one the model reads as much as it can."""
    sentences = [Sentence(text, 0) for text in texts]
    config = SentimentData()
    if model.tokenizer.limit is not None:
        config = SentimentData(length=model.tokenizer.limit)
    rows = encode_sentences(model.tokenizer, sentences, config, "texts")
    probabilities: list[float] = classify(model, rows).softmax(1)[:, 1].tolist()
    return probabilities
