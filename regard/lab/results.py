"""Typed results: an experiment's results are a frozen dataclass, written to results.json and read from it again."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from regard.errors import quote
from regard.reading import fits
from regard.report.page import ReportError

T = TypeVar("T")

# Metadata of a field that is left out of JSON if it is None.
LEFT_OUT_IF_NONE = types.MappingProxyType({"left_out_if_none": True})


@dataclass(frozen=True)
class OutcomeTable:
    """The table that a terminal shows when an experiment has ended: columns, and rows of text."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class ResultsHeader:
    """What every results.json holds beside what was found; None for what an older file lacks."""

    command: str | None = None
    title: str | None = None
    device: str | None = None
    seconds: float | None = None
    versions: dict[str, str] | None = None


def to_json(value: Any) -> Any:
    """Returns a value as JSON has it: dataclasses as objects, tuples as arrays."""
    if is_dataclass(value):
        present = [
            f for f in fields(value) if not ("left_out_if_none" in f.metadata and getattr(value, f.name) is None)
        ]
        return {_key(f): to_json(getattr(value, f.name)) for f in present}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def read_results(kind: type[T], document: Mapping[str, Any]) -> T:
    """Returns the typed results of a document that was read from results.json; what it lacks is a ReportError."""
    parts = {}
    hints = get_type_hints(kind)
    for f in fields(typing.cast("Any", kind)):
        key = _key(f)
        if key not in document and _has_default(f):
            continue
        if key not in document:
            raise ReportError(f"the results lack the part '{key}' (KeyError); expected those of `regard run`")
        try:
            parts[f.name] = _from_json(hints[f.name], document[key])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReportError(
                f"the results' part '{key}' is not as a report needs it ({type(error).__name__}: {quote(error)}); "
                f"{kind.__module__} describes it; expected those of `regard run`"
            ) from error
    return kind(**parts)


def _key(f: Field[Any]) -> str:
    """Returns the key of a field in JSON: its name, without the underscore that a keyword of Python gets (`class_`)."""
    return f.name.removesuffix("_")


def _has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _from_json(kind: Any, value: Any) -> Any:
    """Returns a value of JSON as the type `kind`: dataclasses of objects, tuples of arrays, all else unchanged.

    Keys that a dataclass does not know are passed over, so that files of other versions open.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {}
        for f in fields(kind):
            if _key(f) in value or not _has_default(f):
                known[f.name] = _from_json(hints[f.name], value[_key(f)])
        return kind(**known)  # type: ignore[operator]
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin in (typing.Union, types.UnionType):  # `kind | None`
        if value is None:
            return None
        return _from_json(arguments[0], value)
    if origin is list:
        return [_from_json(arguments[0], item) for item in value]
    if origin is dict:
        return {key: _from_json(arguments[1], item) for key, item in value.items()}
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_from_json(arguments[0], item) for item in value)
        return tuple(_from_json(part, item) for part, item in zip(arguments, value, strict=True))
    if kind in (str, int, float, bool) and not fits(value, kind):
        raise TypeError(f"{quote(value)} is no {kind.__name__}")
    return value
