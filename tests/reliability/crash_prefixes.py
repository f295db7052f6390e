"""Crashes of the machine at every moment of a write, with what was not forced to disk missing in part or as a whole."""

from __future__ import annotations

import random
from pathlib import Path

from campaign import trouble
from writers import KINDS, crash


@trouble(per=0.2)
def crash_prefixes(tries: int, folder: Path, dice: random.Random) -> list[str]:
    wrong = []
    for n in range(tries):
        for kind in KINDS:
            before = sorted(dice.sample(range(1, 8), dice.randrange(3)))
            try:
                crash(kind, folder / f"{kind}-{n}", before, number=8 + dice.randrange(2))
            except Exception as error:
                wrong.append(f"try {n}, {kind} over {before}: {error!r:.300}")
    return wrong
