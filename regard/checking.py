"""`regard.check`: put anything to the laws, and shrink what breaks them to an example one can read."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from regard.errors import OptionError, PluginError, UnknownNameError, did_you_mean
from regard.laws import LAWS, Case, DoesNotApply, Finding, Law, SameAs, Subject, applies, draw_case, subject
from regard.laws.case import DTYPES
from regard.mechanisms import mechanisms
from regard.models import Model
from regard.models.laws import MODEL_LAWS, ModelLaw, ModelSubject, Trial

Status = Literal["holds", "broken", "does not apply"]
DRAWS = 24
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Verdict:
    """What one law says of one subject; where it is broken, a small example and how to see it again."""

    subject: str
    law: str
    claim: str
    status: Status
    detail: str
    draws: int
    error: float | None = None
    limit: float | None = None
    case: Case | None = None
    reproducer: str | None = None

    def __str__(self) -> str:
        if self.status == "broken":
            size = f"{self.error:.1e}, allowed {self.limit:.1e}"
            return f"✗ {self.subject} breaks '{self.law}': {self.claim}\n  {self.detail}: {size}"
        mark = "✓" if self.status == "holds" else "–"
        return f"{mark} {self.subject}, '{self.law}': {self.claim if mark == '✓' else self.detail}"


@dataclass(frozen=True)
class ModelKind:
    """A kind of whole models: which things are of it, how one is put on trial, and its laws, with where these are."""

    fits: Callable[[Any], bool]
    trial: Callable[..., Trial]
    laws: dict[str, ModelLaw]
    names: tuple[str, str, str]  # module, table of laws, class of trials
    share: int = 4  # one trial for so many draws: a trial asks more than a case does
    precisions: tuple[str, ...] = ("float64", "float32")  # which take turns unless one is asked for


MODEL_KINDS = [
    ModelKind(
        lambda thing: isinstance(thing, Model),
        ModelSubject,
        MODEL_LAWS,
        ("regard.models.laws", "MODEL_LAWS", "ModelSubject"),
    )
]


class Verdicts(Sequence[Verdict]):
    """All verdicts of one check; `ok` when no law is broken."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self._verdicts = tuple(verdicts)

    @overload
    def __getitem__(self, i: int) -> Verdict: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Verdict]: ...
    def __getitem__(self, i: int | slice) -> Verdict | Sequence[Verdict]:
        return self._verdicts[i]

    def __len__(self) -> int:
        return len(self._verdicts)

    @property
    def broken(self) -> list[Verdict]:
        return [v for v in self if v.status == "broken"]

    @property
    def ok(self) -> bool:
        return not self.broken

    def as_json(self) -> list[dict[str, Any]]:
        """Plain data; an infinite error (NaN, a wrong shape, an exception) is written as the string "inf"."""
        rows = [asdict(v) for v in self]
        return [{k: "inf" if isinstance(x, float) and math.isinf(x) else x for k, x in row.items()} for row in rows]

    def __str__(self) -> str:
        """Broken laws in full, and a line with the names of those that hold."""
        lines = [str(v) for v in self.broken]
        for name in dict.fromkeys(v.subject for v in self):
            kept = [v.law for v in self if v.subject == name and v.status == "holds"]
            if kept:
                lines.append(f"✓ {name} keeps {', '.join(kept)}")
        return "\n".join(lines or [str(v) for v in self])

    def __repr__(self) -> str:
        return "\n".join(f"{v.subject:20} {v.law:12} {v.status:15} {v.detail}" for v in self)


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
    device = usable(device)
    precisions = ["float64", "float32"] if dtype is None else [precision(dtype)]
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


def precision(name: str) -> str:
    """float64, float32, bfloat16 or float16, also by their short names."""
    full = _SHORT.get(name, name)
    if full not in DTYPES:
        raise OptionError(f"dtype '{name}' is not known.{did_you_mean(name, [*DTYPES, *_SHORT])}")
    return full


