"""Laws of hidden keys: a hidden key has no effect, and a query that sees no key gives zeros."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.laws.case import Case, DoesNotApply, Finding, difference, worst
from regard.laws.faces import gradients_or_zeros
from regard.laws.subjects import Subject

# Scores of this size occur in trained models. A mask that adds −1e4 does not outweigh them, one of −1e9 does.
LARGE_SCORE = 3e4


def hidden_keys_are_inert(subject: Subject, case: Case) -> Finding:
    """hidden keys are inert: changing one, even to scores of ±30,000, leaves all that others see as it was"""
    if subject.mask_remarks and not subject.takes_visible:
        return Finding(math.inf, 0.0, "; ".join(subject.mask_remarks), noted=True)
    visible = _padding(subject, case)
    case = case.but(documents=False)
    # Every query sees the first key here: what becomes of one that sees nothing is another law's question.
    visible[:, 0] = True
    if bool(visible.all()):
        raise DoesNotApply("one token has nothing to hide from")
    inputs = subject.inputs(case)
    findings = []
    for what, start in (("ordinary inputs", inputs), ("visible scores of −30,000", very_low_scores(subject, inputs))):
        if not _is_finite(subject, case, start, visible):
            continue  # such inputs are beyond what it can compute at all
        before = _outputs_of_visible(subject, case, start, visible)
        for size, changed in _change_hidden(subject, case, start, visible):
            # Where a key so large overflows even as a visible one, hiding it cannot be blamed.
            if not _is_finite(subject, case, changed, None):
                continue
            after = _outputs_of_visible(subject, case, changed, visible)
            error = difference(after, before, before.abs().max())
            found = Finding(error, case.tolerance_or(1.0), f"{what}, hidden keys changed {size}")
            if found.exceeded and (size or start is not inputs) and _is_underflow(after, before):
                words = "visible keys lose all weight: is a mask laid over weights that are then divided by their sums?"
                found = found._replace(what=f"{found.what}: {words}", noted=True)
            findings.append(found)
    findings += _gradients_of_hidden(subject, case, inputs, visible)
    if not findings:
        raise DoesNotApply("no inputs with hidden keys give finite outputs")
    found = worst(findings)
    if found.broken and subject.mask_blame:
        found = found._replace(what=f"{found.what}: {subject.mask_blame}")
    return found


def blind_rows_are_zero(subject: Subject, case: Case) -> Finding:
    """a query that sees nothing gives zeros, and NaN in hidden keys reaches nothing, gradients included"""
    visible = _padding(subject, case)
    case = case.but(documents=False)
    inputs = subject.inputs(case)
    findings = []
    nobody = visible.clone()
    nobody[0] = False
    blind = subject.run(case, inputs, nobody)[0]
    findings.append(Finding(_distance_to_zero(blind), 0.0, "outputs of rows that see nothing"))
    if (
        case.causal and case.T > 1 and not subject.hides_ends_only
    ):  # queries before the first visible key see nothing, though later keys are visible
        late = case.range(case.T).expand(case.B, -1) >= case.T // 2
        early = subject.run(case, inputs, late).narrow(subject.token_axis, 0, case.T // 2)
        findings.append(Finding(_distance_to_zero(early), 0.0, "outputs of queries before the first visible key"))
    spoilt = [x.clone() for x in inputs]
    for x, poison in zip(_keys_of(spoilt), (float("nan"), float("inf")), strict=False):
        x[_tokens(x, ~visible, subject)] = poison
    want, want_grads = _output_and_gradients(subject, case, inputs, visible)
    got, got_grads = _output_and_gradients(subject, case, spoilt, visible)
    limit = case.tolerance_or(1.0)
    findings.append(Finding(difference(got, want), limit, "outputs with NaN or infinity in hidden keys and values"))
    if len(inputs) == 3:
        for name, g, w in zip("qkv", got_grads, want_grads, strict=True):
            findings.append(Finding(difference(g, w), limit, f"gradient of {name} with NaN or infinity in hidden keys"))
    found = worst(findings)
    # Most libraries leave such rows undefined; regard's own mechanisms promise zeros.
    return found._replace(noted=not subject.promises_zeros)


def _padding(subject: Subject, case: Case) -> Tensor:
    """Returns the padding mask [B,T], True at visible keys; a case without padding gets some inside the sequence."""
    if not subject.takes_visible:
        raise DoesNotApply("it takes no mask of visible keys")
    if case.padding == "none":
        case = subject.fit(case.but(padding="inside"))
    visible = case.visible(case.T)
    assert visible is not None
    return visible


def _keys_of(inputs: list[Tensor]) -> list[Tensor]:
    """Returns the inputs that are keys or values: k and v, or the tokens x, of which all are made."""
    if len(inputs) == 1:
        return inputs
    return inputs[1:]


def _tokens(x: Tensor, chosen: Tensor, subject: Subject) -> Tensor:
    """Returns the mask [B,·,T] of x's chosen tokens, from [B,T]."""
    if subject.token_axis == 2:
        chosen = chosen[:, None]
    return chosen.expand(x.shape[:-1])


def very_low_scores(subject: Subject, inputs: list[Tensor]) -> list[Tensor]:
    """Returns inputs whose scores are about −30,000: every key points away from every query.

    Of a module that makes its own queries and keys, the tokens are so large that scores of either sign reach that.
    """
    if subject.projects:
        return [300 * x for x in inputs]
    q, k, v = inputs
    direction = torch.zeros_like(q[..., :1, :])
    direction[..., 0] = 1
    length = (LARGE_SCORE * q.shape[-1] ** 0.5) ** 0.5
    return [q * 0.1 + length * direction, k * 0.1 - length * direction[:, : k.shape[1]], v]


