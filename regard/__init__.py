"""regard: build an attention mechanism, use it in models, check that it is right, and see what it attends to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard import cost, hub, kernels, lens, nn
from regard.checking import Verdict, Verdicts, check, plugin
from regard.errors import RegardError
from regard.functional import attend, weights_of
from regard.laws import subject
from regard.lens import record
from regard.mechanisms import Mechanism, fork, mechanism, register
from regard.models import GPT, Encoder, Seq2Seq, load
from regard.shapes import Mask, Rows, Size
from regard.version import __version__

if TYPE_CHECKING:  # these packages are callable, which a type checker cannot know
    from regard.generate import generate
    from regard.mechanisms import mechanisms
else:
    from regard import generate, mechanisms

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
_ON_DEMAND = ("convert", "data", "lab", "report", "sweep", "testing", "train")


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute '{name}'")
