"""Shrinking: the smallest case that still breaks a law, and five lines of Python that show it again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from regard.laws import Case, Finding, Law, SameAs, Subject, ask


def shrink(subject: Subject, law: Law, case: Case, found: Finding, seconds: float = 10.0) -> tuple[Case, Finding]:
    """Returns the smallest case that still breaks the law, found by shrinking this one step by step, and its finding.

    The search ends after `seconds` of this thread's CPU time, so that a busy machine finds the same case as an idle
    one.
    """
    until = time.thread_time() + seconds
    shrunk = True
    while shrunk and time.thread_time() < until:
        shrunk = False
        for candidate in _smaller_cases(case):
            again = ask(law, subject, candidate)
            if isinstance(again, Finding) and _is_alike(again, found) and subject.fit(candidate) == candidate:
                case = candidate
                found = again
                shrunk = True
                break
    return case, found


def _is_alike(again: Finding, found: Finding) -> bool:
    """Tells whether the finding in a smaller case may replace the one before: the law is again broken, or again noted.

    An error that was plain to see must stay so, and the inputs must be no more unusual.
    """
    if again.error < min(found.error, 1.0) / 10 or again.tellingness > found.tellingness:
        return False
    return again.exceeded and again.noted == found.noted


def _smaller_cases(case: Case) -> Iterator[Case]:
    """Yields cases that are smaller or plainer in one respect."""
    if not case.causal:
        yield case.but(causal=True)
    if case.padding != "none":
        yield case.but(padding="none")
    if case.window is not None:
        yield case.but(window=None)
    if case.documents:
        yield case.but(documents=False)
    if case.adjust != "none":
        yield case.but(adjust="none")
    for name in ("T", "S", "B", "H", "G", "K", "V"):
        now = getattr(case, name)
        for value in sorted({1, 2, 3, now // 2, now - 1}):
            candidate = case.but(**{name: value})
            if 0 < value < now and candidate.H % candidate.G == 0:
                yield candidate
    if case.H > 1 and case.G == case.H:
        yield case.but(H=1, G=1)


def reproducer(subject: Subject, name: str, law: Law, case: Case) -> str:
    """Returns five lines of Python that show a broken law again."""
    source = subject.source
    if case.device != "cpu":
        source = f"{source}.on({case.device!r})"
    imported = "LAWS"
    expression = f"LAWS[{name!r}]"
    if isinstance(law, SameAs):
        imported = "SameAs"
        expression = law.source
    return "\n".join(
        [
            "import regard",
            f"from regard.laws import {imported}, Case",
            f"thing = {source}",
            f"case = {case!r}",
            f"print({expression}(thing, case))",
        ]
    )
