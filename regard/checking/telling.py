"""Sentences about a check of somebody else's attention beside its verdicts: how it was called, what was not asked."""

from __future__ import annotations

import math

from regard.laws import Case, CouldNotBeAsked, Finding, SameAs, Subject, ask, subject
from regard.laws.docstrings import says_mask
from regard.laws.layouts import HEADS_LAST
from regard.laws.signatures import ANY_MASKS, KEY_MASKS, find_softcap

LAYOUT_WORDS = {
    "heads last": "q, k, v [B,T,H,K]",
    "tokens first": "q, k, v [T,B,H,K]",
    "multi-query": "q [B,H,T,K] and k, v [B,S,K], which all its heads share",
    "multi-query, heads last": "q [B,T,H,K] and k, v [B,S,K], which all its heads share",
    "merged": "q, k, v [B,T,H·K]",
    "flat": "q, k, v [n,T,K]",
    "matrices": "q, k, v [T,K], one sequence at a time",
    "packed": "one tensor of q, k and v [B,T,3,H,K]",
    "image": "images x [B,D,h,w], whose places are its tokens",
    "channels first": "x [B,D,T]",
    "sequences": "q, k, v [ΣT,H,K], sequences packed one after another",
    "sequences of qkv": "one tensor [ΣT,3,H,K] of sequences packed one after another",
    "sequences of x": "x [ΣT,D], sequences packed one after another",
}
# What a stranger is most often meant to compute; mechanisms with random or learned numbers cannot be compared.
_REFERENCES = ("softmax", "elu", "argmax", "quadratic")
FAR = 0.3  # a difference, relative to the largest output, from which on no mechanism is called near


def tell_taken(s: Subject) -> list[str]:
    """Returns a sentence for each way of calling that was assumed because it runs, although another may be meant."""
    try:
        s.find_out()  # type: ignore[attr-defined]
    except CouldNotBeAsked:
        return []
    sentences = []
    layout = s.layout  # type: ignore[attr-defined]
    if layout.single is not None:
        sentences.append(f"{s.label} was taken to answer {layout.single}, a call for each query, where it runs.")
    elif layout.name in LAYOUT_WORDS:
        sentences.append(f"{s.label} was taken for attention over {LAYOUT_WORDS[layout.name]}, where it runs.")
    if s.output_form == "transposed":  # type: ignore[attr-defined]
        given, got = ("[B,T,H,K]", "[B,H,T,V]") if layout is HEADS_LAST else ("[B,H,T,K]", "[B,T,H,V]")
        sentences.append(f"{s.label} was taken to return {got} for queries {given}.")
    own_autocast = s.own_autocast  # type: ignore[attr-defined]
    if own_autocast is not None:
        sentences.append(
            f"{s.label} turns autocast to {own_autocast} on by itself: it was asked in {own_autocast}, whose rounding "
            "it has whatever comes in."
        )
    softcap = find_softcap(s.pristine)  # type: ignore[attr-defined]
    if softcap is not None:
        sentences.append(
            f"{s.label} says that it caps its scores at {softcap:g} where no cap is given: it is compared with what "
            "caps them, too."
        )
    sentences += [f"{s.label}: {remark}." for remark in s.mask_remarks]
    mask = s.key_mask  # type: ignore[attr-defined]
    said = None
    if mask is not None:
        said = says_mask(s.pristine, mask.name)  # type: ignore[attr-defined]
    if mask is not None and said is not None and mask.shape != "lengths":
        sentences.append(f"{s.label} was asked with True in {mask.name} for what is {said}, as its docstring says.")
        mask = mask._replace(marks="")
    if mask is not None and mask.shape == "batch pairs":
        sentences.append(f"{s.label} was taken to read {mask.name} as [B,T,S], one for each query, not as [B,S].")
    if mask is not None and (mask.shape, mask.marks) == ("keys", "added"):
        sentences.append(
            f"{s.label} was taken to add {mask.name} [B,S] to its scores: 0 for what may be seen, −∞ for what may not. "
            "With 1 for what may be seen and 0 for what may not it hides nothing."
        )
    if mask is not None and mask.name in ANY_MASKS and mask.marks == "hidden":
        sentences.append(
            f"{s.label} was taken to hide what is True in {mask.name}. If True is meant for what may be seen, it is "
            "the wrong way round."
        )
    if mask is not None and KEY_MASKS.get(mask.name, False) and mask.marks in ("visible", "ones"):
        sentences.append(
            f"{s.label} was taken to show what is True in {mask.name}. In PyTorch's own layers True hides under that "
            "name: given such a mask, it sees the padding and nothing else."
        )
    return sentences


def tell_unasked(s: Subject, attends: bool = True) -> list[str]:
    """Returns sentences about what the laws cannot tell of attention that somebody else wrote.

    The laws say how attention behaves, not which attention it is: an unscaled softmax keeps them all. `attends` says
    whether its tokens depend on one another.
    """
    try:
        s.find_out()  # type: ignore[attr-defined]
    except CouldNotBeAsked:
        return []
    sentences = []
    if not s.causal and attends and not s.pools and not s.reads_context:
        sentences.append(
            f"Not asked of {s.label}: 'looks-ahead'. It attends in both directions and has no parameter that says "
            "otherwise; if it should be causal, say causal=True (--causal)."
        )
    told = _tell_nearest(s)
    if told:
        sentences.append(f"Not asked of {s.label}: which attention it computes. {told}")
    return sentences


def _tell_nearest(s: Subject) -> str:
    """Returns a sentence that names the nearest mechanism, and the option that compares the subject with it; or ""."""
    if s.projects:
        return "like='softmax' (--like softmax) compares with softmax on the queries, keys and values it projects."
    closest = resemble(s)
    if closest is None:
        return ""
    name, error, explained = closest
    if math.isinf(error):
        return ""  # outputs of another shape, or none that is a number, are near to nothing
    if error < 1e-4:
        return f"On one case it gives what {name} gives; like={name!r} (--like {name}) asks that everywhere."
    if error > FAR and not explained:
        return f"None is near: {name}, the nearest, differs by {error:.1e}. like='softmax' (--like softmax) says how."
    return f"The nearest is {name}, from which it differs by {error:.1e}; like={name!r} (--like {name}) says where."


def resemble(s: Subject) -> tuple[str, float, bool] | None:
    """Returns the mechanism whose outputs are nearest, the difference, and whether a common slip explains that.

    Returns None if no mechanism can be compared with it.
    """
    case = s.fit(Case(B=2, T=7, H=4, G=2, K=5, V=3, dtype="float32"))
    if s.token_axis != 2:
        return None
    errors = {}
    for name in _REFERENCES:
        found = ask(SameAs(subject(name)), s, case)
        if isinstance(found, Finding):
            errors[name] = found.error
            if "(those of" in found.what and found.broken:  # but for one common slip, it is this one
                return name, found.error, True
    if not errors:
        return None
    name = min(errors, key=lambda n: errors[n])
    return name, errors[name], False
