"""The law that outputs are averages of values, asked from outside: equal values come back as they are.

What gives back the value of a single token divides by the sum of its weights, so it must give back the value that many
tokens share. Inside a module that makes its own values, these are exchanged for others on their way to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.laws.case import Case, CouldNotBeAsked, DoesNotApply, Finding, difference
from regard.laws.inside import linear_parts
from regard.laws.signatures import find_heads
from regard.laws.subjects import Subject

OWN = 1e-3  # how far an output of a single token may move with its query and key: there may be an epsilon
FAR = 1e-2  # how far an output may be from the value that all tokens share
PLAINLY_FAR = 0.05  # up to which sums of weights may be off by an approximation, as landmarks are
_PLAIN_PARTS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


class Values(NamedTuple):
    """A way to hand values to attention: `run(case, x, v)` returns its output [B,T,C] of values v [B,T,W].

    `x` are the other inputs, `widths` the widths that a head may have in C, and `is_plain` says that nothing is known
    beside attention that might work on values, as a convolution would.
    """

    run: Callable[[Case, list[Tensor], Tensor], Tensor]
    width: int
    widths: list[int]
    is_plain: bool


def outputs_are_averages(subject: Subject, case: Case) -> Finding:
    """outputs are averages: where a single token gives its value, many tokens of one value give that value"""
    if subject.own:
        raise DoesNotApply("the weights of a mechanism say it: 'rows'")
    case = subject.fit(case.but(padding="none", documents=False, window=None, adjust="none"))
    if case.T < 2 or not subject.takes_length(1):
        raise DoesNotApply("it has to be asked of one token and of more")
    if case.tolerance is None:
        raise DoesNotApply("half precision is too coarse to tell")
    if getattr(subject, "single_query", False) or subject.pools or len(subject.inputs(case)) == 2:
        raise DoesNotApply("its values cannot be told from its keys")
    with torch.no_grad():
        for values in _ways_to_values(subject, case):
            value = case.draw(case.B, 1, values.width, stream=51).abs() + 0.5
            alone = _run_alone(subject, case, values, value)
            if alone is not None:
                return _compare(subject, case, values, value, alone)
    raise DoesNotApply("of a single token it does not give the value: its weights are not divided by their sum")


def _ways_to_values(subject: Subject, case: Case) -> Iterator[Values]:
    """Yields how values can be handed over; inside a module that is tried, as nobody says which outputs are values."""
    if not subject.projects:

        def run(case: Case, x: list[Tensor], v: Tensor) -> Tensor:
            out = subject.run(case, [*x[:-1], v.unflatten(-1, (x[-1].shape[1], -1)).transpose(1, 2)])
            if out.dim() != 4:
                raise DoesNotApply("its output is not [B,H,T,V]: another law says so")
            return out.transpose(1, 2).flatten(2)

        yield Values(run, case.G * case.V, [case.V], True)
        return
    module = getattr(subject, "f", None)
    if not isinstance(module, nn.Module) or getattr(subject, "sequence_first", False):
        return
    heads = find_heads(module)
    is_plain = all(
        isinstance(part, _PLAIN_PARTS) or not list(part.parameters(recurse=False)) for part in module.modules()
    )
    for layer, last, columns in linear_parts(subject, case, heads):

        def run_inside(case: Case, x: list[Tensor], v: Tensor, found: Any = (layer, last, columns)) -> Tensor:
            return _run_with_values(subject, case, x, v, *found)

        widths = [n for n in range(2, len(columns) + 1) if len(columns) % n == 0]
        if heads is not None and len(columns) % heads == 0:
            widths = [len(columns) // heads]
        yield Values(run_inside, len(columns), widths, is_plain)


def _run_with_values(
    subject: Subject, case: Case, x: list[Tensor], v: Tensor, layer: nn.Module, last: nn.Module | None, columns: Tensor
) -> Tensor:
    """Returns what attention inside a module hands on, [B,T,C], when some outputs of a layer are these values."""
    handed: list[Tensor] = []

    def exchange(_: nn.Module, given: Any, made: Tensor) -> Tensor:
        made = made.clone()
        made[..., columns] = v.to(made.dtype).reshape(*made.shape[:-1], -1)  # packed sequences are [ΣT,W]
        return made

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        handed.append(given[0])

    hooks = [layer.register_forward_hook(exchange)]
    if last is not None:
        hooks.append(last.register_forward_pre_hook(keep))
    try:
        out = subject.run(case, x)
    finally:
        for hook in hooks:
            hook.remove()
    found = (handed or [out])[-1]
    if found.dim() == 2 and len(found) == case.B * case.T:
        found = found.unflatten(0, (case.B, case.T))
    return found


def _run_alone(subject: Subject, case: Case, values: Values, value: Tensor) -> Tensor | None:
    """Returns the output of a single token [B,1,C], or None where it depends on more than the token's value."""
    one = case.but(T=1)
    outs = [
        values.run(one.but(seed=case.seed + n), subject.inputs(one.but(seed=case.seed + n)), value) for n in range(3)
    ]
    if any(out.shape[:2] != (case.B, 1) or not bool(out.isfinite().all()) for out in outs):
        return None
    if not bool(outs[0].any()) or max(difference(out, outs[0]) for out in outs[1:]) > OWN:
        return None
    twice = values.run(one, subject.inputs(one), 2 * value)
    if difference(twice, 2 * outs[0]) > OWN:
        return None  # values are normed, or something is added to them
    return outs[0]


