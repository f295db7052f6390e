"""regard: build an attention mechanism, use it in models, check that it is right, and see what it attends to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard import cost, kernels, nn
from regard.errors import RegardError
from regard.functional import attend, weights_of
from regard.mechanisms import Mechanism, fork, mechanism, register
from regard.models import GPT, Encoder, Seq2Seq, load
from regard.shapes import Mask, Rows, Size
from regard.version import __version__

if TYPE_CHECKING:
    from regard import hub, lens
    from regard.checking import Verdict, Verdicts, check, plugin
    from regard.generate import generate  # this package and the next are callable, which a type checker cannot know
    from regard.laws import subject
    from regard.lens import record
    from regard.mechanisms import mechanisms
else:
    from regard import mechanisms

__all__ = [
    "GPT",
    "Encoder",
    "Mask",
    "Mechanism",
    "RegardError",
    "Rows",
    "Seq2Seq",
    "Size",
    "Verdict",
    "Verdicts",
    "__version__",
    "attend",
    "check",
    "cost",
    "fork",
    "generate",
    "hub",
    "kernels",
    "lens",
    "load",
    "mechanism",
    "mechanisms",
    "nn",
    "plugin",
    "record",
    "register",
    "subject",
    "weights_of",
]

# Packages that are imported when they are first named: they need time, or libraries that not everyone has.
_ON_DEMAND = (
    "checking",
    "convert",
    "data",
    "generate",
    "hub",
    "lab",
    "laws",
    "lens",
    "report",
    "sweep",
    "testing",
    "train",
)
# And names that are those of such a package.
_PACKAGE_OF = {
    "Verdict": "checking",
    "Verdicts": "checking",
    "check": "checking",
    "plugin": "checking",
    "record": "lens",
    "subject": "laws",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"regard.{name}")
    if name in _PACKAGE_OF:
        return getattr(importlib.import_module(f"regard.{_PACKAGE_OF[name]}"), name)
    raise AttributeError(f"module 'regard' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ON_DEMAND})
