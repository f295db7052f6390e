"""Verdicts: what one law says of one thing, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, overload

from regard.laws import Case

Status = Literal["holds", "broken", "does not apply"]


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
