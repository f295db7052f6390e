"""Attention of somebody else's that keeps a state: how it takes the state, and what it returns beside its tokens.

A state is taken and returned (`forward(x, cache) -> y, cache`, `step(x, prev_K, prev_V) -> y, K, V`), written into in
place (a dict, a list), or kept inside the module. The ways are tried in turn until one gives the same outputs as a
single call over all tokens. If none does, the first way counts in which two calls in a row run, the second with the
state that the first left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import PluginError
from regard.laws.case import Case, CouldNotBeAsked, DoesNotApply, Finding, difference, worst
from regard.laws.signatures import (
    ANY_MASKS,
    FILLED,
    KEY_MASKS,
    STATE_FLAGS,
    STATES,
    STEPS,
    find_heads,
    parameter_names,
    required_names,
    state_pair,
    takes_none,
)
from regard.laws.subjects import Subject

if TYPE_CHECKING:
    from regard.laws.calling import Caller

LONGEST = 17  # tokens that are given one by one

Start = Callable[["Caller", Case], Any]


class StateCall(NamedTuple):
    """How a state is handed over.

    `step` is the function or the method that is called with it, None for the attention itself. `names` are the
    parameters that take it, none where the module keeps it inside. `start` makes what goes before the first token.
    `flag` asks for a state to be returned or kept. `one_by_one`: a call takes a single token; `squeezed`: without the
    axis of tokens.
    """

    step: str | Callable[..., Any] | None
    names: tuple[str, ...]
    start: Start
    flag: str | None = None
    one_by_one: bool = False
    squeezed: bool = False

    def extend(self, call: Caller, case: Case, tokens: list[Tensor], state: Any) -> tuple[Tensor, Any]:
        """Returns the output of some more tokens, and the state after them; a state of None is the first."""
        if state is None:
            state = self.start(call, case)
        options: dict[str, Any] = {}
        if self.flag is not None:
            options[self.flag] = True
        if self.step is None and call.causal_name is not None:
            options[call.causal_name] = True
        if len(self.names) == 1:
            options[self.names[0]] = state
        elif self.names:
            options |= dict(zip(self.names, state, strict=True))
        given = call.layout.pack(tokens)
        axis = call.layout.given_axis
        if self.squeezed:
            given = [x.squeeze(axis) for x in given]
        before = _kept_tensors(state)
        out = call.call_with(case, given, options, self._function(call, state))
        out, state = self._separate(call, out, state, before)
        if self.squeezed:
            out = out.unsqueeze(axis)
        return call.unpack(out, tokens), state

    def _function(self, call: Caller, state: Any) -> Callable[..., Any]:
        """Returns the function to call: the attention, or its step; a state kept inside a module is a copy of it."""
        owner = call.f
        if not self.names:
            owner = state
        if self.step is None:
            return owner
        if isinstance(self.step, str):
            method: Callable[..., Any] = getattr(owner, self.step)
            return method
        return self.step

    def _separate(self, call: Caller, out: Any, state: Any, before: list[Tensor]) -> tuple[Tensor, Any]:
        """Splits what a call returned into output and new state; `before` holds the tensors of its old state."""
        parts = [out]
        if isinstance(out, tuple | list):
            parts = list(out)
        if not isinstance(parts[0], Tensor):
            raise CouldNotBeAsked(f"{call.label} with a state returned a {type(parts[0]).__name__} first, not a tensor")
        if not self.names:
            return parts[0], state
        after: Any = parts[-1]
        unused = False
        if len(self.names) > 1 and len(parts) > len(self.names):
            after = tuple(parts[-len(self.names) :])
        if len(parts) < 2 or after is None:
            after = state  # written into in place, unless the parameter is there and nobody uses it
            unused = bool(before) and _are_same(before, _kept_tensors(state))
        if after is None or _is_empty(after) or unused:
            raise CouldNotBeAsked(f"{call.label} took {', '.join(self.names)} and returned no state")
        return parts[0], after


def _is_empty(state: Any) -> bool:
    return isinstance(state, dict | list | tuple) and not state


def find_state_call(call: Caller, case: Case) -> StateCall | None:
    """Returns how a state is handed over, or None if no usual way runs; raises if the user named a step and none runs.

    Some code runs when it is called in another way than is meant, so a way counts that gives what the whole gives; only
    if none does, the first that runs.
    """
    failure: CouldNotBeAsked | None = None
    first: StateCall | None = None
    for found in _ways(call):
        try:
            if _runs(found, call, case):
                first = first or found
                if _agrees(found, call, case.but(T=3, causal=True)):
                    return found
        except CouldNotBeAsked as error:
            failure = failure or error
    if first is not None or call.step is None:
        return first
    why = ""
    if failure is not None:
        why = f": {failure}"
    raise CouldNotBeAsked(
        f"{call.label}: no usual way of calling its step with a state runs{why}. A step is called as "
        "step(x, state) -> y, state, with the state None, {} or [] before the first token, or with two tensors for it"
    )


def _runs(found: StateCall, call: Caller, case: Case) -> bool:
    """Tells whether two calls in a row run, give outputs of the right shape, and leave something behind."""
    tokens = call.draw_inputs(case.but(T=1 + (not found.one_by_one)))
    before = _kept_tensors(found.start(call, case))
    _, state = found.extend(call, case, tokens, None)
    if not found.names and _are_same(before, _kept_tensors(state)):
        return False  # nothing was kept
    out, _ = found.extend(call, case, tokens, state)
    axis = call.layout.token_axis
    return out.dim() == tokens[0].dim() and out.shape[: axis + 1] == tokens[0].shape[: axis + 1]


def _agrees(found: StateCall, call: Caller, case: Case) -> bool:
    """Tells whether three tokens one by one get what they get at once."""
    inputs = call.draw_inputs(case)
    got = _in_parts(found, call, case, inputs, [1] * case.T)
    return difference(got, call.call(case, inputs)) <= case.tolerance_or(4.0)


def _in_parts(found: StateCall, call: Caller, case: Case, inputs: list[Tensor], sizes: list[int]) -> Tensor:
    """Returns the outputs of tokens that are given in parts, with the state from part to part."""
    axis = call.layout.token_axis
    state: Any = None
    parts = []
    for tokens in zip(*(x.split(sizes, axis) for x in inputs), strict=True):
        out, state = found.extend(call, case, list(tokens), state)
        parts.append(out)
    return torch.cat(parts, axis)


def _kept_tensors(state: Any) -> list[Tensor]:
    """Returns copies of the tensors in a state; if the state is a module, of its tensors that are no parameters."""
    if isinstance(state, Tensor):
        return [state.clone()]
    if isinstance(state, tuple | list):
        return [x for part in state for x in _kept_tensors(part)]
    if not isinstance(state, nn.Module):
        return []
    kept = []
    for module in state.modules():
        held = [*module._buffers.values(), *vars(module).values()]
        kept += [x.clone() for x in held if isinstance(x, Tensor)]
    return kept


def _are_same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def _ways(call: Caller) -> Iterator[StateCall]:
    """Yields the ways in which a state may be passed: first those of parameters that are told or named as a state."""
    if call.step is None:
        yield from _ways_of_forward(call)
    steps: list[str | Callable[..., Any]] = [name for name in STEPS if callable(getattr(call.f, name, None))]
    if call.step is not None:
        steps = [call.step]
    for step in steps:
        function = step
        if isinstance(step, str):
            function = getattr(call.f, step, None)  # type: ignore[assignment]
            if function is None:
                raise PluginError(f"{call.label} has no method '{step}'; expected step= its name or a function")
        names = [n for n in parameter_names(function) if n not in FILLED and n not in STATE_FLAGS]  # type: ignore[arg-type]
        for states in _possible_states(function, names[call.layout.inputs :]):
            for squeezed in (False, True):
                for start in _starts(call, states):
                    yield StateCall(step, tuple(states), start, None, True, squeezed)


def _ways_of_forward(call: Caller) -> Iterator[StateCall]:
    flag = next((n for n in call.parameters if n in STATE_FLAGS), None)
    named: list[tuple[str, ...]] = []
    named += [(n,) for n in call.parameters if n in STATES][:1]
    if state_pair(call.f):
        named.append(state_pair(call.f))
    for names in named:
        for start in _starts(call, list(names)):
            yield StateCall(None, names, start, flag)
    if not named and flag is not None and isinstance(call.f, nn.Module):
        yield StateCall(None, (), _fresh_copy, flag)


def _required_or_states(function: Any, names: list[str]) -> list[str]:
    """Returns those of the parameters `names` that take a state: they have no default, or a usual name of a state."""
    known = {*required_names(function), *STATES, *state_pair(function)}
    return [n for n in names if n in known]


def _possible_states(function: Any, names: list[str]) -> Iterator[list[str]]:
    """Yields which of a step's parameters take a state: by their names, else the first that may be left out."""
    found = _required_or_states(function, names)
    yield found
    others = [n for n in names if n not in ANY_MASKS and n not in KEY_MASKS]
    if not found and others and takes_none(function, others[0]):
        yield others[:1]


