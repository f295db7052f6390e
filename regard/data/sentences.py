r"""Sentences with a label in files: `text\t0` or `text\t1`, one a line, UTF-8, read exactly.

Nothing is quoted: a quote in a text is a quote. Only "\n" ends a line (or "\r\n"), so a text may hold any other
character. A first line whose label is the word `label` names the columns and is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.data.files import DataError, read_lines, write_lines

CLASSES = ("negative", "positive")
HEADER = "label"


class Sentence(NamedTuple):
    """A text, its label (0 or 1), and, for a generated sentence, its kind."""

    text: str
    label: int
    kind: str = ""


class SentenceSplit(NamedTuple):
    """Sentences for training, for choosing a model (dev), and for the final evaluation (test)."""

    train: list[Sentence]
    dev: list[Sentence]
    test: list[Sentence]


def read_sentences(path: str | Path) -> list[Sentence]:
    """Returns all sentences in the order of the file; raises a DataError that names the first line that is none."""
    sentences: list[Sentence] = []
    expected = "expected text, tab, 0 or 1"
    for number, line in enumerate(read_lines(path, "one sentence a line: text, tab, 0 or 1"), 1):
        text, *rest = line.split("\t")
        if number == 1 and len(rest) == 1 and rest[0].strip().lower() == HEADER:
            continue
        if len(rest) != 1:
            raise DataError(f"{path}, line {number}: {len(rest)} tabs, {expected}: {line!r:.60}")
        label = rest[0].strip(" ")
        if label not in ("0", "1"):
            raise DataError(f"{path}, line {number}: the label is {rest[0]!r:.20}, {expected}")
        if not text.strip():
            raise DataError(f"{path}, line {number}: an empty text, {expected}")
        sentences.append(Sentence(text, int(label)))
    if not sentences:
        raise DataError(f"{path} has a first line and no sentence below it; {expected}")
    return sentences


def write_sentences(path: str | Path, sentences: Iterable[Sentence]) -> None:
    """Writes sentences as `read_sentences` reads them; kinds are not written."""

    def line(sentence: Sentence) -> str:
        if "\t" in sentence.text or not sentence.text.strip():
            raise DataError(f"{path}: {sentence.text!r:.60} is empty or holds a tab, which is what divides the two")
        return f"{sentence.text}\t{sentence.label}"

    write_lines(path, map(line, sentences))


def count_seen(train: Iterable[Sentence], others: Iterable[Sentence]) -> int:
    """Returns how many of the others have a text that is in train, too."""
    known = {sentence.text for sentence in train}
    return sum(sentence.text in known for sentence in others)


def majority_label(sentences: Sequence[Sentence]) -> int:
    """Returns the most frequent label; of two as frequent, the one that occurs first."""
    return Counter(sentence.label for sentence in sentences).most_common(1)[0][0]
