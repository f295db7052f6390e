"""`regard.check` tests the laws on anything, and shrinks what breaks one to an example that one can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.checking.hub_models import HUB_LAWS, HubSubject, from_transformers
from regard.checking.models import MODEL_LAWS, ModelLaw, ModelSubject, Trial
from regard.checking.shrinking import reproducer, shrink
from regard.checking.telling import tell_taken, tell_unasked
from regard.checking.verdicts import Status, Verdict, Verdicts
from regard.devices import DTYPES, resolve_device, resolve_dtype
from regard.errors import OptionError
from regard.laws import (
    LAWS,
    Case,
    CouldNotBeAsked,
    DoesNotApply,
    Finding,
    Law,
    SameAs,
    Subject,
    Unasked,
    ask,
    draw_case,
    draw_long_case,
    subject,
)
from regard.laws.subjects import explain_exception
from regard.mechanisms import mechanisms
from regard.models import Model
from regard.registry import Registry

DRAWS = 24
MOST_BROKEN = 4  # broken cases after which the search for a plainer one ends


@dataclass(frozen=True)
class ModelKind:
    """A kind of whole models: a function that recognises them, the class of their trials, and their laws.

    `names` are those of the module, the table of laws and the class of trials, for reproducers. There is one trial for
    `draws_per_trial` draws, as a trial asks more than a case does. `precisions` take turns unless one is asked for.
    """

    fits: Callable[[Any], bool]
    trial: Callable[..., Trial]
    laws: Registry[ModelLaw]
    names: tuple[str, str, str]
    draws_per_trial: int = 4
    precisions: tuple[str, ...] = ("float64", "float32")


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
        draws_per_trial=12,
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
    causal: bool | None = None,
    like: Any = None,
    length: int | None = None,
    width: int | None = None,
    step: Any = None,
    blind_zeros: bool = False,
    progress: Callable[[str, str], None] | None = None,
    **options: Any,
) -> Verdicts:
    """Asks the laws of attention, and returns their verdicts.

    `thing` is a mechanism (name, class, instance), a function f(q, k, v, causal=True), an nn.Module, or a whole model
    of regard or Hugging Face; None asks them of every registered mechanism. `only` names laws. Without `dtype` float64
    and float32 take turns. `causal` says whether it claims not to look ahead; None finds out. `like`, anything that
    can be checked, adds the law `same`, also to `only`: the thing gives what that gives. `length` and `width` are those
    of the tokens of a module that does not say them itself; `width` is also that of a function's heads, where it takes
    no other.
    `step`, the name of a module's method or a function step(x, state) -> y, state, is what takes one token more: the
    law `recurrent` is asked of it. `blind_zeros`: a query that sees nothing must give zeros, as in regard's own
    mechanisms; by default anything else is only noted for other people's attention.
    """
    if draws < 1:
        raise OptionError(f"draws = {draws}, expected at least 1")
    if any(kind.fits(thing) for kind in MODEL_KINDS):
        if like is not None or options:
            named = ", ".join([*["like"] * (like is not None), *options])
            raise OptionError(
                f"{named}: whole models have laws of their own and no options; check mechanisms with them"
            )
        return check_model(thing, only=only, dtype=dtype, device=device, draws=draws, seed=seed, progress=progress)
    things = [thing]
    if thing is None:
        things = list(mechanisms())
    device = resolve_device(device)
    subjects = [subject(t, causal=causal, length=length, width=width, step=step, **options) for t in things]
    for s in subjects:
        s.on(device)
        s.promises_zeros = s.promises_zeros or blind_zeros
    laws: Registry[Any] = Registry("law")
    laws.update(LAWS)
    if like is not None:
        laws["same"] = _same_as(like, subjects, causal, device)
        if only and "same" not in only:
            only = [*only, "same"]  # naming something to compare with asks for this law too
    chosen = _choose_laws(only, laws)
    precisions = ["float64", "float32"]
    if dtype is not None:
        precisions = [resolve_dtype(dtype)]
    verdicts = []
    for s in subjects:
        for name, law in chosen.items():
            if progress is not None:
                progress(s.label, name)
            cases = [draw_case(seed + i, precisions[i % len(precisions)], device) for i in range(draws)]
            if draws >= DRAWS:
                cases.append(draw_long_case(seed, precisions[-1], device))
            verdicts.append(judge(s, name, law, cases))
    raised = [v.raised for v in verdicts if v.raised is not None]
    unasked = [f"Cases that raised an exception are not judged, such as this one: {reason}" for reason in raised[:1]]
    if not only:
        unasked += [sentence for s in subjects if not s.own for sentence in tell_taken(s)]
    if not only and like is None:
        blind = {v.subject for v in verdicts if v.law == "attends" and v.status == "broken"}
        unasked += [x for s in subjects if not s.own for x in tell_unasked(s, attends=s.label not in blind)]
    return Verdicts(verdicts, unasked)


def _same_as(like: Any, subjects: Sequence[Subject], causal: bool | None, device: str) -> SameAs:
    """Returns the law that each subject gives what `like` gives; raises where they cannot have the same inputs.

    A module over tokens can be compared with a mechanism: on the queries, keys and values that it projects.
    """
    reference = subject(like, causal=causal).on(device)
    for s in subjects:
        try:
            comparable = s.token_axis == reference.token_axis or (s.projects and reference.own)
        except CouldNotBeAsked:  # each law will say so
            continue
        if not comparable:
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
    """Tests the laws of whole models: causality, cache = whole pass, padding, batch, prompts of unequal length."""
    kind = next(kind for kind in MODEL_KINDS if kind.fits(model))
    label = type(model).__name__
    precisions = kind.precisions
    if dtype is not None:
        precisions = (resolve_dtype(dtype),)
    model = deepcopy(model).to(resolve_device(device))  # the one handed in stays where it is
    trials = [(seed + i, DTYPES[precisions[i % len(precisions)]]) for i in range(max(1, draws // kind.draws_per_trial))]
    verdicts = []
    for name, law in _choose_laws(only, kind.laws).items():
        if progress is not None:
            progress(label, name)
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
    """Returns the verdict of one law over some trials, each a seed and a dtype."""
    claim = (law.__doc__ or "").strip()
    closest = None
    for asked, (seed, dtype) in enumerate(trials, 1):
        found = _try_model(kind, model, law, seed, dtype)
        if isinstance(found, Unasked):
            return Verdict(label, name, claim, found.status, found.reason, 0)
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
        if closest is None or found.error > closest.error:
            closest = found
    assert closest is not None
    return Verdict(label, name, claim, "holds", closest.what, len(trials), closest.error, closest.limit)


def _smallest_model_trial(
    kind: ModelKind, model: nn.Module, law: ModelLaw, seed: int, dtype: torch.dtype, found: Finding
) -> tuple[int, int, Finding]:
    """Returns the fewest sequences and tokens that still break the law, and what is found there."""
    for T in range(2, 12):
        for B in (1, 2, 3):
            again = _try_model(kind, model, law, seed, dtype, B=B, T=T)
            if isinstance(again, Finding) and again.broken:
                return B, T, again
    return 3, 11, found


def _try_model(
    kind: ModelKind, model: nn.Module, law: ModelLaw, seed: int, dtype: torch.dtype, **size: int
) -> Finding | Unasked:
    """Returns what a law finds of a model, or why it says nothing."""
    try:
        return law(kind.trial(model, seed, dtype, **size))
    except DoesNotApply as reason:
        return Unasked("does not apply", str(reason))
    except CouldNotBeAsked as reason:  # the model is of a kind that no law can be asked of
        return Unasked("could not be asked", str(reason))
    except OptionError:
        raise
    except Exception as error:  # whatever a model raises is to be told, and says nothing about the law
        return Unasked("could not be asked", str(explain_exception(error, type(model).__name__)))


def _choose_laws(only: Sequence[str], laws: Registry[Any]) -> dict[str, Any]:
    """Returns the laws of some names, or all."""
    asked = {laws.find(name) for name in only}
    return {name: law for name, law in laws.items() if not only or law in asked}


def judge(s: Subject, name: str, law: Law, cases: Sequence[Case]) -> Verdict:
    """Returns the verdict of one law over many cases; a case in which the subject raises says nothing."""
    claim = (law.__doc__ or "").strip()
    asked = 0
    unasked: list[Unasked] = []
    exceeded: list[tuple[Case, Finding]] = []
    broken: list[tuple[Case, Finding]] = []
    closest: Finding | None = None
    for case in cases:
        found = ask(law, s, case)
        if isinstance(found, Unasked):
            unasked.append(found)
            continue
        asked += 1
        if found.exceeded:
            exceeded.append((case, found))
        broken = [(case, f) for case, f in exceeded if f.broken]
        if (found.broken and found.tellingness == (False, 0)) or len(broken) == MOST_BROKEN:
            break
        if closest is None or found.error > closest.error:
            closest = found
    failed = [u for u in unasked if u.status == "could not be asked"]
    raised = None
    if asked and failed:
        raised = failed[0].reason
    if exceeded:
        # The plainest example of a broken law, or the last one of what is only noted.
        case, found = exceeded[-1]
        if broken:
            case, found = min(broken, key=lambda example: (*example[1].tellingness, -example[1].error))
        status: Status = "broken"
        seconds = 10.0
        if found.noted:
            status = "noted"
            seconds = 1.0
        case, found = shrink(s, law, s.fit(case), found, seconds)
        lines = reproducer(s, name, law, case)
        return Verdict(s.label, name, claim, status, found.what, asked, found.error, found.limit, case, lines, raised)
    if closest is not None:
        error, limit, what = closest[:3]
        return Verdict(s.label, name, claim, "holds", what, asked, error, limit, raised=raised)
    why = (failed or unasked)[0]
    return Verdict(s.label, name, claim, why.status, why.reason, 0)