def _change_hidden(
    subject: Subject, case: Case, inputs: list[Tensor], visible: Tensor
) -> list[tuple[str, list[Tensor]]]:
    """Returns the inputs with other hidden keys and values: of ordinary size, and with large scores of either sign."""
    changes = []
    for size, factor in (("", 1.0), ("to large scores", 1.0), ("to large negative scores", -1.0)):
        changed = [x.clone() for x in inputs]
        for n, x in enumerate(_keys_of(changed)):
            hidden = _tokens(x, ~visible, subject)
            fresh = case.draw(*x.shape, stream=60 + n)
            is_key = not subject.projects and n == 0
            if size and is_key:
                fresh = factor * _toward_queries(inputs[0], x)
            elif size:
                fresh = 10 * factor * fresh
            x[hidden] = fresh[hidden].to(x.dtype)
        changes.append((size, changed))
    return changes


def _toward_queries(q: Tensor, k: Tensor) -> Tensor:
    """Returns keys of k's shape along the mean query of those that read them, so long that scores reach ±30,000."""
    queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # of one key head, as groups of query heads share them
    mean = queries.mean(2, keepdim=True)
    largest = (queries * mean).sum(-1).abs().amax(-1).clamp(min=1e-6)
    keys: Tensor = mean * (LARGE_SCORE * q.shape[-1] ** 0.5 / largest)[..., None, None]
    return keys.expand(k.shape)


def _is_underflow(after: Tensor, before: Tensor) -> bool:
    """Returns whether rows have only shrunk, to zero or to NaN by a division by it: nothing hidden has come into any.

    Numbers near underflow have few digits, so a percent of the largest output may remain.
    """
    after = torch.where(after.isnan(), 0.0, after)
    left = (after * before).sum(-1, keepdim=True) / before.square().sum(-1, keepdim=True).clamp(min=1e-30)
    return before.shape[-1] > 1 and difference(after, left.clamp(0, 1) * before, before.abs().max()) <= 1e-2


def _is_finite(subject: Subject, case: Case, inputs: list[Tensor], visible: Tensor | None) -> bool:
    out = _outputs_of_visible(subject, case, inputs, visible)
    return bool(out.isfinite().all())


def _outputs_of_visible(subject: Subject, case: Case, inputs: list[Tensor], visible: Tensor | None) -> Tensor:
    """Returns the outputs; for tokens x only those of visible ones, since a hidden token's output is undefined."""
    with torch.no_grad():
        out = subject.run(case, inputs, visible)
    if visible is None or len(inputs) > 1 or subject.pools:
        return out
    return out[_tokens(out, visible, subject)]


def _output_and_gradients(
    subject: Subject, case: Case, inputs: list[Tensor], visible: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Returns the output and the gradient of each input; for inputs x only the outputs of visible tokens."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = subject.run(case, leaves, visible)
    if len(leaves) == 1 and not subject.pools:
        out = out[visible]
    if not out.requires_grad:
        return out, [torch.zeros_like(x) for x in leaves]
    return out, gradients_or_zeros(out.square().sum(), leaves)


def _gradients_of_hidden(subject: Subject, case: Case, inputs: list[Tensor], visible: Tensor) -> list[Finding]:
    """Tests that the gradients of hidden keys and values are zero."""
    if len(inputs) != 3:
        return []
    findings = []
    _, grads = _output_and_gradients(subject, case, inputs, visible)
    for name, grad in zip("kv", grads[1:], strict=True):
        own = grad[_tokens(grad, ~visible, subject)]
        scale = grad.abs().max().clamp(min=1e-30)
        error = difference(own, torch.zeros_like(own), scale)
        findings.append(Finding(error, case.tolerance_or(1.0), f"gradient of hidden {name}"))
    return findings


def gradients_under_masks(subject: Subject, case: Case) -> list[Finding]:
    """Tests that gradients are finite where outputs are: with keys hidden at either end, inside, and all of a sequence.

    Where an output is NaN, so is every gradient, and it is `blind` that tells of it.
    """
    if not subject.takes_visible or subject.own:  # of regard's own mechanisms `blind` asks more
        return []
    findings = []
    for padding in ("left", "right", "inside", "all"):
        asked = case.but(B=2, T=min(case.T, 5), window=None, documents=False)
        asked = subject.fit(asked.but(padding="right" if padding == "all" else padding))
        if padding not in (asked.padding, "all"):
            continue  # it cannot be told that these are hidden
        visible = asked.visible(asked.T)
        assert visible is not None
        where = {"left": "the first keys", "right": "the last keys", "inside": "keys"}.get(padding, "all keys")
        if padding == "all":
            visible[0] = False
        leaves = [x.requires_grad_() for x in subject.inputs(asked)]
        out = subject.run(asked, leaves, visible)
        if not out.requires_grad or not bool(out.isfinite().all()):
            continue
        grads = gradients_or_zeros(out.sum(), leaves)
        names = "qkv" if len(leaves) == 3 else "xy"
        spoilt = [name for name, grad in zip(names, grads, strict=False) if not bool(grad.isfinite().all())]
        what = f"outputs are finite where {where} of a sequence are hidden, and so are gradients"
        if spoilt:
            what = (
                f"outputs are finite where {where} of a sequence are hidden, and the gradient of "
                f"{' and '.join(spoilt)} is NaN: is a query that sees nothing cleaned after its softmax? torch.where "
                "and nan_to_num leave NaN in the gradient; give that query a key to see first, or finite scores"
            )
        findings.append(Finding(math.inf if spoilt else 0.0, 0.0, what))
    return findings


def _distance_to_zero(x: Tensor) -> float:
    return difference(x, torch.zeros_like(x), 1.0)
