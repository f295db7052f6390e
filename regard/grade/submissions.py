"""Finding submissions (a Python file, a notebook, or a folder of either), and converting notebooks to Python files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.errors import DataError, quote
from regard.grade.spec import Spec
from regard.reading import check_fields, check_path, read_json, read_text

SUFFIXES = (".py", ".ipynb")
MAX_SOURCE_BYTES = 1 << 24
MAX_PARSED = 1 << 24  # characters of a notebook parsed in all, as cells are parsed again after each magic

# Lines that only IPython understands: magics, shell commands, help, and assignments of the first two.
_MAGIC = re.compile(r"\s*([%!?]|[\w, ]+=\s*[%!]|\w[\w.]*\?{1,2}\s*$)")
_TRANSPARENT = re.compile(r"%%(time|timeit|capture|prun)\b")  # cell magics that run the rest of the cell as Python
_FAILED_CELLS = "_cells_that_failed"


@dataclass(frozen=True)
class Submission:
    """One student's work: the name for tables, and the file; `fault` says why there is nothing to grade.

    `alone`: the folder has no files of others, so that modules in it may be imported.
    """

    name: str
    path: Path
    fault: str = ""
    alone: bool = True

    @property
    def folder(self) -> str:
        """Returns the folder from which modules of this submission may be imported; "" for none."""
        if self.alone:
            return str(self.path.resolve().parent)
        return ""


def find_submissions(path: str | Path, spec: Spec) -> list[Submission]:
    """Returns the submissions of a path: a file is one, a folder holds files or folders, one each."""
    place = check_path(path, DataError)
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise DataError(f"{place}: expected a Python file (.py), a notebook (.ipynb) or a folder of them")
        return [Submission(place.stem, place)]
    if not place.is_dir():
        raise DataError(f"no file or folder {quote(str(place))}; expected a .py, a .ipynb or a folder of submissions")
    found = []
    for entry in sorted(place.iterdir()):
        if entry.name.startswith((".", "__")):
            continue
        if entry.is_dir():
            found.append(_choose_file(entry, spec))
        elif entry.suffix in SUFFIXES:
            found.append(Submission(entry.stem, entry, alone=False))
    if not found:
        raise DataError(f"{place} holds no submission: no .py or .ipynb, and no folder with one")
    return _with_unique_names(found)


def _with_unique_names(found: list[Submission]) -> list[Submission]:
    """Returns the submissions, with file names as names if two have the same name, such as a.py and a.ipynb."""
    names = Counter(one.name for one in found)
    return [replace(one, name=one.path.name) if names[one.name] > 1 else one for one in found]


def _choose_file(folder: Path, spec: Spec) -> Submission:
    """Returns the submission of a folder: the file named in the spec, else the only one, else one with an export."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file() and not _is_hidden(p, folder))
    named = [p for p in files if p.name == spec.table.file]
    if not named and len(files) > 1:
        named = [p for p in files if _mentions(p, spec)]
    chosen = named or files
    if not chosen:
        return Submission(folder.name, folder, "The folder holds no .py and no .ipynb file.")
    if len(chosen) > 1:
        shown = ", ".join(p.name for p in chosen[:5])
        return Submission(folder.name, folder, f"Several files could be meant ({shown}); expected {spec.table.file}.")
    return Submission(folder.name, chosen[0])


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)


def _mentions(path: Path, spec: Spec) -> bool:
    """Returns whether the text of a file seems to define one of the spec's exports."""
    try:
        text = read_text(path, DataError, MAX_SOURCE_BYTES)
    except DataError:
        return False
    names = "|".join(re.escape(export.name) for export in spec.exports)
    return re.search(rf"\b(def|class)\s+({names})\b", text) is not None


def read_source(path: Path, tag: str = "") -> tuple[str, list[str]]:
    """Returns a submission as the text of a Python file, with notes about what was left out of a notebook.

    With a `tag` only the cells of a notebook that have it are read.
    """
    if path.suffix != ".ipynb":
        return read_text(path, DataError, MAX_SOURCE_BYTES), []
    return convert_notebook(read_json(path, DataError), str(path), tag)


def convert_notebook(document: Any, source: str, tag: str = "") -> tuple[str, list[str]]:
    """Returns the code cells of a notebook as one Python file, and notes about cells that are no Python.

    Each cell is put into a `try`, so that the others run if one fails, such as a cell that plots a file that is
    missing. With a `tag`, only cells that have it are used.
    """
    check_fields(document, {"cells": list}, source, DataError)
    cells = [cell for cell in document["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    characters = sum(len(_cell_text(cell)) for cell in cells)
    if characters > MAX_SOURCE_BYTES:
        raise DataError(f"{source}: its code has {characters:,} characters; expected at most {MAX_SOURCE_BYTES:,}")
    notes = []
    bodies: list[str] = []
    future: list[str] = []
    for number, cell in enumerate(cells, 1):
        if tag and not _has_tag(cell, tag):
            continue
        try:
            tree = ast.parse(_without_magics(_cell_text(cell), MAX_PARSED // (characters + 1)))
            body = [s for s in tree.body if not _is_future(s)]
            if body:
                bodies.append(ast.unparse(_guarded(body, number)))
        # The last two: expressions nested too deeply for Python's parser.
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            notes.append(f"Code cell {number} was left out: {_describe_syntax(error)}.")
            continue
        future += [ast.unparse(s) for s in tree.body if _is_future(s)]
    return "\n".join([*future, f"{_FAILED_CELLS} = []", *bodies]) + "\n", notes


def _has_tag(cell: dict[str, Any], tag: str) -> bool:
    metadata = cell.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return isinstance(tags, list) and tag in tags


def _guarded(body: list[ast.stmt], number: int) -> ast.stmt:
    """Returns a try statement that runs a cell and records what it raises."""
    guard = ast.parse(f"try:\n    pass\nexcept Exception as _error:\n    {_FAILED_CELLS}.append(({number}, _error))")
    made = guard.body[0]
    assert isinstance(made, ast.Try)
    made.body = body
    return made


def describe_failed_cells(names: dict[str, Any]) -> list[str]:
    """Returns notes about the cells of an imported notebook that raised an exception."""
    failed = names.get(_FAILED_CELLS, [])
    return [f"Code cell {number} ended with {type(error).__name__}: {quote(error)}." for number, error in failed]


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _cell_text(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(str(line) for line in source)
    return str(source)


def _without_magics(text: str, tries: int) -> str:
    """Returns the text of a cell without lines that only IPython understands.

    Only lines at which Python's parser fails are removed, and at most `tries` of them, since a line inside a string or
    an expression may begin with %.
    """
    lines = text.splitlines()
    first = text.lstrip()
    if first.startswith("%%") and not _TRANSPARENT.match(first):
        return ""
    for _ in range(tries):
        try:
            ast.parse("\n".join(lines))
            break
        except (SyntaxError, ValueError) as error:
            at = (getattr(error, "lineno", None) or 1) - 1
            if at >= len(lines) or not _MAGIC.match(lines[at]):
                break
            lines[at] = re.sub(r"\S.*", "pass", lines[at])
    return "\n".join(lines)


def _describe_syntax(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return quote(f"{error.msg} in `{(error.text or '').strip()}`", marks=False)
    return quote(error)
