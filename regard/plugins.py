"""Mechanisms from the user's own files, which are imported when the user names them and recorded by name and hash.

A run or a model folder records which file defined its mechanism. Opening the folder never runs that file: the user must
name it again, with --plugin or `regard.plugin`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.errors import PluginError, RegardError, quote
from regard.mechanisms import Mechanism
from regard.mechanisms.base import MECHANISMS
from regard.reading import check_path, read_bytes

KEY = "plugins"  # the key of a config under which the result of `describe` is saved
_PREFIX = "regard_plugin_"
_SHOWN = 12  # digits of a hash


@dataclass(frozen=True)
class PluginFile:
    """A file that was imported in this process: the path that the user gave, and the SHA-256 of its content then."""

    path: str
    sha256: str


_IMPORTED: dict[str, PluginFile] = {}  # by the name of the module


def import_file(path: str | Path) -> ModuleType:
    """Imports a Python file, which runs it, and returns its module; only files that the user has named are imported."""
    file = check_path(path, PluginError)
    if not file.is_file():
        raise PluginError(f"no file {quote(str(file))}; expected --plugin file.py")
    name = f"{_PREFIX}{file.stem}"
    _IMPORTED[name] = PluginFile(str(path), _hash(file))
    try:
        return run_file(file, name, PluginError)
    except BaseException:
        del _IMPORTED[name]
        raise


def run_file(file: Path, name: str, error: type[RegardError]) -> ModuleType:
    """Runs a Python file as a module of this name in `sys.modules` and returns the module; raises `error` if it cannot
    be run, fails, or asks Python to exit."""
    shown = quote(str(file))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise error(f"{shown} is not a Python file; expected file.py or file.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as cause:
        raise error(
            f"{shown} cannot be imported: it ends Python ({quote(cause)}). What it does when it is run belongs below "
            '`if __name__ == "__main__":`'
        ) from cause
    except Exception as cause:
        raise error(f"{shown} cannot be imported: {type(cause).__name__}: {quote(cause)}") from cause
    return module


def _hash(file: Path) -> str:
    return hashlib.sha256(read_bytes(file, PluginError)).hexdigest()


def find_file(mechanism: type[Mechanism]) -> PluginFile | None:
    """Returns the file that defines a mechanism; None for regard's own, and for those of an interactive shell."""
    name = mechanism.__module__
    if name.partition(".")[0] == "regard":
        return None
    if name in _IMPORTED:
        return _IMPORTED[name]
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return PluginFile(path, _hash(Path(path)))


def describe(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the name and the hash of the file that defines each of these mechanisms, regard's own left out."""
    found = {}
    for name in sorted(set(names) & set(MECHANISMS)):
        file = find_file(MECHANISMS[name])
        if file is not None:
            found[name] = {"file": Path(file.path).name, "sha256": file.sha256}
    return found


def paths(names: Iterable[str]) -> list[str]:
    """Returns the files that define these mechanisms, as the user named them, each once."""
    classes = [MECHANISMS[name] for name in names if name in MECHANISMS]
    files = [file for file in map(find_file, classes) if file is not None]
    return sorted({file.path for file in files})


def words(names: Iterable[str]) -> list[str]:
    """Returns the options of a command that import these mechanisms: --plugin and the path, for each file."""
    return [word for path in paths(names) for word in ("--plugin", path)]


def imported_paths() -> list[str]:
    """Returns the paths of all files imported in this process, so that a worker process can import them too."""
    return [file.path for file in _IMPORTED.values() if Path(file.path).is_file()]


def mechanism_names(config: Any) -> Iterator[str]:
    """Yields the names of the mechanisms in a config and in the sections inside it."""
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key in ("mechanism", "mechanisms", "cross"):
            names = value if isinstance(value, list | tuple) else [value]
            yield from (name for name in names if isinstance(name, str))
        else:
            yield from mechanism_names(value)


def require(records: Any, place: str | Path) -> None:
    """Raises a PluginError that names the file to import if a mechanism in `records` is not registered; warns if the
    file has changed since. `records` is what `describe` returned when `place`, a run or a model, was saved."""
    if records is None:
        return
    if not isinstance(records, Mapping) or not all(_is_record(record) for record in records.values()):
        raise PluginError(f"{place}: {KEY} = {quote(records)}: expected a file and a sha256 for each mechanism")
    for name, record in records.items():
        file, sha256 = (quote(record[key], marks=False) for key in ("file", "sha256"))
        if name not in MECHANISMS:
            raise PluginError(
                f"{place} needs the mechanism {quote(name)} of {file} (SHA-256 {sha256[:_SHOWN]}…): say --plugin "
                f"{file}, or in Python regard.plugin({file!r})"
            )
        here = find_file(MECHANISMS[name])
        if here is not None and here.sha256 != record["sha256"]:
            warnings.warn(
                f"{place} was made with another {file}: {quote(name)} had SHA-256 {sha256[:_SHOWN]}…, and "
                f"{Path(here.path).name} has {here.sha256[:_SHOWN]}…",
                stacklevel=3,
            )


def _is_record(record: Any) -> bool:
    return isinstance(record, Mapping) and all(isinstance(record.get(key), str) for key in ("file", "sha256"))
