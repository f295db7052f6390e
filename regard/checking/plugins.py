"""Plugins: turns a function or module of a user's Python file into a subject that laws can test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from regard.errors import PluginError, did_you_mean, quote
from regard.laws import Subject, subject
from regard.mechanisms import mechanisms
from regard.plugins import import_file
from regard.reading import check_path


def plugin(
    path: str,
    causal: bool | None = None,
    length: int | None = None,
    width: int | None = None,
    step: str | None = None,
) -> Subject:
    """Returns a function or module of a Python file of yours as a subject that the laws can test.

    `path` is `file.py:name`, or `file.py` where it is clear which thing is meant; `step` names a function of the file,
    or a method; see `regard.check` for the rest.
    """
    file, name = _split(path)
    module = import_file(file)
    new = sorted(known for known, cls in mechanisms().items() if cls.__module__ == module.__name__)
    said = {"causal": causal, "length": length, "width": width, "step": step}
    options = "".join(f", {key}={value!r}" for key, value in said.items() if value is not None)
    source = f"regard.plugin({path!r}{options})"
    if name is None:
        if len(new) == 1:
            return subject(new[0], source=source)
        name = _only_candidate(module, file, new)
    if name in new:
        return subject(name, source=source)
    if not hasattr(module, name):
        raise PluginError(f"{file} defines no '{name}'.{did_you_mean(name, _candidates(module))}")
    told: Any = step
    if step is not None and hasattr(module, step):
        told = getattr(module, step)  # a function of the file; else it is the name of a method
    return subject(
        getattr(module, name), label=name, source=source, causal=causal, length=length, width=width, step=told
    )


def _split(path: str) -> tuple[Path, str | None]:
    """Returns the file and the name that a path such as file.py:name stands for."""
    file, colon, name = path.rpartition(":")
    if not colon or not file or not name.isidentifier():
        file = path
        name = ""
    if not check_path(file, PluginError).is_file():
        raise PluginError(f"no file {quote(file)}; expected --plugin file.py or file.py:name")
    return Path(file), name or None


def _candidates(module: Any) -> list[str]:
    """Returns the names of all modules and functions of its own that a Python module defines."""
    own = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    return [
        n
        for n, x in own.items()
        if isinstance(x, nn.Module) or (callable(x) and getattr(x, "__module__", None) == module.__name__)
    ]


def _only_candidate(module: Any, file: Path, registered: list[str]) -> str:
    """Returns the one name that can be meant, or raises an error that lists them."""
    found = registered or _candidates(module)
    if len(found) != 1:
        what = "no function or module"
        if found:
            what = f"several things ({', '.join(found)})"
        raise PluginError(f"{file} defines {what}; say which: --plugin {file}:name")
    return found[0]
