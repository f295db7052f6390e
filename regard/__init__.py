"""regard: build an attention mechanism, use it in models, check that it is right, and see what it attends to."""

from regard import cost, hub, kernels, lens, nn
from regard.attend import attend
from regard.checking import Verdict, Verdicts, check, plugin
from regard.errors import RegardError
from regard.generate import generate
from regard.laws import subject
from regard.lens import record
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
]
