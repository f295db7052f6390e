"""Whether attention asks at all: queries, keys and values that are handed over must matter."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.laws.case import Case, Finding, difference
from regard.laws.subjects import Subject

_FACTORS = (1.0, -1.0, 30.0, -30.0)  # of other queries: an argmax may choose the same key by some of them


class _Softmaxes(TorchDispatchMode):
    """Keeps what each softmax gives, and along how many numbers it was taken."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if re.match(r"aten\._?softmax\.", str(func)) and isinstance(made, Tensor):
            self.made.append(made.clone())
            self.counts.append(made.shape[args[1]])
        return made


def inputs_matter(subject: Subject, case: Case, inputs: list[Tensor]) -> Finding:
    """Returns whether queries, and keys and values that are handed over apart, move the outputs."""
    found = queries_matter(subject, case, inputs)
    if found.broken or len(inputs) < 3:
        return found
    others = [case.draw(*x.shape, stream=92 + n) for n, x in enumerate(inputs)]
    with torch.no_grad():
        before, softmaxes = _run(subject, case, inputs)
        if not bool(before.isfinite().all()):
            return found
        if difference(subject.run(case, [*inputs[:2], others[2]]), before) == 0:
            return Finding(math.inf, 0.0, "outputs, which no change of the values moves: is something else read there?")
        if difference(subject.run(case, [inputs[0], others[1], inputs[2]]), before) > 0:
            return found
        after = _run(subject, case, [*inputs[:2], others[2]])[1]
    # A synthesizer has no use for keys either; what makes its keys of the values does.
    what = "outputs, which no change of the keys moves: are the values taken for the keys?"
    return Finding(math.inf, 0.0, what, noted=not _differ(softmaxes, after, case))


def _differ(some: _Softmaxes, others: _Softmaxes, case: Case) -> bool:
    """Returns whether two calls gave different softmax weights."""
    if len(some.made) != len(others.made):
        return False
    return any(difference(x, y) > case.tolerance_or(1.0) for x, y in zip(some.made, others.made, strict=True))


def queries_matter(subject: Subject, case: Case, inputs: list[Tensor]) -> Finding:
    """Returns whether other queries give other outputs, where queries are handed over beside their keys.

    A mean of the values has no use for queries either, so that this is a fault only of what has a softmax that says
    otherwise: it is taken along a single number, or its weights follow the keys.
    """
    what = "outputs, which no change of the queries moves"
    if len(inputs) < 2 or inputs[0].shape[subject.token_axis] < 3:
        return Finding(0.0, 0.0, what)
    with torch.no_grad():
        before = _run(subject, case, inputs)
        moved = 0.0
        for n, factor in enumerate(_FACTORS):
            queries = factor * case.draw(*inputs[0].shape, stream=85 + n // 2)
            moved = max(moved, difference(subject.run(case, [queries, *inputs[1:]]), before[0]))
        if moved > case.tolerance_or(1.0) or not bool(before[0].isfinite().all()):
            return Finding(0.0, 0.0, what)
        softmaxes = before[1]
        if softmaxes.counts and max(softmaxes.counts) == 1:
            return Finding(
                math.inf, 0.0, f"{what}: a softmax is taken along an axis of one number; which is the keys'?"
            )
        keys = [case.draw(*x.shape, stream=88 + n) for n, x in enumerate(inputs[1:])]
        after = _run(subject, case, [inputs[0], *keys])[1]
    follows_keys = _differ(softmaxes, after, case)
    return Finding(math.inf, 0.0, f"{what}: is something else taken for the queries?", noted=not follows_keys)


def _run(subject: Subject, case: Case, inputs: list[Tensor]) -> tuple[Tensor, _Softmaxes]:
    watch = _Softmaxes()
    with watch:
        out = subject.run(case, inputs)
    return out, watch
