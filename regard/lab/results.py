"""Typed results: an experiment's results are a frozen dataclass, written to results.json and read from it again."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from regard.report.page import ReportError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Returns a value as JSON has it: dataclasses as objects, tuples as arrays."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def read_results(kind: type[T], document: Mapping[str, Any]) -> T:
    """Returns the typed results of a document that was read from results.json; what it lacks is a ReportError."""
    try:
        return typing.cast("T", _from_json(kind, document))
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(
            f"the results lack the part '{error.args[0]}' ({type(error).__name__}); expected those of `regard run`"
        ) from error


def _from_json(kind: Any, value: Any) -> Any:
    """Returns a value of JSON as the type `kind`: dataclasses of objects, tuples of arrays, all else unchanged.

    Keys that a dataclass does not know are passed over, so that files of other versions open.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {}
        for field in fields(kind):
            if field.name in value or field.default is MISSING:
                known[field.name] = _from_json(hints[field.name], value[field.name])
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
    return value
