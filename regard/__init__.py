"""regard: build an attention mechanism, and check that it is right."""

from regard import cost, kernels
from regard.attend import attend
from regard.checking import Verdict, Verdicts, check, plugin
from regard.errors import RegardError
from regard.laws import subject
from regard.mechanisms import Mechanism, fork, mechanism, mechanisms, register
from regard.shapes import Mask, Rows, Size

__version__ = "0.1.0"

__all__ = [
    "Mask",
    "Mechanism",
    "RegardError",
    "Rows",
    "Size",
    "Verdict",
    "Verdicts",
    "attend",
    "check",
    "cost",
    "fork",
    "kernels",
    "mechanism",
    "mechanisms",
    "plugin",
    "register",
    "subject",
]