def usable(device: str) -> str:
    """A device that tensors can be made on, or an error that names those that are here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise OptionError(f"device '{device}' cannot be used here; there is {', '.join(here)}") from None
    return device


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
    precisions = kind.precisions if dtype is None else (precision(dtype),)
    model = deepcopy(model).to(usable(device))  # the one handed in stays where it is
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


def shrink(s: Subject, law: Law, case: Case, found: Finding, seconds: float = 10.0) -> tuple[Case, Finding]:
    """The smallest case near this one that still breaks the law."""
    until = time.monotonic() + seconds
    smaller = True
    while smaller and time.monotonic() < until:
        smaller = False
        for candidate in _smaller(case):
            again = applies(law, s, candidate)
            if isinstance(again, Finding) and again.broken and s.fit(candidate) == candidate:
                case, found, smaller = candidate, again, True
                break
    return case, found


def _smaller(case: Case) -> Iterator[Case]:
    if not case.causal:
        yield case.but(causal=True)
    if case.padding != "none":
        yield case.but(padding="none")
    if case.window is not None:
        yield case.but(window=None)
    if case.documents:
        yield case.but(documents=False)
    for name in ("T", "S", "B", "H", "G", "K", "V"):
        now = getattr(case, name)
        for value in sorted({1, 2, 3, now // 2, now - 1}):
            if 0 < value < now and (name not in "HG" or _divides(case.but(**{name: value}))):
                yield case.but(**{name: value})
    if case.H > 1 and case.G == case.H:
        yield case.but(H=1, G=1)


def _divides(case: Case) -> bool:
    return case.H % case.G == 0


def reproducer(s: Subject, name: str, law: Law, case: Case) -> str:
    """Five lines of Python that show it again."""
    known, made = ("SameAs", law.source) if isinstance(law, SameAs) else ("LAWS", f"LAWS[{name!r}]")
    return "\n".join(
        [
            "import regard",
            f"from regard.laws import {known}, Case",
            f"thing = {s.source}",
            f"case = {case!r}",
            f"print({made}(thing, case))",
        ]
    )


def plugin(path: str, causal: bool = True) -> Subject:
    """What a Python file of yours defines, ready for the laws: `file.py:name`, or `file.py` where it is clear."""
    file, name = _split(path)
    before = set(mechanisms())
    module = _imported(file)
    new = sorted(set(mechanisms()) - before)
    source = f"regard.plugin({path!r}{'' if causal else ', causal=False'})"
    if name is None:
        if len(new) == 1:
            return subject(new[0], source=source)
        name = _only_candidate(module, file, new)
    if name in new:
        return subject(name, source=source)
    if not hasattr(module, name):
        raise PluginError(f"{file} defines no '{name}'.{did_you_mean(name, _candidates(module))}")
    return subject(getattr(module, name), label=name, source=source, causal=causal)


def _split(path: str) -> tuple[Path, str | None]:
    file, colon, name = path.rpartition(":")
    if not colon or not file or not name.isidentifier():
        file, name = path, ""
    if not Path(file).is_file():
        raise PluginError(f"no file '{file}'; expected --plugin file.py or file.py:name")
    return Path(file), name or None


def _imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"regard_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise PluginError(f"'{file}' is not a Python file; expected file.py or file.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PluginError(f"'{file}' cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _candidates(module: Any) -> list[str]:
    own = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    return [
        n
        for n, x in own.items()
        if isinstance(x, nn.Module) or (callable(x) and getattr(x, "__module__", None) == module.__name__)
    ]


def _only_candidate(module: Any, file: Path, registered: list[str]) -> str:
    found = registered or _candidates(module)
    if len(found) != 1:
        what = f"several things ({', '.join(found)})" if found else "no function or module"
        raise PluginError(f"{file} defines {what}; say which: --plugin {file}:name")
    return found[0]
