"""regard: build an attention mechanism, use it in models, and check that it is right."""

from regard import cost, kernels, nn
from regard.attend import attend
from regard.checking import Verdict, Verdicts, check, plugin
from regard.errors import RegardError
from regard.generate import generate
from regard.laws import subject
from regard.mechanisms import Mechanism, fork, mechanism, mechanisms, register
from regard.models import GPT, Encoder, Seq2Seq, load
from regard.shapes import Mask, Rows, Size

__version__ = "0.1.0"

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
    "attend",
    "check",
    "cost",
    "fork",
    "generate",
    "kernels",
    "load",
    "mechanism",
    "mechanisms",
    "nn",
    "plugin",
    "register",
    "subject",
]
