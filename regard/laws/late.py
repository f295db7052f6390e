"""Gradients of long sequences, by a derivative along one direction: a state may be cut from the graph late."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.laws.case import Case, Finding, difference
from regard.laws.subjects import Subject

LONGEST = 211  # tokens: beyond a border of chunks of 128
SHORTEST = 14  # tokens, below which gradients are compared number by number
LIMIT = 1e-3  # of the gradient's size
_STEP = 1e-5


def late_gradients_are_right(subject: Subject, case: Case) -> list[Finding]:
    """Returns whether gradients of the last outputs, and of all, agree with finite differences along a direction.

    None is returned where finite differences of two steps disagree, as beside a choice, or where nothing is long.
    """
    T = min(case.T, LONGEST)
    case = subject.fit(case.but(dtype="float64", T=T, B=1, G=1, H=min(case.H, 2), padding="none", window=None))
    if case.H % case.G or case.T < SHORTEST or subject.pools or subject.mechanism(case) is not None:
        return []
    inputs = [0.3 * x for x in subject.inputs(case)]
    findings = []
    for n, (part, first) in enumerate((("the last outputs", case.T - 2), ("all outputs", 0))):
        found = _compare(subject, case, inputs, first, n)
        if found is not None:
            error, name = found
            what = f"derivative of {part} of {case.T} along a change of {name}, by gradients and by finite differences"
            if error > LIMIT:
                what += ": is a state detached on the way?"
            findings.append(Finding(error, LIMIT, what))
    return findings


def _compare(subject: Subject, case: Case, inputs: list[Tensor], first: int, n: int) -> tuple[float, str] | None:
    """Returns by how much the derivative is wrong along the input that shows it most, and its name."""
    axis = subject.token_axis
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = subject.run(case, leaves)
    weigh = case.draw(*out.shape, stream=33 + n)
    weigh.narrow(axis, 0, min(first, out.shape[axis])).zero_()
    if not out.requires_grad:
        return None
    grads = torch.autograd.grad((out * weigh).sum(), leaves, allow_unused=True)
    names = ("the tokens",)
    if len(inputs) > 1:
        names = ("queries", "keys", "values")[: len(inputs)]  # type: ignore[assignment]
    worst = (0.0, names[0])
    for i, name in enumerate(names):
        direction = case.draw(*inputs[i].shape, stream=35 + n)
        slopes = []
        for step in (_STEP, _STEP / 2):
            ends = []
            for sign in (1.0, -1.0):
                moved = [x + sign * step * direction if j == i else x for j, x in enumerate(inputs)]
                with torch.no_grad():
                    ends.append(float((subject.run(case, moved) * weigh).sum()))
            slopes.append((ends[0] - ends[1]) / (2 * step))
        grad = grads[i]
        if grad is None:
            grad = torch.zeros_like(inputs[i])
        size = max(float(grad.norm()), abs(slopes[1]), 1e-6 * float(out.detach().norm()))
        if not math.isfinite(slopes[0]) or abs(slopes[0] - slopes[1]) > LIMIT / 10 * size:
            continue
        told = torch.tensor(float((grad * direction).sum()))
        worst = max(worst, (difference(told, torch.tensor(slopes[1]), size), name))
    return worst
