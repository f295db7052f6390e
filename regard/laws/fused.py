"""The law of kernels: what is fast gives what the plain reference gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.laws.case import TOLERANCE, Case, DoesNotApply, Finding, cancellation_scale, difference, worst
from regard.laws.faces import gradients_or_zeros, mechanism_of, split_visible, state_rules
from regard.laws.subjects import Subject


def kernel_is_reference(subject: Subject, case: Case) -> Finding:
    """kernel = reference, forward and gradients, with NaN-poisoned output buffers"""
    registry = mechanism_of(subject, case).kernels
    kernels = [(face, kernel) for faces in registry.values() for face, kernel in faces.items()]
    if not kernels:
        raise DoesNotApply("no kernel is registered for it")
    findings: list[Finding] = []
    refusals: list[str] = []
    for face, kernel in kernels:
        starts = [0]
        if face == "extend":  # a state that no token, half of them, or all but one have been through
            starts = sorted({0, case.T // 2, case.T - 1})
        for start in starts:
            refusal = kernel.refuses(*_kernel_arguments(subject, case, face, start))
            if refusal is not None:
                refusals.append(f"{kernel.name}: {refusal}")
                continue
            with _poisoned_memory():
                fast = _kernel_results(subject, case, face, start, kernel.name)
            plain = _kernel_results(subject, case, face, start, "plain")
            truth = plain
            if case.type not in TOLERANCE:
                truth = _kernel_results(subject, case.but(dtype="float64", rounded=case.dtype), face, start, "plain")
            scale = _kernel_scale(subject, case, face, start)
            findings += _kernel_findings(f"{kernel.name} {face}", case, fast, plain, truth, scale)
    if not findings:
        raise DoesNotApply("; ".join(dict.fromkeys(refusals)))
    return worst(findings)


def _kernel_arguments(subject: Subject, case: Case, face: str, start: int) -> tuple[Any, ...]:
    """Returns the mechanism and the arguments of its face.

    For "extend", that is a state that `start` tokens have been through, and the tokens after them.
    """
    mechanism = mechanism_of(subject, case)
    q, k, v = case.qkv()
    mask = case.mask(case.T, case.T)
    if face == "forward":
        if "k" not in mechanism.needs:
            mask = mask.but(size_override=(case.T, case.T))
        return mechanism, q, k, v, mask
    mechanism.use = "plain"
    state = mechanism.empty(case.size(S=case.T + 1), state_rules(mask))
    sizes = [start, case.T - start]
    before, after = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
    seen_before, seen_after = split_visible(mask.visible, sizes)
    q, k, v = before
    _, state = mechanism.extend(q, k, v, state, seen_before)
    return mechanism, *after, state, seen_after


def _kernel_results(subject: Subject, case: Case, face: str, start: int, use: str) -> list[Tensor]:
    """Returns the output and the gradients of inputs and parameters; for "extend" the output and `state.tokens`."""
    mechanism, *arguments = _kernel_arguments(subject, case, face, start)
    mechanism.use = use
    if face == "extend":
        with torch.no_grad():
            out, state = mechanism.extend(*arguments)
        return [out, state.tokens.to(out.dtype)]
    leaves = [x.requires_grad_() for x in arguments[:3]] + [x for x in mechanism.parameters() if x.requires_grad]
    out = mechanism(*arguments)
    direction = out.detach().cos()
    if mechanism.signed:  # where weights cancel, a direction that depends on out adds out's rounding to the gradient
        direction = case.draw(*out.shape, stream=4)
    return [out, *gradients_or_zeros((out * direction).sum(), leaves)]


def _kernel_scale(subject: Subject, case: Case, face: str, start: int) -> Tensor | None:
    """Returns what rounding of the output is relative to where weights may be negative, [B,H,T,1]; else None."""
    exact = case.but(dtype="float64", rounded=case.rounded or case.dtype)
    mechanism = mechanism_of(subject, exact)
    if not mechanism.signed:
        return None
    q, k, v = exact.qkv()
    mask = exact.mask(case.T, case.T)
    if face == "extend":
        mask = mask.but(causal=True, documents=None)
    scale = cancellation_scale(mechanism, q, k, mask, v)
    assert scale is not None
    return scale[:, :, start:]


def _kernel_findings(
    what: str,
    case: Case,
    fast: list[Tensor],
    plain: list[Tensor],
    truth: list[Tensor],
    output_scale: Tensor | None,
) -> list[Finding]:
    """Returns how far a kernel is from the truth: outputs relative to the largest output or to their own scale,
    gradients relative to the largest gradient."""
    findings = []
    if output_scale is None:
        output_scale = truth[0].abs().max()
    gradient_scale = max((t.abs().max() for t in truth[1:]), default=truth[0].abs().max())
    for n, (f, p, t) in enumerate(zip(fast, plain, truth, strict=True)):
        name = "output"
        times = 2
        scale = output_scale
        if n > 0:
            name = f"gradient {n}"
            times = 3
            scale = gradient_scale
        scale = scale.clamp(min=1e-30)
        limit = case.tolerance
        if limit is None:
            limit = times * max(difference(p, t, scale), torch.finfo(case.type).eps / 2)
        findings.append(Finding(difference(f, t, scale), limit, f"{what}: {name}"))
    return findings


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fills memory from torch.empty with NaN, so that a kernel cannot forget to write a part of its output."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
