"""Things known by name: a dict that is filled by a decorator and answers a wrong name with the right ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from regard.errors import OptionError, UnknownNameError, did_you_mean

_T = TypeVar("_T")
_C = TypeVar("_C", bound=Callable[..., Any])


class Registry(dict[str, Callable[..., _T]], Generic[_T]):
    """Factories by name; `kind` is what they make, as an error calls it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, name: str) -> Callable[[_C], _C]:
        """Decorator: makes a factory known under a name."""

        def put(factory: _C) -> _C:
            self[name] = factory
            return factory

        return put

    def find(self, name: str) -> Callable[..., _T]:
        if name not in self:
            raise UnknownNameError(f"no {self.kind} is called '{name}'.{did_you_mean(name, self)}")
        return self[name]

    def build(self, name: str, offered: Mapping[str, Any], **options: Any) -> _T:
        """Made by the factory of that name, from what it takes of `offered` and from all of `options`."""
        factory = self.find(name)
        takes = inspect.signature(factory).parameters
        try:
            bound = inspect.signature(factory).bind(**{n: x for n, x in offered.items() if n in takes} | options)
        except TypeError as error:
            raise OptionError(f"{self.kind} '{name}': {error}. Its options: {', '.join(takes) or 'none'}.") from None
        return factory(*bound.args, **bound.kwargs)