def _starts(call: Caller, names: list[str]) -> Iterator[Start]:
    """Yields what may go before the first token: None, an empty container, tensors of no tokens, sums of zero."""
    if not names:
        if isinstance(call.f, nn.Module):
            yield _fresh_copy
        return
    if len(names) == 1:
        yield lambda call, case: None
        yield lambda call, case: {}
        yield lambda call, case: []
        yield lambda call, case: _zero_sums(case)[0]
    elif len(names) == 2:
        yield lambda call, case: (None, None)
        yield lambda call, case: _zero_sums(case)
        yield _no_tokens
        yield _no_tokens_of_heads
        yield _nothing


def _fresh_copy(call: Caller, case: Case) -> nn.Module:
    """Returns a copy of the module that has made no calls before."""
    module: nn.Module = deepcopy(call.pristine)  # type: ignore[assignment]
    return module.to(case.device, case.type)


def _zero_sums(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the sums of linear attention before the first token: Σ φ(k)vᵀ [B,H,K,V] and Σ φ(k) [B,H,K]."""
    sums = torch.zeros(case.B, case.H, case.K, case.V, dtype=case.type, device=case.device)
    return sums, sums.sum(-1)


def _no_tokens(call: Caller, case: Case) -> tuple[Tensor, Tensor]:
    """Returns keys and values of no tokens, in the layout of the inputs."""
    if call.layout.projects:
        x = torch.zeros(case.B, 0, case.K, dtype=case.type, device=case.device)
        return x, x
    _, k, v = call.layout.pack(list(case.but(T=1).qkv()))
    axis = call.layout.given_axis
    return k.narrow(axis, 0, 0), v.narrow(axis, 0, 0)


def _no_tokens_of_heads(call: Caller, case: Case) -> tuple[Tensor, Tensor]:
    """Returns keys and values of no tokens with the heads of a module, [B,H,0,d]."""
    heads = find_heads(call.f) or 1
    x = torch.zeros(case.B, heads, 0, max(case.K // heads, 1), dtype=case.type, device=case.device)
    return x, x


def _nothing(call: Caller, case: Case) -> tuple[Tensor, Tensor]:
    """Returns two tensors of shape [0], to which `torch.cat` appends keys and values of any shape."""
    x = torch.zeros(0, dtype=case.type, device=case.device)
    return x, x


def continued_is_whole(subject: Subject, case: Case) -> Finding:
    """Compares the outputs of tokens given in parts, with the state of the parts before, with those of one call."""
    if not subject.causal:
        raise DoesNotApply("it attends in both directions, and a state knows only what came before")
    case = case.but(causal=True, padding="none", documents=False, T=min(case.T, 131), adjust="none")
    if case.T < 2:
        raise DoesNotApply("one token has no parts")
    found: StateCall = subject.state_call
    few = min(case.T, 5)
    part = max(1, case.T // 4)
    # Several tokens after a state and before another one: what a state forgets there shows in neither end.
    middle = [part, case.T - 2 * part, part]
    if case.T < 3:
        middle = [1, case.T - 1]
    splits = [middle, [1] * few + [case.T - few] * (few < case.T), [case.T - 1, 1]]
    if found.one_by_one:
        case = case.but(T=min(case.T, LONGEST))
        splits = [[1] * case.T]
    inputs = subject.inputs(case)
    whole = subject.run(case, inputs)
    findings = []
    for sizes in splits:
        got = _in_parts(found, subject, case, inputs, sizes)  # type: ignore[arg-type]
        what = f"chunks of {sizes} with a state against the whole"
        if found.one_by_one:
            what = f"{case.T} tokens one by one with a state against the whole"
        if got.shape != whole.shape:
            findings.append(Finding(math.inf, 0.0, f"{what}: output {list(got.shape)}"))
        else:
            findings.append(Finding(difference(got, whole), case.tolerance_or(4.0), what))
    return worst(findings)
