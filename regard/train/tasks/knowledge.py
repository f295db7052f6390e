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
    UNKNOWN,
    Question,
    pack_documents,
    question_batch,
    read_documents,
    read_questions,
    special,
    unseen,
    vocabulary,
)
from regard.data.seeds import generator
from regard.data.tokenizers import Tokenizer
from regard.data.world import WorldConfig, make_world, read_world
from regard.models import Model
from regard.train.tasks.base import Order, Task, task

PART = 256  # rows evaluated at a time
AHEAD = 16  # batches corrupted at a time
SMALLEST_BLOCK = 9  # a document of four characters, cut to 7/8, with its marks
MOST_MIX = 100


@dataclass(frozen=True, kw_only=True)
class KnowledgeData(Section):
    """Documents (one a line) and questions (`question<TAB>answer`); without documents, those of an invented world.

    `test` may lack answers. `block` is the window in characters; `spans` the least and greatest share of a document
    that is masked, and `words` whether it is widened to whole words. `mix`: while questions are learned, so many
    corrupted documents are read along for each of them.
    """

    place = "data"

    documents: str = ""
    train: str = ""
    dev: str = ""
    test: str = ""
    block: int = 128
    spans: tuple[float, float] = (0.125, 0.375)
    words: bool = False
    mix: float = 0.0
    world: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < SMALLEST_BLOCK:
            raise ConfigError(f"data.block = {self.block}: expected at least {SMALLEST_BLOCK}")
        if len(self.spans) != 2 or not 0 < self.spans[0] <= self.spans[1] <= 1:
            raise ConfigError(f"data.spans = {list(self.spans)}: expected two shares, 0 < smallest <= largest <= 1")
        if not 0 <= self.mix <= MOST_MIX:
            raise ConfigError(f"data.mix = {self.mix}: expected 0 to {MOST_MIX}")


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
    elif read_world(made).config != config.world:
        raise ConfigError(f"{made} holds another world than data.world asks for: choose another --out, or remove it")
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
        self.space = self.tokenizer.encode(" ")[0]
        self.width = int(lengths.max()) + 1  # of x: nothing but padding comes after

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Tensor, *place: str | int) -> Batch:
        source = generator(self.seed, "corruption", *place, device=self.device)
        rows, lengths = self.rows[chosen], self.lengths[chosen]
        block, between = self.config.block, self.space if self.config.words else None
        return corrupt(rows, lengths, block, self.mark, self.pad, source, self.config.spans, between=between)


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
        self.period = AHEAD
        self._made: tuple[int, int, Batch] | None = None

    def batch(self, step: int, size: int) -> Batch:
        """Batches are made several at a time, which takes a GPU no longer than one, each of texts of like length, of
        which a CPU computes no more than there is. A GPU computes all alike: its step is one graph."""
        ahead, place = divmod(step, AHEAD)
        if self._made is None or self._made[:2] != (ahead, size):
            self._made = ahead, size, self._alike(self.order.at(ahead, size * AHEAD), ahead, size)
        batch = self._made[2].rows(place * size, (place + 1) * size)
        if batch.x.device.type != "cpu":
            return batch
        return batch.columns(int((batch.y != IGNORE).sum(1).max()))

    def _alike(self, chosen: Tensor, ahead: int, size: int) -> Batch:
        rows = self.reading.batch(chosen, ahead).columns(self.reading.width)
        by_length = (rows.y != IGNORE).sum(1).argsort(stable=True).view(AHEAD, size)
        mixed = torch.randperm(
            AHEAD, generator=generator(self.reading.seed, "mixed", ahead, device=chosen.device), device=chosen.device
        )
        order = by_length[mixed].flatten()
        return Batch(rows.x[order], rows.y[order])


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
        made = question_batch(self.tokenizer, questions, block)
        width = int((made.y != IGNORE).any(0).nonzero().max()) + 1  # nothing but padding comes after
        if self.mix:
            width = max(width, self.reading.width)
        return Batch(made.x[:, :width].to(device), made.y[:, :width].to(device))

    def batch(self, step: int, size: int) -> Batch:
        chosen = self.order.at(step, size)
        x, y = self.train.x[chosen], self.train.y[chosen]
        more = round(self.mix * size)
        if not more:
            return Batch(x, y)
        read = self.reading.batch(self.other.at(step, more), "mix", step).columns(x.shape[1])
        return Batch(torch.cat([x, read.x]), torch.cat([y, read.y]))

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Loss and accuracy of whole answers. An answer that is likeliest at every place, given those before, is just
        what greedy decoding writes, so one pass over the right answers finds those that it gets right."""
        sets = {"train": self.train.rows(0, 1000), "dev": self.dev}
        unknown = special(self.tokenizer, UNKNOWN)
        scores = {name: _score(model, rows, unknown) for name, rows in sets.items() if rows is not None}
        return {f"{name}/{key}": value for name, score in scores.items() for key, value in score.items()}


def _score(model: Model[Any], rows: Batch, unknown: int) -> dict[str, float]:
    right, total, weight = 0, 0.0, 0
    for start in range(0, len(rows.x), PART):
        part = rows.rows(start, start + PART)
        logits, counts = model(part.x).float(), part.y != IGNORE
        hit = (logits.argmax(-1) == part.y) & (part.y != unknown)  # what it cannot write, it cannot get right
        right += int((hit | ~counts).all(1).sum())
        total -= float(logits.log_softmax(-1).gather(-1, part.y.clamp(min=0)[..., None])[..., 0][counts].sum())
        weight += int(counts.sum())
    return {"loss": total / weight, "accuracy": right / len(rows.x)}


def warn_unseen(tokenizer: Tokenizer, questions: Sequence[Question], path: Path) -> None:
    """A warning where a file has characters that the model never read."""
    odd = unseen(tokenizer, (text for q in questions for text in (q.text, q.answer or "")))
    if odd:
        listed = " ".join(f"{c!r}×{n}" for c, n in list(odd.items())[:8]) + " …" * (len(odd) > 8)
        warnings.warn(f"{path}: characters that the documents do not have are read as unknown: {listed}", stacklevel=2)
