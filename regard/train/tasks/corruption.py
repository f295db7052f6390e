"""The task `corruption`: pretraining on documents by span corruption. Its data are also those of `questions`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.corruption import corrupt, longest_cut
from regard.data.questions import (
    MARK,
    PAD,
    pack_documents,
    read_documents,
    read_questions,
    special_id,
    vocabulary,
)
from regard.data.seeds import generator
from regard.data.tokenizers import Tokenizer
from regard.data.world import WorldConfig, make_world, read_world
from regard.train.tasks.base import Order, Task, task

AHEAD = 16  # batches corrupted at a time
SMALLEST_BLOCK = 9  # a document of four characters, cut to 7/8, with its marks
MOST_MIX = 100
WORLD_FILES = ("documents.txt", "train.tsv", "dev.tsv", "test.tsv", "unwritten.tsv")


@dataclass(frozen=True, kw_only=True)
class KnowledgeData(Section):
    """Documents (one a line) and questions (`question<TAB>answer`); without documents, those of an invented world.

    `test` may lack answers. `block` is the window in characters; `cut` the share of documents that are cut to a random
    length, where the others are read whole, as far as the block goes; `spans` the least and greatest share of a
    document that is masked, and `words` whether it is widened to whole words. `mix`: the number of
    corrupted documents that are added to a batch for each question.
    """

    place = "data"

    documents: str = ""
    train: str = ""
    dev: str = ""
    test: str = ""
    block: int = 128
    cut: float = 1.0
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
        if not 0 <= self.cut <= 1:
            raise ConfigError(f"data.cut = {self.cut}: expected a share, 0 to 1")
        if not 0 <= self.mix <= MOST_MIX:
            raise ConfigError(f"data.mix = {self.mix}: expected 0 to {MOST_MIX}")


class KnowledgeFiles(NamedTuple):
    """The files of documents and questions; None for a file that does not exist."""

    documents: Path
    train: Path | None
    dev: Path | None
    test: Path | None
    unwritten: Path | None = None


def data_files(config: KnowledgeData, folder: Path) -> KnowledgeFiles:
    """Returns the user's files, or those of a generated world, which are written into `folder` unless they exist."""
    questions = {name: getattr(config, name) for name in ("train", "dev", "test")}
    if config.documents:
        paths = {name: Path(path) for name, path in questions.items() if path}
        return KnowledgeFiles(Path(config.documents), paths.get("train"), paths.get("dev"), paths.get("test"))
    if any(questions.values()):
        name = next(name for name, path in questions.items() if path)
        raise ConfigError(f"data.{name} is given without data.documents: say which documents hold the answers")
    world = folder / "data"
    if not (world / "world.toml").is_file():
        make_world(config.world).write(world)
    elif read_world(world).config != config.world:
        raise ConfigError(f"{world} holds another world than data.world asks for: choose another --out, or remove it")
    return KnowledgeFiles(*(world / name for name in WORLD_FILES))


class CorruptedDocuments:
    """Encoded documents on the device; every batch replaces other spans of them by masks."""

    def __init__(
        self,
        config: KnowledgeData,
        seed: int,
        device: torch.device,
        files: KnowledgeFiles,
        tokenizer: Tokenizer | None,
    ) -> None:
        documents = read_documents(files.documents)
        self.tokenizer = tokenizer or vocabulary([*documents, *_question_texts(files)])
        self.config = config
        self.seed = seed
        self.device = device
        self.mark = special_id(self.tokenizer, MARK)
        self.pad = special_id(self.tokenizer, PAD)
        rows, lengths = pack_documents(self.tokenizer, documents, most=longest_cut(config.block))
        self.rows = rows.to(device)
        self.lengths = lengths.to(device)
        self.space = self.tokenizer.encode(" ")[0]
        self.width = int(lengths.max()) + 1  # of x: nothing but padding comes after
        self.order = Order(len(self.rows), seed, device)
        self._group: tuple[int, int, Batch] | None = None  # (group, batch size, its AHEAD batches)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, size: int, *purpose: str) -> Batch:
        """Returns `size` corrupted documents [size,width] for a step; they depend on seed, step and size alone.

        AHEAD batches are corrupted at once, as this takes a GPU no longer than one batch.
        """
        group, place = divmod(step, AHEAD)
        if self._group is None or self._group[:2] != (group, size):
            chosen = self.order.at(group, size * AHEAD)
            rows = self.corrupt(chosen, *purpose, group).columns(self.width)
            if self.device.type == "cpu":
                rows = self._sort_by_length(rows, group, size)
            self._group = (group, size, rows)
        return self._group[2].rows(place * size, (place + 1) * size)

    def corrupt(self, chosen: Tensor, *place: str | int) -> Batch:
        """Returns the chosen documents [B] as corrupted rows; the spans depend on the seed and on `place` alone."""
        source = generator(self.seed, "corruption", *place, device=self.device)
        between = None
        if self.config.words:
            between = self.space  # spans grow to the next space on both sides
        return corrupt(
            self.rows[chosen],
            self.lengths[chosen],
            self.config.block,
            self.mark,
            self.pad,
            source,
            self.config.spans,
            between=between,
            cut_share=self.config.cut,
        )

    def _sort_by_length(self, rows: Batch, group: int, size: int) -> Batch:
        """Returns AHEAD concatenated batches, each of rows of similar length, so that a CPU computes little padding.

        The batches are then shuffled, so that their lengths neither rise nor fall within a group.
        """
        by_length = (rows.y != IGNORE).sum(1).argsort(stable=True).view(AHEAD, size)
        source = generator(self.seed, "mixed", group, device=self.device)
        shuffled = torch.randperm(AHEAD, generator=source, device=self.device)
        order = by_length[shuffled].flatten()
        return Batch(rows.x[order], rows.y[order])


def _question_texts(files: KnowledgeFiles) -> list[str]:
    """Returns the training questions with their answers: the vocabulary must hold their characters too."""
    if files.train is None:
        return []
    return [question.text + (question.answer or "") for question in read_questions(files.train)]


@task("corruption")
class Corruption(Task):
    """Pretraining: `prefix⁇suffix⁇span` of documents, corrupted anew each time they are read."""

    Config = KnowledgeData
    files = ("documents", "train", "dev", "test")
    generated = ("world",)

    def __init__(
        self, config: KnowledgeData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        self.documents = CorruptedDocuments(config, seed, device, data_files(config, folder), tokenizer)
        self.tokenizer = self.documents.tokenizer
        self.rows = len(self.documents)
        self.length = config.block - 1
        self.period = AHEAD

    def batch(self, step: int, size: int) -> Batch:
        """Returns the batch of a step [size,T], on a CPU without the columns that hold nothing but padding."""
        batch = self.documents.batch(step, size)
        if batch.x.device.type != "cpu":
            return batch  # a GPU's step is one CUDA graph, which needs one shape
        return batch.columns(int((batch.y != IGNORE).sum(1).max()))
