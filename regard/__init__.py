"""regard: build an attention mechanism, use it in models, check that it is right, and see what it attends to.

Nothing is imported before it is named (PEP 562): `regard --help` and the completion of a shell need no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError
from regard.version import __version__

if TYPE_CHECKING:
    from regard import cost, hub, kernels, lens, nn
    from regard.checking import Verdict, Verdicts, plugin
    from regard.checking.check import check  # the package has a module of that name, too
    from regard.functional import attend, weights_of
    from regard.generate import generate  # this package and the next are callable, which a type checker cannot know
    from regard.laws import subject
    from regard.lens import record
    from regard.mechanisms import Mechanism, fork, mechanism, mechanisms, register
    from regard.models import GPT, Encoder, Seq2Seq, load
    from regard.shapes import Mask, Rows, Size

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

# Packages and modules that are imported when they are first named.
_ON_DEMAND = (
    "checking",
    "convert",
    "cost",
    "data",
    "devices",
    "functional",
    "generate",
    "hub",
    "kernels",
    "lab",
    "laws",
    "lens",
    "mechanisms",
    "models",
    "nn",
    "report",
    "shapes",
    "sweep",
    "testing",
    "train",
)
# And names that are those of such a package.
_PACKAGE_OF = {
    "Encoder": "models",
    "GPT": "models",
    "Mask": "shapes",
    "Mechanism": "mechanisms",
    "Rows": "shapes",
    "Seq2Seq": "models",
    "Size": "shapes",
    "Verdict": "checking",
    "Verdicts": "checking",
    "attend": "functional",
    "check": "checking",
    "fork": "mechanisms",
    "load": "models",
    "mechanism": "mechanisms",
    "plugin": "checking",
    "record": "lens",
    "register": "mechanisms",
    "subject": "laws",
    "weights_of": "functional",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND and name not in _PACKAGE_OF:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    # Kernels register themselves. A call that torch.compile traces cannot import them any more.
    importlib.import_module("regard.kernels")
    if name in _ON_DEMAND:
        return importlib.import_module(f"regard.{name}")
    found = getattr(importlib.import_module(f"regard.{_PACKAGE_OF[name]}"), name)
    globals()[name] = found  # the next time it is found without this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ON_DEMAND})
