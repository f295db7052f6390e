"""Verdicts: the result of one law for one subject, and all results of one check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, overload

from regard.laws import Case

Status = Literal["holds", "broken", "noted", "does not apply", "could not be asked"]
MARKS: dict[Status, str] = {
    "holds": "✓",
    "broken": "✗",
    "noted": "!",
    "does not apply": "–",
    "could not be asked": "?",
}


@dataclass(frozen=True)
class Verdict:
    """What one law says of one subject; where it is broken, a small example and how to see it again.

    "noted" is worth knowing, but no fault. "could not be asked" means that the subject raised an exception in all cases
    or could not be called: `detail` says how it was called and what came back. If it raised in some cases only,
    `raised` says so of one of them.
    """

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
    raised: str | None = None

    @property
    def measured(self) -> str:
        """What was seen, with the error and its limit where the error is a size."""
        if self.error is None or self.limit is None or math.isinf(self.error):
            return self.detail
        return f"{self.detail}: {self.error:.1e}, allowed {self.limit:.1e}"

    def __str__(self) -> str:
        if self.status == "broken":
            return f"✗ {self.subject} breaks '{self.law}': {self.claim}\n  {self.measured}"
        said = self.detail
        if self.status == "holds":
            said = self.claim
        return f"{MARKS[self.status]} {self.subject}, '{self.law}': {said}"


class Verdicts(Sequence[Verdict]):
    """All verdicts of one check. `ok` when no law is broken; `asked` when at least one could be asked.

    `unasked` holds sentences about what the laws cannot tell of each subject, such as whether it computes softmax.
    """

    def __init__(self, verdicts: Sequence[Verdict], unasked: Sequence[str] = ()) -> None:
        self._verdicts = tuple(verdicts)
        self.unasked = tuple(unasked)

    @overload
    def __getitem__(self, i: int) -> Verdict: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Verdict]: ...
    def __getitem__(self, i: int | slice) -> Verdict | Sequence[Verdict]:
        return self._verdicts[i]

    def __len__(self) -> int:
        return len(self._verdicts)

    def having(self, status: Status) -> list[Verdict]:
        """Returns the verdicts of one status."""
        return [v for v in self if v.status == status]

    @property
    def broken(self) -> list[Verdict]:
        return self.having("broken")

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def asked(self) -> bool:
        """Whether at least one law could be asked, or no law failed to be asked."""
        return not self.having("could not be asked") or any(v.draws for v in self)

    @property
    def problems(self) -> list[str]:
        """What kept laws from being asked, each once."""
        return list(dict.fromkeys(v.detail for v in self.having("could not be asked")))

    def as_json(self) -> list[dict[str, Any]]:
        """Returns plain data; an infinite error (NaN, a wrong shape) is written as the string "inf"."""
        return [{k: _finite(x) for k, x in asdict(v).items()} for v in self]

    def __str__(self) -> str:
        """Returns broken laws in full, what was noted or could not be asked, and the names of laws that hold."""
        lines = [str(v) for v in self.broken + self.having("noted")]
        lines += [f"? {problem}" for problem in self.problems]
        for name in dict.fromkeys(v.subject for v in self):
            kept = [v.law for v in self if v.subject == name and v.status == "holds"]
            if kept:
                lines.append(f"✓ {name} keeps {', '.join(kept)}")
        lines = lines or [str(v) for v in self]
        return "\n".join([*lines, *self.unasked])

    def __repr__(self) -> str:
        return "\n".join(f"{v.subject:20} {v.law:12} {v.status:18} {v.detail}" for v in self)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value
