"""Fast twins of single faces. They register beside a mechanism, which never imports them.

A kernel has the arguments of the face it replaces, the mechanism first. Which one runs is decided per instance:
`fast(model)` lets regard choose (the default), `plain(model)` runs the reference, `fast(model, "sdpa")` insists.
"""

# They register their kernels, which are tried in this order.
from regard.kernels import argmax, decode, flex, linear, quadratic, recurrence, sdpa
from regard.kernels.registry import fast, kernel, plain, registered, runs_here

__all__ = [
    "argmax",
    "decode",
    "fast",
    "flex",
    "kernel",
    "linear",
    "plain",
    "quadratic",
    "recurrence",
    "registered",
    "runs_here",
    "sdpa",
]
