"""A dictionary of things known by name, which a decorator fills and whose errors list the known names.

Here, too, functions are called with those of the offered arguments that they have parameters for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from regard.errors import OptionError, RegardError, UnknownNameError, did_you_mean, list_known, quote

_T = TypeVar("_T")
# What annotations of numbers are called in errors; modules write them as text (PEP 563).
_NUMBERS = {
    "int": "a whole number",
    "int | None": "a whole number or None",
    "float": "a number",
    "float | None": "a number or None",
    "bool": "True or False",
}
_V = TypeVar("_V")


class Registry(MutableMapping[str, _T], Generic[_T]):
    """A mapping from names to entries, in the order of registration.

    `kind` is what an entry is called in errors. `modules` names entries that are registered when their module is first
    imported, which happens when one of them is looked up: so a low layer can list what a higher one defines.
    `elsewhere` maps names that other libraries use to ours, for errors.
    """

    def __init__(
        self,
        kind: str,
        modules: Mapping[str, str] | None = None,
        error: type[RegardError] = UnknownNameError,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.elsewhere = dict(elsewhere or {})
        self.error = error
        self._modules = dict(modules or {})
        self._entries: dict[str, _T] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._modules, *self._entries)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._modules

    def __getitem__(self, name: str) -> _T:
        if name not in self._entries and name in self._modules:
            importlib.import_module(self._modules[name])
        return self._entries[name]

    def __setitem__(self, name: str, entry: _T) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def add(self, name: str) -> Callable[[_V], _V]:
        """Returns a decorator that registers an entry under a name.

        A module that is imported again replaces its own entries; another module's entry is never replaced.
        """

        def register(entry: _V) -> _V:
            self.put(name, entry)
            return entry

        return register

    def put(self, name: str, entry: Any) -> None:
        """Registers an entry under a name that no other module has taken."""
        taken = self._entries.get(name)
        origin = getattr(taken, "__module__", None)
        if taken is not None and origin != getattr(entry, "__module__", None):
            raise RegardError(f"a {self.kind} named '{name}' exists already ({origin}); choose another name")
        self._entries[name] = entry

    def find(self, name: str) -> _T:
        """Returns the entry of a name; the error for an unknown name lists the known ones."""
        if not isinstance(name, str) or name not in self:
            raise self.error(self.describe_unknown(name))
        return self[name]

    def describe_unknown(self, name: object) -> str:
        """Returns the message of the error for an unknown name."""
        start = f"no {self.kind} is called {quote(name)}."
        ours = self.elsewhere.get(str(name).lower().replace("_", "-"))
        if ours is not None:
            return f"{start} Here it is '{ours}'.{list_known(self)}"
        return f"{start}{did_you_mean(str(name), self)}"

    def name_of(self, entry: object) -> str | None:
        """Returns the name of an entry, or None if it is not registered; no module is imported to find it."""
        return next((name for name, known in self._entries.items() if known is entry), None)

    def build(self, name: str, offered: Mapping[str, Any], /, **options: Any) -> Any:
        """Calls the entry of a name with all `options` and those of the `offered` arguments that it has parameters
        for."""
        return call_with_options(self.find(name), f"{self.kind} '{name}'", offered, options)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function, or of a class's constructor without `self`, by name and in order."""
    return inspect.signature(function).parameters


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function has a parameter of that name; `**kwargs` does not count."""
    return name in parameters_of(function)


def accepts_any_keyword(function: Callable[..., Any]) -> bool:
    """Returns whether a function has `**kwargs`, and so takes arguments that it does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(function).values())


def accepted_options(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the offered arguments that a function has parameters for."""
    parameters = parameters_of(function)
    return {name: value for name, value in offered.items() if name in parameters}


def call_with_options(function: Any, title: str, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Calls a function with all `options` and those of the `offered` arguments that it has parameters for.

    An option that it has no parameter for raises an OptionError that lists its parameters; `title` names the function.
    """
    signature = inspect.signature(function)
    # Binding first distinguishes a wrong option from a TypeError that the function itself raises.
    try:
        bound = signature.bind(**accepted_options(function, offered) | dict(options))
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise OptionError(f"{title}: {error}. Its options: {known}.") from None
    for name, value in options.items():
        if isinstance(value, str | float):
            _refuse_other_kind(function, title, name, value)
    return function(*bound.args, **bound.kwargs)


def _refuse_other_kind(function: Any, title: str, name: str, value: str | float) -> None:
    """Raises an OptionError for a text whose parameter is annotated as a number, or a float where it is an int."""
    called = function
    if isinstance(function, type):
        called = inspect.getattr_static(function, "__init__")
    hint = getattr(called, "__annotations__", {}).get(name)
    if hint in _NUMBERS and (isinstance(value, str) or hint.startswith("int")):
        raise OptionError(f"{title}: {name} = {quote(value)}, expected {_NUMBERS[hint]}")
