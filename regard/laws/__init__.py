"""What must hold of any attention, as functions: law(subject, case) returns a Finding, or raises `DoesNotApply`.

A `Case` is everything that a trial depends on, so a broken law can be shrunk and repeated. A `Subject` is what is put
to the test: a mechanism, a function f(q, k, v, causal=True), or a module. Tolerances are relative to the largest
reference value: 1e-10 in float64, 1e-5 in float32; in half precision the error against float64 may be twice that of
the plain computation at the same precision, three times for gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from regard.laws.ahead import looks_ahead
from regard.laws.averages import outputs_are_averages
from regard.laws.case import Case, CouldNotBeAsked, DoesNotApply, Finding
from regard.laws.certain import positions_are_right
from regard.laws.conduct import calls_are_pure, numbers_bear_large_scores, other_tokens_matter
from regard.laws.faces import (
    flops_as_declared,
    parallel_is_weights,
    recurrent_is_parallel,
    rows_sum_to_one,
    written_is_cross,
)
from regard.laws.fused import kernel_is_reference
from regard.laws.outside import (
    batch_does_not_matter,
    gradients_are_right,
    heads_and_shapes,
    queries_are_independent,
)
from regard.laws.padding import blind_rows_are_zero, hidden_keys_are_inert
from regard.laws.same import SameAs
from regard.laws.subjects import Subject, explain_exception, subject
from regard.registry import Registry

__all__ = [
    "LAWS",
    "Case",
    "CouldNotBeAsked",
    "DoesNotApply",
    "Finding",
    "Law",
    "SameAs",
    "Subject",
    "Unasked",
    "ask",
    "draw_case",
    "draw_long_case",
    "subject",
]

Law = Callable[[Subject, Case], Finding]
LAWS: Registry[Law] = Registry("law")
LAWS.update(
    {
        "weights": parallel_is_weights,
        "recurrent": recurrent_is_parallel,
        "rows": rows_sum_to_one,
        "looks-ahead": looks_ahead,
        "cross": written_is_cross,
        "hidden": hidden_keys_are_inert,
        "blind": blind_rows_are_zero,
        "flops": flops_as_declared,
        "kernel": kernel_is_reference,
        "batch": batch_does_not_matter,
        "gradients": gradients_are_right,
        "heads": heads_and_shapes,
        "positions": positions_are_right,
        "queries": queries_are_independent,
        "pure": calls_are_pure,
        "attends": other_tokens_matter,
        "averages": outputs_are_averages,
        "precision": numbers_bear_large_scores,
    }
)


def draw_case(seed: int, dtype: str = "float64", device: str = "cpu") -> Case:
    """Returns a case drawn from a seed: odd lengths, each dimension another prime, every kind of mask."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(0, len(options), (), generator=generator))]

    G = pick(1, 1, 2, 3)
    padding = pick("none", "left", "right", "inside")
    T = pick(1, 2, 5, 7, 11, 13, 131)
    B = pick(1, 2, 3)
    return Case(
        B=B,
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
        adjust=pick("none", "none", "bias", "slopes", "softcap"),
        dtype=dtype,
        seed=seed,
        device=device,
    )


def draw_long_case(seed: int, dtype: str = "float64", device: str = "cpu") -> Case:
    """Returns a case of more than a thousand tokens, in one row and with few heads: some faults begin late."""
    return draw_case(seed, dtype, device).but(B=1, T=1031, H=2, G=1, window=None, documents=False, adjust="none")


class Unasked(NamedTuple):
    """Why a law says nothing: it has nothing to say of this subject, or the subject could not be called."""

    status: Literal["does not apply", "could not be asked"]
    reason: str


def ask(law: Law, subject: Subject, case: Case) -> Finding | Unasked:
    """Returns what a law finds of a subject in one case, or why it says nothing."""
    try:
        return law(subject, subject.fit(case))
    except DoesNotApply as reason:
        return Unasked("does not apply", str(reason))
    except CouldNotBeAsked as reason:
        return Unasked("could not be asked", str(reason))
    except Exception as error:  # whatever a subject raises is to be told, and says nothing about the law
        return Unasked("could not be asked", str(explain_exception(error, subject.label)))
