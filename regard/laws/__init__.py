"""What must hold of any attention, as functions: law(subject, case) → Finding, or `DoesNotApply`.

A `Case` is everything that a trial depends on, so a broken law can be shrunk and repeated. A `Subject` is what is put
to the test: a mechanism, a function f(q, k, v, causal=True), or a module. Tolerances are relative to the largest
reference value: 1e-10 in float64, 1e-5 in float32; in half precision the error against float64 may be twice that of
the plain computation at the same precision, three times for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from regard.laws.case import Case, DoesNotApply, Finding
from regard.laws.faces import (
    flops_as_declared,
    kernel_is_reference,
    parallel_is_weights,
    recurrent_is_parallel,
    rows_sum_to_one,
    written_is_cross,
)
from regard.laws.outside import (
    batch_does_not_matter,
    gradients_are_right,
    heads_and_shapes,
    hidden_keys_are_inert,
    looks_ahead,
)
from regard.laws.same import SameAs
from regard.laws.subjects import Subject, subject

__all__ = ["LAWS", "Case", "DoesNotApply", "Finding", "Law", "SameAs", "Subject", "applies", "draw_case", "subject"]

Law = Callable[[Subject, Case], Finding]
LAWS: dict[str, Law] = {
    "weights": parallel_is_weights,
    "recurrent": recurrent_is_parallel,
    "rows": rows_sum_to_one,
    "looks-ahead": looks_ahead,
    "cross": written_is_cross,
    "hidden": hidden_keys_are_inert,
    "flops": flops_as_declared,
    "kernel": kernel_is_reference,
    "batch": batch_does_not_matter,
    "gradients": gradients_are_right,
    "heads": heads_and_shapes,
}


def draw_case(seed: int, dtype: str = "float64", device: str = "cpu") -> Case:
    """A case drawn from a seed: odd lengths, each dimension another prime, every kind of mask."""
    made = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(0, len(options), (), generator=made))]

    G = pick(1, 1, 2, 3)
    padding = pick("none", "left", "right", "inside")
    T = pick(1, 2, 5, 7, 11, 13, 131)
    return Case(
        B=pick(1, 2, 3),
        T=T,
        S=pick(2, 3, 5, 17),
        H=G * pick(1, 2, 3),
        G=G,
        K=pick(2, 3, 5, 7),
        V=pick(2, 3, 5, 11),
        causal=pick(True, True, False),
        padding=padding,
        window=pick(None, None, 1, 3),
        documents=pick(False, False, True),
        dtype=dtype,
        seed=seed,
        device=device,
    )


def applies(law: Law, subject: Subject, case: Case) -> Finding | str:
    """A finding, or the reason why the law does not apply."""
    try:
        return law(subject, subject.fit(case))
    except DoesNotApply as reason:
        return str(reason)
    except Exception as error:  # whatever the subject raises on ordinary input is a finding of its own
        return Finding(math.inf, 0.0, f"{type(error).__name__}: {error}")
