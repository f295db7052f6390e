"""Span corruption: a data set of rows `prefix ⁇ suffix ⁇ span`, padded with □: documents with a span moved to the end.

A submission is a class CharCorruptionDataset(data, block_size): `data` has a document a line; item i is x, y
[block_size−1], x all but the last token of the row and y all but the first. `stoi` and `itos` map characters and ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.grade.advice import SubmissionError
from regard.grade.cases import Draw, GradeCase

MARK = "⁇"
PAD = "□"
BLOCK = 128
WORDS = ["river", "stone", "lamp", "winter", "garden", "silver", "copper", "marble", "valley", "bridge", "harbour"]
SHARP = 40  # characters of a cut from which shares and places are measured; shorter ones are rounded too much
TRIALS = 300  # rows of one document that averages are taken over


class CorruptedRow(NamedTuple):
    """The parts of a row `prefix ⁇ suffix ⁇ span`."""

    prefix: str
    suffix: str
    span: str

    @property
    def document(self) -> str:
        return self.prefix + self.span + self.suffix


def documents(draw: Draw) -> Iterator[GradeCase]:
    """Yields a data set of documents, some shorter than a block and some longer."""
    lines = []
    for _ in range(12):
        words = draw.random.choices(WORDS, k=draw.random.randint(8, 40))
        lines.append(" ".join(words) + f" {draw.random.randint(1000, 9999)}.")
    yield GradeCase(("\n".join(lines),), ("\n".join(lines), BLOCK), f"12 documents, block_size {BLOCK}")


def _documents(data: str) -> list[str]:
    return data.split("\n")


def _read(dataset: Any, i: int) -> tuple[Tensor, Tensor]:
    """Returns x and y of an item; raises a SubmissionError if they are not two tensors of dtype long."""
    item = dataset[i]
    if not isinstance(item, tuple | list) or len(item) != 2 or not all(isinstance(t, Tensor) for t in item):
        raise SubmissionError("An item is a pair of tensors: return x, y.", "failed")
    x, y = item
    if x.dtype != torch.long or y.dtype != torch.long:
        words = f"Items are of {x.dtype} and {y.dtype}, expected torch.long."
        raise SubmissionError(words, "failed", "Make tensors with dtype=torch.long: ids are whole numbers.", "not_long")
    return x, y


def _text(dataset: Any, ids: Tensor) -> str:
    return "".join(dataset.itos[int(i)] for i in ids)


def _row(dataset: Any, i: int) -> str:
    """Returns the whole row behind an item, padding included: x, and the last token of y."""
    x, y = _read(dataset, i)
    return _text(dataset, x) + _text(dataset, y[-1:])


def _parts(row: str) -> CorruptedRow | None:
    """Returns the parts of a row; None if it does not have exactly two marks."""
    body = row.rstrip(PAD)
    pieces = body.split(MARK)
    if len(pieces) != 3:
        return None
    return CorruptedRow(*pieces)


def _all_parts(dataset: Any, count: int) -> list[CorruptedRow]:
    found = [_parts(_row(dataset, i)) for i in range(count)]
    return [parts for parts in found if parts is not None]


def lengths(dataset: Any, data: str) -> Any:
    """Returns what is wrong with the number of items, their dtype, or the lengths of x and y."""
    count = len(_documents(data))
    if len(dataset) != count:
        return f"there are {len(dataset)} items, expected one a document, {count}"
    for i in range(count):
        x, y = _read(dataset, i)
        if x.shape != y.shape:
            return f"x has the shape {list(x.shape)} and y {list(y.shape)}"
        if x.shape == (BLOCK,):
            return "whole_block"
        if x.numel() < BLOCK - 1 and not _text(dataset, x).endswith(PAD):
            return "not_padded", f"x has the shape {list(x.shape)}, expected [{BLOCK - 1}] for block_size {BLOCK}"
        if x.shape != (BLOCK - 1,):
            return f"x has the shape {list(x.shape)}, expected [{BLOCK - 1}] for block_size {BLOCK}"
    return None


def shifted(dataset: Any, data: str) -> Any:
    """Returns what is wrong if targets are not the inputs one token later."""
    for i in range(len(_documents(data))):
        x, y = _read(dataset, i)
        if torch.equal(x, y):
            return "targets_not_shifted"
        if torch.equal(x[:-1], y[1:]):
            return "shifted_backwards"
        if not torch.equal(x[1:], y[:-1]):
            return "y is not x one token later: y[j] must be x[j+1]"
    return None


def marks(dataset: Any, data: str) -> Any:
    """Returns what is wrong with the marks and the padding."""
    for i in range(len(_documents(data))):
        row = _row(dataset, i)
        body = row.rstrip(PAD)
        if PAD not in body.lstrip(PAD) and body != body.lstrip(PAD):
            return "padding_first"
        if body.count(PAD) == 1 and body.count(MARK) == 1:
            return "padding_for_mark"
        if PAD in body:
            return "padding_inside"
        count = body.count(MARK)
        if count == 1:
            return "one_mark"
        if count == 3 and body.endswith(MARK):
            return "third_mark"
        if count > 3 and body.endswith(MARK * 2):
            return "padded_with_marks"
        if count > 2 and MARK * 2 in body:  # with exactly two marks, an empty suffix may stand between them
            return "mark_for_each"
        if count != 2:
            return f"a row has {count} marks {MARK}, expected two: {row[:60]!r}"
    return None


def reconstructable(dataset: Any, data: str) -> Any:
    """Returns what is wrong if prefix + span + suffix is not the beginning of the document."""
    for i, document in enumerate(_documents(data)):
        row = _row(dataset, i)
        parts = _parts(row)
        if parts is None:
            return f"no prefix {MARK} suffix {MARK} span can be read from {row[:60]!r}"
        if document.startswith(parts.document):
            continue
        if document.startswith(parts.prefix + parts.span[::-1] + parts.suffix):
            return "span_reversed"
        if document.startswith(parts.prefix + parts.suffix + parts.span) and parts.suffix:
            return "span_is_end"
        if document.startswith(parts.prefix + parts.suffix) and parts.prefix + parts.suffix:
            return "nothing_taken_out"
        if parts.prefix and document.startswith(parts.suffix + parts.span + parts.prefix):
            return "suffix_first"
        if parts.document in document:
            return "cut_at_front"
        if any(other.startswith(parts.document) for other in _documents(data)):
            return "another_document"
        if _is_off_by_one(parts, document):
            return "off_by_one"
        return f"putting the span back does not give the document: {parts.document[:50]!r} … of {document[:50]!r}"
    return None


def _is_off_by_one(parts: CorruptedRow, document: str) -> bool:
    """Returns whether the suffix begins one character too early or too late."""
    end = len(parts.prefix + parts.span)
    if not document.startswith(parts.prefix + parts.span):
        return False
    return document[end + 1 :].startswith(parts.suffix) or document[end - 1 :].startswith(parts.suffix)


def not_empty(dataset: Any, data: str) -> Any:
    """Returns the slip of empty spans if there is one."""
    for _ in range(20):
        for parts in _all_parts(dataset, len(_documents(data))):
            if not parts.span:
                return "empty_span"
    return None


def _trials(dataset: Any, data: str, shortest: int = 0) -> list[CorruptedRow]:
    """Returns many rows of the longest document, those with at least `shortest` of its characters."""
    longest = max(range(len(_documents(data))), key=lambda i: len(_documents(data)[i]))
    found = [_parts(_row(dataset, longest)) for _ in range(TRIALS)]
    rows = [parts for parts in found if parts is not None]
    if len(rows) < TRIALS:
        raise SubmissionError(f"No prefix {MARK} suffix {MARK} span can be read from some rows.", "failed")
    kept = [parts for parts in rows if len(parts.document) >= shortest]
    if not kept:
        raise SubmissionError(f"Documents are always cut to fewer than {shortest} of {BLOCK} characters.", "failed")
    return kept


def share_masked(dataset: Any, data: str) -> Any:
    """Returns what is wrong with the mean share of characters in spans, which should be a quarter."""
    rows = _trials(dataset, data, SHARP)
    if len(set(rows)) == 1:
        return "not_anew"
    shares = torch.tensor([len(r.span) / len(r.document) for r in rows])
    if float(shares.std()) < 0.02:
        return "fixed_span"
    mean = float(shares.mean())
    if not 0.22 < mean < 0.28:
        return "another_share", f"on average {mean:.0%} of a document is taken out, expected 25%"
    return None


def cuts(dataset: Any, data: str) -> Any:
    """Returns what is wrong with the lengths of cut documents, which should be random from 4 to 7/8 of the block."""
    rows = _trials(dataset, data)
    found = [len(r.document) for r in rows]
    most = BLOCK * 7 // 8
    if max(found) == min(found):
        return "never_cut"
    if max(found) > most:
        return "cut_too_late", f"a document was cut to {max(found)} characters, expected at most {most}"
    if min(found) < 4:
        return "cut_too_short", f"a document was cut to {min(found)} characters, expected at least 4"
    if max(found) < 0.8 * most or min(found) > 30:
        words = f"documents are cut to {min(found)} … {max(found)} characters, expected all of 4 … {most}"
        return "cut_too_narrow", words
    return None


def places(dataset: Any, data: str) -> Any:
    """Returns what is wrong with the beginnings of spans, which should be random."""
    rows = _trials(dataset, data, SHARP)
    starts = torch.tensor([len(r.prefix) / max(1, len(r.prefix) + len(r.suffix)) for r in rows])
    if float(starts.std()) < 0.02:
        return "fixed_place"
    if float(starts.min()) > 0.1:
        return "never_at_start"
    if not 0.4 < float(starts.mean()) < 0.6:
        return f"spans begin {float(starts.mean()):.0%} of the way through on average, expected 50%"
    return None
