"""`regard.check`: put anything to the laws, and shrink what breaks them to an example one can read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.checking.hub_models import HUB_LAWS, HubSubject, from_transformers
from regard.checking.models import MODEL_LAWS, ModelLaw, ModelSubject, Trial
from regard.checking.shrinking import reproducer, shrink
from regard.checking.verdicts import Verdict, Verdicts
from regard.devices import DTYPES, resolve_device, resolve_dtype
from regard.errors import OptionError, UnknownNameError, did_you_mean
from regard.laws import LAWS, Case, DoesNotApply, Finding, Law, SameAs, Subject, applies, draw_case, subject
from regard.mechanisms import mechanisms
from regard.models import Model

DRAWS = 24


@dataclass(frozen=True)
class ModelKind:
    """A kind of whole models: which things are of it, how one is put on trial, and its laws, with where these are."""

    fits: Callable[[Any], bool]
    trial: Callable[..., Trial]
    laws: dict[str, ModelLaw]
    names: tuple[str, str, str]  # module, table of laws, class of trials
    share: int = 4  # one trial for so many draws: a trial asks more than a case does
    precisions: tuple[str, ...] = ("float64", "float32")  # which take turns unless one is asked for


MODEL_KINDS = (
    ModelKind(
        lambda thing: isinstance(thing, Model),
        ModelSubject,
        MODEL_LAWS,
        ("regard.checking.models", "MODEL_LAWS", "ModelSubject"),
    ),
    ModelKind(
        from_transformers,
        HubSubject,
        HUB_LAWS,
        ("regard.checking.hub_models", "HUB_LAWS", "HubSubject"),
        share=12,
        precisions=("float32",),
    ),
)


def check(
    thing: Any = None,
    *,
    only: Sequence[str] = (),
    dtype: str | None = None,
    device: str = "cpu",
    draws: int = DRAWS,
    seed: int = 0,
    causal: bool = True,
    like: Any = None,
    progress: Callable[[str, str], None] | None = None,
    **options: Any,
) -> Verdicts:
    """The laws of attention, asked of a mechanism (name, class, instance), a function f(q, k, v, causal=True), an
    nn.Module, a whole model of regard or Hugging Face, or of every registered mechanism.

    `only` names laws; without `dtype` float64 and float32 take turns; `causal=False` says that it never claims to be.
    `like`, anything that can be checked, adds the law `same`: the thing gives what that gives.
    """
    if draws < 1:
        raise OptionError(f"draws = {draws}, expected at least 1")
    if any(kind.fits(thing) for kind in MODEL_KINDS):
        if like is not None or options:
            named = ", ".join(["like"] * (like is not None) + list(options))
            raise OptionError(
                f"{named}: whole models have laws of their own and no options; check mechanisms with them"
            )
        return check_model(thing, only=only, dtype=dtype, device=device, draws=draws, seed=seed, progress=progress)
    things = list(mechanisms()) if thing is None else [thing]
    subjects = [subject(t, causal=causal, **options) for t in things]
    laws = _chosen(only, LAWS if like is None else {**LAWS, "same": _same_as(like, subjects, causal)})
    device = resolve_device(device)
    precisions = ["float64", "float32"] if dtype is None else [resolve_dtype(dtype)]
    verdicts = []
    for s in subjects:
        for name, law in laws.items():
            if progress is not None:
                progress(s.label, name)
            cases = [draw_case(seed + i, precisions[i % len(precisions)], device) for i in range(draws)]
            verdicts.append(judge(s, name, law, cases))
    return Verdicts(verdicts)


def _same_as(like: Any, subjects: Sequence[Subject], causal: bool) -> SameAs:
    """The law that each subject gives what `like` gives; an error where they cannot be given the same inputs."""
    reference = subject(like, causal=causal)
    for s in subjects:
        if s.token_axis != reference.token_axis:
            raise OptionError(
                f"{s.label} cannot be compared with {reference.label}: one takes q, k, v and the other tokens x [B,T,D]"
            )
    return SameAs(reference)


def check_model(
    model: nn.Module,
    *,
    only: Sequence[str] = (),
    dtype: str | None = None,
    device: str = "cpu",
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[str, str], None] | None = None,
    source: str = "model  # the one that was checked",
) -> Verdicts:
    """The laws of whole models: looks ahead, cache = whole pass, padding, batch, prompts of unequal length."""
    kind = next(kind for kind in MODEL_KINDS if kind.fits(model))
    label, verdicts = type(model).__name__, []
    precisions = kind.precisions if dtype is None else (resolve_dtype(dtype),)
    model = deepcopy(model).to(resolve_device(device))  # the one handed in stays where it is
    for name, law in _chosen(only, kind.laws).items():
        if progress is not None:
            progress(label, name)
        trials = [(seed + i, DTYPES[precisions[i % len(precisions)]]) for i in range(max(1, draws // kind.share))]
        verdicts.append(_judge_model(kind, model, label, source, name, law, trials))
    return Verdicts(verdicts)


def _judge_model(
    kind: ModelKind,
    model: nn.Module,
    label: str,
    source: str,
    name: str,
    law: ModelLaw,
    trials: list[tuple[int, torch.dtype]],
) -> Verdict:
    claim, closest = (law.__doc__ or "").strip(), None
    for asked, (seed, dtype) in enumerate(trials, 1):
        found = _tried(kind, model, law, seed, dtype)
        if isinstance(found, str):
            return Verdict(label, name, claim, "does not apply", found, 0)
        if found.broken:
            B, T, found = _smallest_model_trial(kind, model, law, seed, dtype, found)
            module, laws, trial = kind.names
            lines = [
                "import regard, torch",
                f"from {module} import {laws}, {trial}",
                f"model = {source}",
                f"trial = {trial}(model, seed={seed}, dtype={dtype}, B={B}, T={T})",
                f"print({laws}[{name!r}](trial))",
            ]
            shown = "\n".join(lines)
            return Verdict(label, name, claim, "broken", found.what, asked, found.error, found.limit, None, shown)
        closest = found if closest is None or found.error > closest.error else closest
    assert closest is not None
    return Verdict(label, name, claim, "holds", closest.what, len(trials), closest.error, closest.limit)


def _smallest_model_trial(
    kind: ModelKind, model: nn.Module, law: ModelLaw, seed: int, dtype: torch.dtype, found: Finding
) -> tuple[int, int, Finding]:
    """The fewest sequences and tokens that still break the law."""
    for T in range(2, 12):
        for B in (1, 2, 3):
            again = _tried(kind, model, law, seed, dtype, B=B, T=T)
            if isinstance(again, Finding) and again.broken:
                return B, T, again
    return 3, 11, found


def _tried(
    kind: ModelKind, model: nn.Module, law: ModelLaw, seed: int, dtype: torch.dtype, **size: int
) -> Finding | str:
    """A finding, or the reason why the law does not apply."""
    try:
        return law(kind.trial(model, seed, dtype, **size))
    except DoesNotApply as reason:
        return str(reason)
    except Exception as error:  # whatever the model raises on ordinary input is a finding of its own
        return Finding(math.inf, 0.0, f"{type(error).__name__}: {error}")


def _chosen(only: Sequence[str], laws: dict[str, Any]) -> dict[str, Any]:
    for name in only:
        if name not in laws:
            raise UnknownNameError(f"no law is called '{name}'.{did_you_mean(name, laws)}")
    return {n: law for n, law in laws.items() if not only or n in only}


def judge(s: Subject, name: str, law: Law, cases: Sequence[Case]) -> Verdict:
    """One law over many cases."""
    claim = (law.__doc__ or "").strip()
    asked, reason, closest = 0, "", None
    for case in cases:
        found = applies(law, s, case)
        if isinstance(found, str):
            reason = found
            continue
        asked += 1
        if found.broken:
            case, found = shrink(s, law, s.fit(case), found)
            lines = reproducer(s, name, law, case)
            return Verdict(s.label, name, claim, "broken", found.what, asked, found.error, found.limit, case, lines)
        if closest is None or found.error > closest.error:
            closest = found
    if closest is None:
        return Verdict(s.label, name, claim, "does not apply", reason, 0)
    return Verdict(s.label, name, claim, "holds", closest.what, asked, closest.error, closest.limit)
