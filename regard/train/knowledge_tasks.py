"""The two tasks of the knowledge experiment: reading documents by span corruption, and answering questions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.corruption import corrupt, longest_cut
from regard.data.questions import (
    MARK,
    PAD,
    Question,
    pack_documents,
    question_batch,
    read_documents,
    read_questions,
    special,
    unseen,
    vocabulary,
)
from regard.data.tokenizers import Tokenizer
from regard.data.world import WorldConfig, make_world
from regard.models import Model
from regard.train.seeds import generator
from regard.train.task import Order, Task, task

PART = 256  # rows evaluated at a time


@dataclass(frozen=True, kw_only=True)
class KnowledgeData(Section):
    """Documents (one a line) and questions (`question<TAB>answer`); without documents, those of an invented world.

    `test` may lack answers. `block` is the window in characters; `spans` the least and greatest share of a document
    that is masked. `mix`: while questions are learned, so many corrupted documents are read along for each of them.
    """

    place = "data"

    documents: str = ""
    train: str = ""
    dev: str = ""
    test: str = ""
    block: int = 128
    spans: tuple[float, float] = (0.125, 0.375)
    mix: float = 0.0
    world: WorldConfig = field(default_factory=WorldConfig)


class Files(NamedTuple):
    """Where the data are; None for what there is not."""

    documents: Path
    train: Path | None
    dev: Path | None
    test: Path | None
    unwritten: Path | None = None


def data_files(config: KnowledgeData, folder: Path) -> Files:
    """The user's files, or those of a world, which is written into the folder unless it is there."""
    given = {name: getattr(config, name) for name in ("train", "dev", "test")}
    if config.documents:
        return Files(Path(config.documents), *(Path(path) if path else None for path in given.values()))
    if any(given.values()):
        name = next(name for name, path in given.items() if path)
        raise ConfigError(f"data.{name} is given without data.documents: say which documents hold the answers")
    made = folder / "data"
    if not (made / "world.toml").is_file():
        make_world(config.world).write(made)
    names = ("documents.txt", "train.tsv", "dev.tsv", "test.tsv", "unwritten.tsv")
    return Files(*(made / name for name in names))


class _Reading:
    """Documents on the device, and their corruption at a step."""

    def __init__(
        self, config: KnowledgeData, seed: int, device: torch.device, files: Files, tokenizer: Tokenizer | None
    ) -> None:
        documents = read_documents(files.documents)
        asked = [] if files.train is None else [q.text + (q.answer or "") for q in read_questions(files.train)]
        self.tokenizer = tokenizer or vocabulary([*documents, *asked])
        self.config, self.seed, self.device = config, seed, device
        self.mark, self.pad = special(self.tokenizer, MARK), special(self.tokenizer, PAD)
        rows, lengths = pack_documents(self.tokenizer, documents, most=longest_cut(config.block))
        self.rows, self.lengths = rows.to(device), lengths.to(device)
        self.width = int(lengths.max()) + 1  # of x: nothing but padding comes after

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Tensor, *place: str | int) -> Batch:
        source = generator(self.device, self.seed, "corruption", *place)
        rows, lengths = self.rows[chosen], self.lengths[chosen]
        made = corrupt(rows, lengths, self.config.block, self.mark, self.pad, source, self.config.spans)
        return made.columns(self.width)


@task("corruption")
class Corruption(Task):
    """Pretraining: `prefix⁇suffix⁇span` of documents, corrupted anew each time they are read."""

    Config = KnowledgeData
    files = ("documents", "train", "dev", "test")

    def __init__(
        self, config: KnowledgeData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        self.reading = _Reading(config, seed, device, data_files(config, folder), tokenizer)
        self.tokenizer = self.reading.tokenizer
        self.rows, self.length = len(self.reading), config.block - 1
        self.order = Order(self.rows, seed, device)

    def batch(self, step: int, size: int) -> Batch:
        return self.reading.batch(self.order.at(step, size), step)


@task("questions")
class Questions(Task):
    """Fine-tuning: `question⁇answer⁇`, with loss on answer and closing mark only."""

    Config = KnowledgeData
    metric = "dev/accuracy"
    files = ("documents", "train", "dev", "test")

    def __init__(
        self, config: KnowledgeData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        files = data_files(config, folder)
        if files.train is None:
            raise ConfigError("data.train is missing: a file with `question<TAB>answer` on each line")
        self.reading = _Reading(config, seed, device, files, tokenizer)
        self.tokenizer = self.reading.tokenizer
        self.mix = config.mix
        self.train = self._rows(files.train, config.block, device)
        self.dev = None if files.dev is None else self._rows(files.dev, config.block, device)
        self.rows, self.length = len(self.train.x), config.block - 1
        self.order, self.other = (Order(n, seed, device) for n in (self.rows, len(self.reading)))

    def _rows(self, path: Path, block: int, device: torch.device) -> Batch:
        questions = read_questions(path, answers=True)
        warn_unseen(self.tokenizer, questions, path)
        x, y, _ = question_batch(self.tokenizer, questions, block)
        return Batch(x.to(device), y.to(device))

    def batch(self, step: int, size: int) -> Batch:
        chosen = self.order.at(step, size)
        x, y = self.train.x[chosen], self.train.y[chosen]
        more = round(self.mix * size)
        if not more:
            return Batch(x, y)
        read = self.reading.batch(self.other.at(step, more), "mix", step)
        return Batch(torch.cat([x, read.x]), torch.cat([y, read.y]))

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Loss and accuracy of whole answers. An answer that is likeliest at every place, given those before, is just
        what greedy decoding writes, so one pass over the right answers finds those that it gets right."""
        sets = {"train": self.train.rows(0, 1000), "dev": self.dev}
        return {
            f"{name}/{k}": x for name, rows in sets.items() if rows is not None for k, x in _score(model, rows).items()
        }


def _score(model: Model[Any], rows: Batch) -> dict[str, float]:
    right, total, weight = 0, 0.0, 0
    for start in range(0, len(rows.x), PART):
        part = rows.rows(start, start + PART)
        logits, counts = model(part.x).float(), part.y != IGNORE
        right += int(((logits.argmax(-1) == part.y) | ~counts).all(1).sum())
        total -= float(logits.log_softmax(-1).gather(-1, part.y.clamp(min=0)[..., None])[..., 0][counts].sum())
        weight += int(counts.sum())
    return {"loss": total / weight, "accuracy": right / len(rows.x)}


def warn_unseen(tokenizer: Tokenizer, questions: Sequence[Question], path: Path) -> None:
    """A warning where a file has characters that the model never read."""
    odd = unseen(tokenizer, (text for q in questions for text in (q.text, q.answer or "")))
    if odd:
        listed = " ".join(f"{c!r}×{n}" for c, n in list(odd.items())[:8]) + " …" * (len(odd) > 8)
        warnings.warn(f"{path}: characters that the documents do not have are read as unknown: {listed}", stacklevel=2)
