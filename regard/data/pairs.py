"""Articles and their summaries in files: JSON lines, CSV or TSV; articles alone also as text, one a line.

A pair may carry facts that its summary should state (`truth`): generated pairs do, so that summaries can be judged by
their facts. White space of any kind counts as one space.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.files import DataError, read_lines, read_pieces, write_lines
from regard.errors import did_you_mean
from regard.reading import parse_json

DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (".jsonl", *DELIMITERS)
TRUTH = "truth"
LONGEST = 1 << 27  # characters of a CSV field


class Pair(NamedTuple):
    """An article and its summary; None if there is none. `truth`: facts by name, None for one that the article does not
    state."""

    article: str
    summary: str | None = None
    truth: Mapping[str, str | None] | None = None

    @property
    def empty(self) -> bool:
        """Returns whether the article or the summary is empty."""
        return not self.article or self.summary == ""


class PairSplit(NamedTuple):
    """Pairs for training, for choosing a model (dev), and for the final evaluation (test)."""

    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]


def read_pairs(path: str | Path, article: str = "article", summary: str = "summary") -> list[Pair]:
    """Returns all pairs of a .jsonl, .csv or .tsv file, empty ones too, from the keys or columns of these names."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise DataError(f"{path}: expected pairs in a file that ends in {', '.join(FORMATS)}")
    return [
        Pair(_get_text(row, article, place), _get_text(row, summary, place), _get_truth(row, place))
        for place, row in _read_records(path)
    ]


def read_articles(path: str | Path, article: str = "article") -> list[str]:
    """Returns the articles of a file of pairs, or the lines of any other file."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        return [normalize_spaces(line) for line in read_lines(path, "one article a line")]
    return [_get_text(row, article, place) for place, row in _read_records(path)]


def write_pairs(path: str | Path, pairs: Iterable[Pair]) -> None:
    """Writes JSON lines that `read_pairs` reads."""

    def line(pair: Pair) -> str:
        row: dict[str, Any] = {"article": pair.article, "summary": pair.summary}
        if pair.truth is not None:
            row[TRUTH] = pair.truth
        return json.dumps(row, ensure_ascii=False)

    write_lines(path, map(line, pairs))


def normalize_spaces(text: str) -> str:
    """Returns the text with one space wherever it has white space of any kind."""
    return " ".join(text.split())


def _read_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the records of a file, each with the place where it begins, for errors."""
    if path.suffix.lower() not in DELIMITERS:
        for number, line in enumerate(read_lines(path, 'one JSON object a line, {"article": …, "summary": …}'), 1):
            if line.strip():
                yield f"{path}, line {number}", _parse_object(line, f"{path}, line {number}")
        return
    records = _read_table(path)
    place, names = next(records, ("", []))
    if not names:
        raise DataError(f"{path} is empty; expected a first line that names the columns")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{place}: two columns are called '{twice}'; expected a name of its own for each")
    for place, fields in records:
        if len(fields) != len(names):
            raise DataError(
                f"{place}: {len(fields)} fields, expected {len(names)} as in the first line; a field that holds the "
                'delimiter or a line break stands in quotes, and a quote in it is written twice: ""'
            )
        yield place, dict(zip(names, fields, strict=True))


def _parse_object(line: str, place: str) -> Mapping[str, Any]:
    """Returns the JSON object of a line."""
    row = parse_json(line, place, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__}, expected an object of keys and values")
    return row


def _read_table(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the fields of each line of a CSV or TSV file that is not blank, with its place."""
    text = io.StringIO("".join(read_pieces(path)), newline="")
    with _raised_field_limit():
        # strict: a quote in the wrong place is an error, not part of the text.
        reader = csv.reader(text, delimiter=DELIMITERS[path.suffix.lower()], strict=True)
        while True:
            # A record may have several lines; errors name the first.
            place = f"{path}, line {reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(
                    f"{place}: the record that begins here cannot be read ({error}); expected fields in double quotes "
                    'where they hold a quote, written "", the delimiter, or a line break'
                ) from None
            if fields:
                yield place, fields


@contextmanager
def _raised_field_limit() -> Iterator[None]:
    """Raises the csv library's limit on the length of a field, which is global, and restores it at the end."""
    before = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _get_text(row: Mapping[str, Any], name: str, place: str) -> str:
    """Returns one text of a record with its white space normalised."""
    if name not in row:
        raise DataError(
            f"{place}: no '{name}'.{did_you_mean(name, row)} Name the right one with data.article=…, "
            "data.summary=… (or --article)"
        )
    value = row[name]
    if not isinstance(value, str):
        raise DataError(f"{place}: '{name}' is {value!r:.40}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: '{name}' holds half of a surrogate pair, which is no text: {value!r:.60}") from None
    return normalize_spaces(value)


def _get_truth(row: Mapping[str, Any], place: str) -> Mapping[str, str | None] | None:
    """Returns the facts that a record carries, or None."""
    truth = row.get(TRUTH)
    if truth is None or isinstance(truth, str):  # a column of that name that means something else
        return None
    if not isinstance(truth, dict) or not all(isinstance(x, str | None) for x in truth.values()):
        raise DataError(f"{place}: '{TRUTH}' is {truth!r:.60}, expected names with texts")
    return truth
