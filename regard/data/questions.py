r"""Questions with one answer each, and the documents that hold the answers.

Files of either are UTF-8 text with one entry a line. A question is `Where was X born?\tPlace`; test files may lack the
answers. A model reads `question⁇answer⁇` padded with □; only the answer and the closing mark have a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError, read_lines, write_lines
from regard.data.tokenizers import Characters, Tokenizer
from regard.errors import quote

MARK = "⁇"  # ends a question, and an answer
PAD = "□"
UNKNOWN = "<unknown>"


@dataclass(frozen=True)
class Question:
    """A question, and its answer where it is known."""

    text: str
    answer: str | None = None


def read_questions(path: str | Path, answers: bool | None = None) -> list[Question]:
    """Returns questions in the order of the file.

    `answers`: True, each must have one; False, any may lack it; None, all or none have one. "" counts as no answer.
    """
    questions: list[Question] = []
    for number, line in enumerate(read_lines(path, "one question a line"), 1):
        text, *rest = line.split("\t")
        if len(rest) > 1:
            raise DataError(f"{path}, line {number}: {len(rest)} tabs; expected one, between question and answer")
        if not text.strip():
            raise DataError(f"{path}, line {number}: an empty question; expected question, tab, answer")
        answer = None
        if rest and rest[0].strip():
            answer = rest[0]
        question = Question(text, answer)
        if answers and answer is None:
            fault = "an empty answer" if rest else "no tab"
            raise DataError(f"{path}, line {number}: {fault}; expected question, tab, answer")
        if answers is None and questions and (answer is None) != (questions[0].answer is None):
            here, first = "an answer", "none"
            if answer is None:
                here, first = "no answer", "an answer"
            raise DataError(f"{path}, line {number}: {here}, but line 1 has {first}; expected all lines alike")
        questions.append(question)
    return questions


def write_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Writes questions, with their answers where they have one."""
    write_lines(path, (_format_row(path, n, q) for n, q in enumerate(questions, 1)))


def _format_row(path: str | Path, number: int, question: Question) -> str:
    """Returns the line of a question; raises an error where it could not be read back."""
    parts = [question.text]
    if question.answer is not None:
        parts.append(question.answer)
    if any("\t" in p or not p.strip() for p in parts):
        raise DataError(f"{path}, line {number}: {question} is empty or holds a tab, which is what divides the two")
    return "\t".join(parts)


def read_documents(path: str | Path) -> list[str]:
    """Returns the documents of a file, one a line; blank lines are skipped."""
    documents = [line for line in read_lines(path, "one document a line") if line.strip()]
    if not documents:
        raise DataError(f"{path} holds only blank lines; expected one document a line")
    return documents


def write_predictions(path: str | Path, answers: Iterable[str]) -> None:
    """Writes one answer a line, in the order of the questions; line breaks and NULs become spaces."""
    write_lines(path, (answer.translate(_ONE_LINE) for answer in answers))


_ONE_LINE = str.maketrans(dict.fromkeys("\n\r\0\ufeff", " "))


def read_predictions(path: str | Path) -> list[str]:
    """Returns the answers of a file, one a line, empty ones too."""
    return read_lines(path, "one answer a line")


def vocabulary(texts: Iterable[str]) -> Characters:
    """Returns a tokenizer of the characters of texts, after the pad (id 0), the mark (1) and the unknown (2)."""
    return Characters(sorted(set().union(*texts)), (PAD, MARK, UNKNOWN))


def unseen(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Returns how often each character occurs that the tokenizer does not know, the most frequent first."""
    if not isinstance(tokenizer, Characters):
        return {}
    known = set(tokenizer.tokens) - set(tokenizer.special)
    counts = Counter(c for text in texts for c in text if c not in known)
    return dict(counts.most_common())


def escape_marks(text: str) -> str:
    """Returns the text with ⁇ and □ replaced by the unknown token, so that they are not taken for mark and pad."""
    return text.replace(MARK, UNKNOWN).replace(PAD, UNKNOWN)


def prompt(question: Question | str) -> str:
    """Returns the text that the model is to continue with the answer: the question and the mark."""
    if isinstance(question, Question):
        question = question.text
    return escape_marks(question) + MARK


def question_batch(tokenizer: Tokenizer, questions: Sequence[Question], block: int) -> Batch:
    """Returns rows `question⁇answer⁇` padded to `block` tokens: x [N,block−1] all but the last, y all but the first.

    Only the answer and its closing mark have a loss.
    """
    rows = torch.full((len(questions), block), special_id(tokenizer, PAD))
    targets = torch.full((len(questions), block), IGNORE)
    for n, question in enumerate(questions):
        if question.answer is None:
            raise DataError(f"question {n + 1}, {quote(question.text)}, has no answer to learn")
        start = tokenizer.encode(prompt(question))
        ids = start + tokenizer.encode(escape_marks(question.answer) + MARK)
        if len(ids) > block:
            raise DataError(
                f"question {n + 1}, {quote(question.text)}: {len(ids)} tokens with answer and marks, a block has "
                f"{block}. Shorten it or train with a larger block."
            )
        rows[n, : len(ids)] = torch.tensor(ids)
        # Loss on the closing mark too: it teaches the model where an answer ends.
        targets[n, len(start) : len(ids)] = rows[n, len(start) : len(ids)]
    return Batch(rows[:, :-1], targets[:, 1:])


def pack_documents(
    tokenizer: Tokenizer, documents: Sequence[str], most: int
) -> tuple[Int[Tensor, "N L"], Int[Tensor, "N"]]:
    """Returns the first `most` tokens of each document, padded to the longest, and how many there are of each."""
    if not documents:
        raise DataError("no documents: expected at least one")
    rows = [torch.tensor(tokenizer.encode(escape_marks(d))[:most], dtype=torch.int32) for d in documents]
    for n, row in enumerate(rows):
        if not len(row):
            raise DataError(f"document {n + 1} is empty; expected text")
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=special_id(tokenizer, PAD))
    return padded, lengths


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of the mark or the pad; the error says how to get a tokenizer that has it."""
    token_id = tokenizer.id(token)
    if token_id is None:
        raise DataError(f"{tokenizer!r} has no special token {token}; build it with regard.data.vocabulary(texts)")
    return token_id
