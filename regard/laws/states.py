"""Attention of somebody else's that keeps a state: what it takes and returns beside its tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.laws.case import Case, CouldNotBeAsked, DoesNotApply, Finding, difference, worst
from regard.laws.signatures import STATE_FLAGS, STATES
from regard.laws.subjects import Subject

if TYPE_CHECKING:
    from regard.laws.calling import Caller


class StateCall(NamedTuple):
    """How a state is handed over: `name` takes it, and `flag` asks for it to be returned second."""

    name: str
    flag: str | None

    def extend(self, call: Caller, case: Case, tokens: list[Tensor], state: Any) -> tuple[Tensor, Any]:
        """Returns the output of some more tokens, and the state after them."""
        options: dict[str, Any] = {self.name: state}
        if self.flag is not None:
            options[self.flag] = True
        if call.causal_name is not None:
            options[call.causal_name] = True
        out = call.call_with(case, call.layout.pack(tokens), options)
        if not isinstance(out, tuple | list) or len(out) < 2 or out[1] is None:
            raise CouldNotBeAsked(f"{call.label} took {self.name}= and returned no state second")
        return call.layout.unpack(out[0], tokens), out[-1]


def find_state_call(call: Caller, case: Case) -> StateCall | None:
    """Returns how a state is handed over, or None where two calls in a row with it do not run."""
    name = next((n for n in call.parameters if n in STATES), None)
    if name is None:
        return None
    found = StateCall(name, next((n for n in call.parameters if n in STATE_FLAGS), None))
    tokens = call.draw_inputs(case.but(T=2))
    try:
        _, state = found.extend(call, case, tokens, None)
        out, _ = found.extend(call, case, tokens, state)
    except CouldNotBeAsked:
        return None
    if out.shape[: call.layout.token_axis + 1] != tokens[0].shape[: call.layout.token_axis + 1]:
        return None
    return found


def continued_is_whole(subject: Subject, case: Case) -> Finding:
    """Returns whether tokens that are given in parts, with the state from part to part, get what the whole gives."""
    if not subject.causal:
        raise DoesNotApply("it attends in both directions, and a state knows only what came before")
    case = case.but(causal=True, padding="none", documents=False, T=min(case.T, 131), adjust="none")
    if case.T < 2:
        raise DoesNotApply("one token has no parts")
    inputs = subject.inputs(case)
    axis = subject.token_axis
    whole = subject.run(case, inputs)
    half = case.T // 2
    few = min(case.T, 5)
    findings = []
    for sizes in ([half, case.T - half], [1] * few + [case.T - few] * (few < case.T), [case.T - 1, 1]):
        state: Any = None
        parts = []
        for tokens in zip(*(x.split(sizes, axis) for x in inputs), strict=True):
            out, state = subject.state_call.extend(subject, case, list(tokens), state)
            parts.append(out)
        got = torch.cat(parts, axis)
        what = f"chunks of {sizes} with a state against the whole"
        if got.shape != whole.shape:
            findings.append(Finding(math.inf, 0.0, f"{what}: output {list(got.shape)}"))
        else:
            findings.append(Finding(difference(got, whole), case.tolerance_or(4.0), what))
    return worst(findings)
