"""Shrinking: the smallest case that still breaks a law, and five lines of Python that show it again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from regard.laws import Case, Finding, Law, SameAs, Subject, applies


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
