"""Things that go wrong, many times over: `make test-reliability`, or `python tests/reliability/campaign.py --count 9`.

Each kind of trouble is a function that takes how often to try, an empty folder and a source of chance, and returns what
went wrong, one line each: nothing, if regard keeps its promises. A new kind is a function in a file of this folder with
`@trouble(per=...)`, and that file's name in FILES. `per` says how many tries `--count 1` is worth.

Children are forked from this process, which has imported all that they need, so that a kill comes at any moment of the
work and not during the imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
FILES = ("crash_prefixes", "damaged_checkpoints", "killed_sweeps", "killed_trainings", "simultaneous_starts")

Trouble = Callable[[int, Path, random.Random], list[str]]


class Kind(NamedTuple):
    """One kind of trouble: how to make it, and how many tries `--count 1` is worth."""

    name: str
    make: Trouble
    per: float


KINDS: dict[str, Kind] = {}


def trouble(per: float) -> Callable[[Trouble], Trouble]:
    """Registers a kind of trouble under the name of its function."""

    def register(make: Trouble) -> Trouble:
        name = make.__name__.replace("_", "-")
        KINDS[name] = Kind(name, make, per)
        return make

    return register


def run(count: float, names: list[str], seed: int) -> list[dict[str, Any]]:
    """Makes trouble of each kind, and returns a row of each: its tries, its seconds, and what went wrong."""
    rows = []
    for name in names:
        kind = KINDS[name]
        tries = max(1, round(count * kind.per))
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong = kind.make(tries, Path(folder), random.Random(f"{seed} {name}"))
        seconds = round(time.monotonic() - began, 1)
        rows.append({"kind": name, "tries": tries, "wrong": wrong, "seconds": seconds})
        print(f"{name:24} {tries:6} tries {len(wrong):4} wrong {seconds:8.1f} s", flush=True)
        for line in wrong[:10]:
            print(f"    {line}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Make trouble, and see whether regard keeps its promises.")
    parser.add_argument("--count", type=float, default=40, help="how often: 40 takes about ten minutes on two cores")
    parser.add_argument("--only", default="", help="names of kinds, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows here")
    asked = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]
    sys.modules["campaign"] = sys.modules[__name__]  # so that the files register their kinds here
    for name in FILES:
        importlib.import_module(name)
    names = list(filter(None, asked.only.split(","))) or sorted(KINDS)
    unknown = set(names) - set(KINDS)
    if unknown:
        parser.error(f"no kind {min(unknown)}; there is {', '.join(sorted(KINDS))}")
    rows = run(asked.count, names, asked.seed)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
