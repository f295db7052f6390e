"""What somebody's attention does without being told: in which precision it computes, and whether it looks ahead."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from regard.laws.calling import Caller
from regard.laws.case import Case
from regard.laws.layouts import CROSS


def measure_roughness(call: Caller, case: Case, step: float) -> float:
    """Returns how large the steps are that rounding leaves along a line of inputs in float64, relative to outputs.

    f(x + 2h) − 2f(x + h) + f(x) is of the order h² for what is computed in float64; rounding to float32 on the way
    leaves steps of 1e-8 in it, to half precision steps of 1e-4 or more, which a larger h is needed to meet.
    """
    inputs = call.draw_inputs(case)
    bends = []
    for n in range(1, 9):
        h = step * n
        with torch.no_grad():
            points = [call.call(case, [x * (1 + i * h) for x in inputs]) for i in range(3)]
        size = points[0].abs().max().clamp(min=1e-30)
        bend = points[2] - 2 * points[1] + points[0]
        bends.append(max(float(bend.abs().max() / size), torch.finfo(points[0].dtype).eps))
    # A choice that changes on the way, as an argmax's does, is one step; rounding leaves many.
    return sorted(bends)[-3]


def claims_causality(call: Caller, case: Case) -> bool:
    """Returns whether attention that cannot be told to be causal claims it: by its name, or by what it sees.

    What sees as far ahead as back is meant to; what sees some later tokens, or sees them faintly, is not.
    """
    if call.layout is CROSS:
        return False
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", call.label).lower()
    if re.search(r"(?<!non)(?<!non_)(?<!not_)(?<!un)(causal|masked)", name):
        return True
    influence = _influence(call, case)
    others = influence[~torch.eye(len(influence), dtype=torch.bool)]
    moving = others[others > 0]
    least = torch.zeros(())
    if moving.numel():
        least = 0.01 * moving.median()
    sees = influence > least
    looks_both_ways = bool(sees.triu(1).any()) and bool((sees == sees.mT).all())
    return not looks_both_ways


def _influence(call: Caller, case: Case) -> Tensor:
    """Returns how much the output at each token moves when the value of each other token changes, [T,T].

    Values are what attention mixes: a key that is seen through a sum over all of them, and no value, is a leak.
    Queries and keys are small, so that weights are nearly even and none vanishes by chance.
    """
    inputs = [0.1 * x for x in call.draw_inputs(case)]
    axis = call.layout.token_axis
    with torch.no_grad():
        before = call.call(case, inputs)
        rows = []
        for j in range(case.T):
            changed = [x.clone() for x in inputs]
            row = changed[-1].select(axis, j)
            row.copy_(0.1 * case.draw(*row.shape, stream=50))
            moved = (call.call(case, changed) - before).abs().movedim(axis, 0).flatten(1)
            rows.append(moved.amax(1))
    return torch.stack(rows, 1)
