"""Reading text files exactly, or with an error that names file and line; writing them so that no file is lost."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

from regard.errors import DataError
from regard.storage import atomic_write

__all__ = ["DataError", "read_lines", "read_pieces", "write_lines"]

PIECE = 1 << 20  # bytes read at a time


def read_pieces(path: str | Path, size: int = PIECE) -> Iterator[str]:
    """Yields the text of a UTF-8 file in pieces of about `size` bytes: exactly, but for a byte order mark."""
    path = Path(path)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    try:
        with path.open("rb") as file:
            while raw := file.read(size):
                # NUL is valid UTF-8, but no text has it, and UTF-16 has one in every ASCII character.
                if b"\0" in raw:
                    line += raw[: raw.index(b"\0")].count(b"\n")
                    raise DataError(f"{path}, line {line}: a NUL byte; expected UTF-8 text. {_UTF16}")
                yield decoder.decode(raw)  # keeps half a character for the next piece
                line += raw.count(b"\n")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        byte = error.object[error.start]
        hint = "Convert it, e.g. with iconv -t utf-8."
        if line == 1 and byte in (0xFE, 0xFF):  # the two bytes of UTF-16's byte order mark
            hint = _UTF16
        raise DataError(f"{path}, line {line}: byte 0x{byte:02X} is not UTF-8. {hint}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; expected a UTF-8 text file") from None


_UTF16 = "It may be UTF-16: convert it, e.g. with iconv -f utf-16 -t utf-8."


def read_lines(path: str | Path, expected: str = "one text a line") -> list[str]:
    r"""Returns the lines of a UTF-8 file, ended by "\n" or "\r\n" and by nothing else; an empty file is an error."""
    # Not str.splitlines, which also ends lines at characters such as U+2028 that a text may hold.
    lines: list[str] = []
    rest: list[str] = []  # pieces of a line that has not ended
    for piece in read_pieces(path):
        first, *more = piece.split("\n")
        rest.append(first)
        if more:
            lines.append("".join(rest))
            lines += more[:-1]
            rest = more[-1:]
    if any(rest):
        lines.append("".join(rest))
    if not lines:
        raise DataError(f"{path} is empty; expected {expected}")
    return [line.removesuffix("\r") for line in lines]


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Writes lines, which `read_lines` returns unchanged; an earlier file stays until all of them are on disk."""
    with atomic_write(path) as file:
        for number, line in enumerate(lines, 1):
            wrong = _find_unwritable(line, number)
            if wrong:
                raise DataError(f"{path}, line {number} would hold {wrong} and not be read back as it is: {line!r:.60}")
            try:
                file.write(line.encode() + b"\n")
            except UnicodeEncodeError:
                raise DataError(f"{path}, line {number}: half of a surrogate pair has no UTF-8: {line!r:.60}") from None


def _find_unwritable(line: str, number: int) -> str | None:
    """Returns in words what keeps a line from being read back unchanged; None if nothing does."""
    if "\n" in line:
        return "a line break"
    if "\0" in line:
        return "a NUL"
    if line.endswith("\r"):
        return "a carriage return at its end"
    if number == 1 and line.startswith("\ufeff"):
        return "a byte order mark"
    return None
