"""The task `questions`: fine-tuning on questions and their answers, with documents read along where asked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.config import ConfigError
from regard.data.batch import IGNORE, Batch
from regard.data.questions import UNKNOWN, Question, question_batch, read_questions, special_id, unseen
from regard.data.tokenizers import Tokenizer
from regard.models import Model
from regard.train.tasks.base import Order, Task, task
from regard.train.tasks.corruption import CorruptedDocuments, KnowledgeData, data_files

PART = 256  # rows evaluated at a time
TRAIN_ROWS = 1000  # training questions that are evaluated
LISTED = 8  # unknown characters that a warning names


@task("questions")
class Questions(Task):
    """Fine-tuning: `question⁇answer⁇`, with loss on answer and closing mark only."""

    Config = KnowledgeData
    metric = "dev/accuracy"
    files = ("documents", "train", "dev", "test")
    generated = ("world",)

    def __init__(
        self, config: KnowledgeData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        files = data_files(config, folder)
        if files.train is None:
            raise ConfigError("data.train is missing: a file with `question<TAB>answer` on each line")
        self.documents = CorruptedDocuments(config, seed, device, files, tokenizer)
        self.tokenizer = self.documents.tokenizer
        self.mix = config.mix
        self.train = self._read_rows(files.train, config.block, device)
        self.dev: Batch | None = None
        if files.dev is not None:
            self.dev = self._read_rows(files.dev, config.block, device)
        self.rows = len(self.train.x)
        self.length = config.block - 1
        self.order = Order(self.rows, seed, device)

    def _read_rows(self, path: Path, block: int, device: torch.device) -> Batch:
        """Returns a file's questions as rows on the device, without the columns that hold nothing but padding."""
        questions = read_questions(path, answers=True)
        warn_unseen(self.tokenizer, questions, path)
        rows = question_batch(self.tokenizer, questions, block)
        width = int((rows.y != IGNORE).any(0).nonzero().max()) + 1
        if self.mix:
            width = max(width, self.documents.width)
        return Batch(rows.x[:, :width].to(device), rows.y[:, :width].to(device))

    def batch(self, step: int, size: int) -> Batch:
        """Returns a batch of `size` questions, followed by `mix` times as many corrupted documents."""
        chosen = self.order.at(step, size)
        questions = Batch(self.train.x[chosen], self.train.y[chosen])
        extra = round(self.mix * size)
        if not extra:
            return questions
        read = self.documents.batch(step, extra, "mix").columns(questions.x.shape[1])
        return Batch(torch.cat([questions.x, read.x]), torch.cat([questions.y, read.y]))

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns loss and accuracy of whole answers. Greedy decoding writes the right answer if each of its tokens is
        the likeliest given the right ones before it, so one pass over the right answers counts those."""
        sets = {"train": self.train.rows(0, TRAIN_ROWS), "dev": self.dev}
        unknown = special_id(self.tokenizer, UNKNOWN)
        scores = {name: score_answers(model, rows, unknown) for name, rows in sets.items() if rows is not None}
        return {f"{name}/{key}": value for name, score in scores.items() for key, value in score.items()}


def score_answers(model: Model[Any], rows: Batch, unknown: int) -> dict[str, float]:
    """Returns the mean `loss` of all targets, and as `accuracy` the share of rows whose targets are all the likeliest
    tokens; `unknown` is the id that counts as wrong."""
    right = 0
    total = 0.0
    weight = 0
    for start in range(0, len(rows.x), PART):
        part = rows.rows(start, start + PART)
        logits = model(part.x).float()
        is_target = part.y != IGNORE
        hit = (logits.argmax(-1) == part.y) & (part.y != unknown)  # what it cannot write, it cannot get right
        right += int((hit | ~is_target).all(1).sum())
        log_likelihoods = logits.log_softmax(-1).gather(-1, part.y.clamp(min=0)[..., None])[..., 0]
        total -= float(log_likelihoods[is_target].sum())
        weight += int(is_target.sum())
    return {"loss": total / weight, "accuracy": right / len(rows.x)}


def warn_unseen(tokenizer: Tokenizer, questions: Sequence[Question], path: Path) -> None:
    """Warns if a file has characters that are not in the tokenizer."""
    counts = unseen(tokenizer, (text for q in questions for text in (q.text, q.answer or "")))
    if counts:
        listed = " ".join(f"{c!r}×{n}" for c, n in list(counts.items())[:LISTED]) + " …" * (len(counts) > LISTED)
        warnings.warn(f"{path}: characters that the documents do not have are read as unknown: {listed}", stacklevel=2)
