"""Packages that can be called: `regard.generate(model, …)` beside `regard.generate.Settings`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Makes a package callable: calling it then calls one of its functions.

    A public function may share its name with a package, as `regard.generate` does. If the function replaced the
    package, the package's modules could not be reached by their dotted names.
    """

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    # Python looks up __call__ on the type of an object, never on the module itself.
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module.__dict__["__signature__"] = inspect.signature(function)
