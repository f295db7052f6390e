"""Reading untrusted files within limits: JSON, TOML, and the bytes of any regular file.

Every JSON and TOML document of regard is read here. For a document that is too large, nested too deeply, not UTF-8 or
not well formed, the error class that the caller passes is raised, with the file in its message. Devices and pipes are
refused: they may have no end.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from regard.errors import RegardError, quote

# The files of a vocabulary, the largest JSON in use, have some 40 MB; settings have a few kilobytes. Parsing TOML takes
# time that grows with the square of a key's length.
MAX_JSON_BYTES = 1 << 28
MAX_TOML_BYTES = 1 << 20
MAX_DEPTH = 100  # of objects, arrays and tables inside each other
MAX_KEY_PARTS = 100  # of a dotted key in TOML, each of which is a table

_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_TOML_STRING = re.compile(
    rb'"""(?:[^"\\]++|\\.|"{1,2}+(?!"))*+(?:""")?'
    rb"|'''(?:[^']++|'{1,2}+(?!'))*+(?:''')?"
    rb'|"(?:[^"\\\n]++|\\.)*+"?'
    rb"|'[^'\n]*+'?"
    rb"|\#[^\n]*+",
    re.DOTALL,
)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DOTTED = re.compile(rb"(?:[\w \t-]*+\.){%d}" % MAX_KEY_PARTS)


class ReadingError(RegardError, ValueError):
    """A file that is no regular file, too large, or not what its name says."""


def check_path(path: str | Path, error: type[RegardError] = ReadingError) -> Path:
    """Returns the path; raises `error` if no file can have it or if the system does not allow to look at it."""
    path = Path(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as cause:
        raise error(f"{_show(path)}: {cause.strerror or cause}; expected the path of a file or folder") from None
    except ValueError as cause:  # a NUL, or half of a surrogate pair
        raise error(f"{_show(path)} is no path: {cause}") from None
    return path


def open_file(path: str | Path, error: type[RegardError] = ReadingError, most: int | None = None) -> BufferedReader:
    """Opens a regular file of at most `most` bytes; raises `error` for a pipe or a device, without waiting for it."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as cause:
        reason = cause.strerror or str(cause)
        if cause.errno == errno.ENOENT:
            reason = "it does not exist"
        raise error(f"{_show(path)} cannot be read: {reason}") from None
    except ValueError as cause:
        raise error(f"{_show(path)} is no path: {cause}") from None
    status = os.fstat(handle)
    fault = None
    if stat.S_ISDIR(status.st_mode):
        fault = "is a folder; expected a file"
    elif not stat.S_ISREG(status.st_mode):
        fault = "is a pipe or a device, which may have no end; expected a regular file"
    elif most is not None and status.st_size > most:
        fault = f"has {status.st_size:,} bytes; expected at most {most:,}"
    if fault is not None:
        os.close(handle)
        raise error(f"{path} {fault}")
    return os.fdopen(handle, "rb")


def _show(path: str | Path) -> str:
    return quote(str(path), marks=False)


def check_file(path: str | Path, error: type[RegardError] = ReadingError, most: int | None = None) -> None:
    """Raises `error` if a file is missing, is not a regular file, or is larger than `most` bytes."""
    open_file(path, error, most).close()


def read_bytes(path: str | Path, error: type[RegardError] = ReadingError, most: int = MAX_JSON_BYTES) -> bytes:
    """Returns the bytes of a regular file, which may have at most `most`."""
    with open_file(path, error, most) as file:
        most = min(most, os.fstat(file.fileno()).st_size)  # read(n) allocates n bytes, however small the file
        try:
            raw = file.read(most + 1)
        except OSError as cause:
            raise error(f"{path} cannot be read: {cause.strerror or cause}") from None
    if len(raw) > most:
        raise error(f"{path} grows while it is read; expected a file that is complete")
    return raw


def read_text(path: str | Path, error: type[RegardError] = ReadingError, most: int = MAX_JSON_BYTES) -> str:
    """Returns the text of a UTF-8 file."""
    return _decode(read_bytes(path, error, most), str(path), error)


def read_json(path: str | Path, error: type[RegardError] = ReadingError) -> Any:
    """Returns the value that a JSON file holds."""
    return parse_json(read_bytes(path, error, MAX_JSON_BYTES), str(path), error)


def read_json_object(path: str | Path, error: type[RegardError] = ReadingError) -> dict[str, Any]:
    """Returns the object that a JSON file holds."""
    document = read_json(path, error)
    if not isinstance(document, dict):
        raise error(f"{path}: {type(document).__name__}, expected an object of keys and values")
    return document


def read_toml(path: str | Path, error: type[RegardError] = ReadingError) -> dict[str, Any]:
    """Returns the tables of a TOML file."""
    return parse_toml(read_bytes(path, error, MAX_TOML_BYTES), str(path), error)


def check_fields(
    document: Any, kinds: Mapping[str, type | UnionType], source: str, error: type[RegardError] = ReadingError
) -> dict[str, Any]:
    """Returns the document if it is an object whose values have these types; a key may be missing if None is
    allowed."""
    if not isinstance(document, dict):
        raise error(f"{source}: {type(document).__name__}, expected an object of keys and values")
    for key, kind in kinds.items():
        value = document.get(key)
        if not fits(value, kind):
            expected = getattr(kind, "__name__", str(kind))
            raise error(f"{source} is damaged: {key} = {quote(value)}, expected {expected}")
    return document


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has the type of an annotation; each entry of a list, tuple or dict is checked, too."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, h) for h in arguments)
    if origin in (tuple, list):
        return isinstance(value, origin) and all(fits(x, arguments[0]) for x in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            isinstance(n, str) and fits(x, arguments[1]) for n, x in value.items()
        )
    # To isinstance, True is an int and an int is no float; here True is no number, and an int may stand for a float.
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool) and _is_double(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_double(value: float) -> bool:
    """Returns whether a number can be a float: an int may be larger than the largest float."""
    return isinstance(value, float) or value.bit_length() < 1024


def check_hints(value: Any, source: str, error: type[RegardError], skip: tuple[str, ...] = ()) -> None:
    """Raises `error` if a field of a dataclass does not have its annotated type; fields in `skip` are not checked."""
    for name, hint in get_type_hints(type(value)).items():
        if name not in skip and get_origin(hint) is not ClassVar and not fits(getattr(value, name), hint):
            raise error(f"{source}: {name} = {quote(getattr(value, name))} is not of the right type; record it again")


def parse_json(raw: str | bytes, source: str, error: type[RegardError] = ReadingError) -> Any:
    """Returns the value of a JSON text; `source` names it in errors."""
    return _parse(raw, source, error, json.loads, _JSON_STRING, "no JSON")


def parse_toml(raw: str | bytes, source: str, error: type[RegardError] = ReadingError) -> dict[str, Any]:
    """Returns the tables of a TOML text; `source` names it in errors."""
    tables: dict[str, Any] = _parse(raw, source, error, tomllib.loads, _TOML_STRING, "no TOML")
    return tables


def _parse(
    raw: str | bytes,
    source: str,
    error: type[RegardError],
    parse: Callable[[str], Any],
    string: re.Pattern[bytes],
    fault: str,
) -> Any:
    """Decodes, checks and parses a text; `string` matches strings and comments, whose brackets nest nothing."""
    if isinstance(raw, str):
        text = raw
        raw = raw.encode("utf-8", "replace")
    else:
        text = _decode(raw, source, error)
    bare = string.sub(b"0", raw)
    if _nesting(bare) > MAX_DEPTH or (parse is tomllib.loads and _DOTTED.search(bare)):
        raise error(f"{source} is nested more than {MAX_DEPTH} deep; expected less")
    try:
        return parse(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{source} is damaged or {fault}: {quote(cause)}") from None
    # tomllib raises these for some malformed dates and keys.
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as cause:
        raise error(f"{source} is damaged or {fault}: {quote(cause)}") from None


def _nesting(bare: bytes) -> int:
    """Returns how deeply brackets are nested in a text whose strings were taken out."""
    brackets = bare.translate(None, _NOT_BRACKETS)
    return max(accumulate(1 if sign in b"[{" else -1 for sign in brackets), default=0)


def _decode(raw: bytes, source: str, error: type[RegardError]) -> str:
    """Returns bytes as text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as cause:
        line = raw[: cause.start].count(b"\n") + 1
        raise error(f"{source}, line {line}: byte 0x{raw[cause.start]:02X} is not UTF-8; expected UTF-8 text") from None
