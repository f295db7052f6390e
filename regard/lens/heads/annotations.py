"""Annotated texts: dependency syntax from CoNLL-U, coreference from JSONL with character spans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from regard.data.files import DataError, read_lines
from regard.errors import quote
from regard.reading import parse_json

Span = tuple[int, int]


@dataclass(frozen=True)
class Parsed:
    """A sentence with its dependency tree: the character span, governor (−1: root) and relation of each word."""

    text: str
    words: tuple[Span, ...]
    governors: tuple[int, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Mentions:
    """A text with the spans of its mentions, in text order, and the coreference cluster of each."""

    text: str
    spans: tuple[Span, ...]
    clusters: tuple[int, ...]


def read_conllu(path: str | Path) -> list[Parsed]:
    """Returns the sentences of a CoNLL-U file; the words of a multiword token ("don't") share its characters."""
    lines = read_lines(path, "sentences in CoNLL-U")
    annotated = []
    start = 0
    for end in range(len(lines) + 1):
        if end == len(lines) or not lines[end].strip():
            rows = [(n + 1, lines[n]) for n in range(start, end) if not lines[n].startswith("#")]
            if rows:
                annotated.append(_sentence(str(path), rows))
            start = end + 1
    if not annotated:
        raise DataError(
            f"{path} holds no sentence; expected CoNLL-U: ten columns with tabs between, a blank line after each"
        )
    return annotated


def _sentence(path: str, rows: list[tuple[int, str]]) -> Parsed:
    """Returns the sentence whose words stand in these (line number, line) pairs of a CoNLL-U file."""
    text = ""
    words: list[Span] = []
    governors: list[int] = []
    relations: list[str] = []
    shared: tuple[int, Span] = (0, (0, 0))  # multiword token: number of its last word, its characters
    for line, row in rows:
        cells = row.split("\t")
        if len(cells) != 10:
            raise DataError(f"{path}, line {line}: {len(cells)} columns, expected 10 with tabs between (CoNLL-U)")
        number = cells[0]
        form = cells[1]
        space = "" if "SpaceAfter=No" in cells[9].split("|") else " "
        if "." in number:
            continue  # an empty node has no characters
        if "-" in number:
            first, last = (_parse_word_number(path, line, x) for x in number.split("-", 1))
            if last < first:
                raise DataError(f"{path}, line {line}: words {number}, expected the first before the last")
            shared = (last, (len(text), len(text) + len(form)))
            text += form + space
            continue
        here = _parse_word_number(path, line, number)
        if here != len(words) + 1:
            raise DataError(f"{path}, line {line}: word {here}, expected {len(words) + 1}")
        if here <= shared[0]:
            words.append(shared[1])
        else:
            words.append((len(text), len(text) + len(form)))
            text += form + space
        governors.append(_parse_word_number(path, line, cells[6]) - 1)
        relations.append(cells[7].split(":")[0])
    wrong = next((n for n, governor in enumerate(governors) if governor >= len(words)), None)
    if wrong is not None:
        raise DataError(
            f"{path}, line {rows[0][0]}: word {wrong + 1} depends on {governors[wrong] + 1} of {len(words)} words"
        )
    return Parsed(text.rstrip(), tuple(words), tuple(governors), tuple(relations))


def _parse_word_number(path: str, line: int, text: str) -> int:
    """Parses the number of a word; raises DataError with the line if it is none."""
    if not text.isdecimal():
        raise DataError(f"{path}, line {line}: {quote(text)}, expected the number of a word")
    return int(text)


def read_mentions(path: str | Path) -> list[Mentions]:
    """Returns the texts of a JSONL file, one per line: {"text": …, "clusters": [[[start, end], …], …]}.

    Spans are in characters, with exclusive ends.
    """
    annotated = []
    for number, line in enumerate(read_lines(path, "one JSON object a line"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = parse_json(line, where, DataError)
        try:
            text = entry["text"]
            clusters = entry["clusters"]
            spans = [(int(a), int(b), n) for n, cluster in enumerate(clusters) for a, b in cluster]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(
                f"{where}: {type(error).__name__} {quote(error)}; expected "
                '{"text": …, "clusters": [[[start, end], …], …]}'
            ) from None
        if not isinstance(text, str):
            raise DataError(f"{where}: 'text' is {quote(text)}, expected a string")
        for a, b, _ in spans:
            if not 0 <= a < b <= len(text):
                raise DataError(
                    f"{where}: characters {a} to {b} of a text of {len(text)}, expected 0 ≤ start < end ≤ {len(text)}"
                )
        spans.sort()
        annotated.append(Mentions(text, tuple((a, b) for a, b, _ in spans), tuple(n for _, _, n in spans)))
    return annotated
