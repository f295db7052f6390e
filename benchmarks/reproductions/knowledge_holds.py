"""Does the knowledge experiment show what it is meant to show? Give it folders of finished runs, e.g. of three seeds.

python benchmarks/reproductions/knowledge_holds.py runs/knowledge-*
"""

import json
import sys
from pathlib import Path


def main(folders: list[str]) -> int:
    holds = True
    for folder in folders:
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
        constant = max(row["test"]["accuracy"] for row in results["baselines"])
        without, reading = (row["test"] for row in results["models"])
        claims = {
            "the constant answer is right for at most 10%": constant <= 0.10,
            "without pretraining, about that or less": without["low"] <= constant,
            "with it, at least 3 times that, at the lower end of the interval": reading["low"] >= 3 * constant,
        }
        seed, n = results["seed"], reading["n"]
        print(
            f"{folder} (seed {seed}, {n} people, {results['seconds']:.0f} s): constant {constant:.1%}, "
            f"without {without['accuracy']:.1%}, with {reading['accuracy']:.1%} "
            f"[{reading['low']:.1%}, {reading['high']:.1%}]"
        )
        for claim, true in claims.items():
            print(f"  {'holds ' if true else 'BROKEN'} {claim}")
        holds &= all(claims.values())
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