def _compare(subject: Subject, case: Case, values: Values, value: Tensor, alone: Tensor) -> Finding:
    """Returns how far outputs are from the value that all tokens share, and what can be said of it."""
    what = f"outputs of {case.T} tokens of the same value"
    x = subject.inputs(case)
    out = values.run(case, x, value.expand(-1, case.T, -1))
    if out.shape[:2] != (case.B, case.T) or out.shape[2] != alone.shape[2]:
        raise CouldNotBeAsked(f"{subject.label} hands on {list(out.shape)} of {case.T} tokens")
    largest = alone.abs().max()
    gap = ((out - alone) / largest).abs().amax((0, 2))
    nothing = (out / largest).abs().amax((0, 2)) < OWN  # a token that sees nothing
    gap = gap.masked_fill(nothing, 0.0).nan_to_num(0.0)  # what is not finite is another law's
    error = float(gap.max())
    if error <= FAR:
        return Finding(error, FAR, what)
    first = int((gap > FAR).nonzero()[0])
    told = f"{what}, right before token {first} of {case.T}" if first else what
    if not _keeps_own_value(subject, case, values, value, alone):
        words = "a token's own value comes back turned: are positions applied to values, or heads split by a view?"
        return Finding(error, FAR, f"{told}: {words}", noted=not values.is_plain)
    sums = out[:, first] / alone[:, 0]
    words = f"rows of weights sum to {float(sums.min()):.3g} … {float(sums.max()):.3g} there instead of 1"
    noted = not values.is_plain or error < PLAINLY_FAR or _has_negative_weights(case, values, x)
    return Finding(error, FAR, f"{told}: {words}", noted)


def _keeps_own_value(subject: Subject, case: Case, values: Values, value: Tensor, alone: Tensor) -> bool:
    """Returns whether a token's value, where no other token has any, comes back as it is but for a factor a head."""
    x = subject.inputs(case)
    for token in (case.T - 1, case.T // 2):
        given = torch.zeros(case.B, case.T, values.width, dtype=value.dtype, device=value.device)
        given[:, token] = value[:, 0]
        own = values.run(case, x, given)[:, token]
        factors = own / alone[:, 0]
        if not bool((factors.abs() > OWN).any()):
            continue  # it does not see itself
        if not any(_is_even(factors, width) for width in values.widths):
            return False
    return True


def _is_even(factors: Tensor, width: int) -> bool:
    """Returns whether factors [B,C] are alike within each head of a width, be heads side by side or interleaved."""
    forms = (factors.unflatten(-1, (-1, width)), factors.unflatten(-1, (width, -1)).mT)
    return any(difference(form, form.mean(-1, keepdim=True).expand_as(form)) <= FAR for form in forms)


def _has_negative_weights(case: Case, values: Values, x: list[Tensor]) -> bool:
    """Returns whether values that are nowhere negative give an output that is."""
    outs = []
    for stream in range(52, 58):
        some = (case.draw(case.B, case.T, values.width, stream=stream) > 0).to(case.type)
        outs.append(values.run(case, x, some))
    return any(bool((out < -OWN).any()) for out in outs)
