"""Do the knowledge experiment, and the tour that has it as a chapter, show what they are meant to show?

Give it folders of finished runs, e.g. of three seeds:

python benchmarks/reproductions/knowledge_holds.py runs/knowledge-* runs/tour-*
"""

import json
import sys
from pathlib import Path
from typing import Any

FEWEST_PEOPLE = 100  # fifty swing by 16 points


def read(folder: Path) -> dict[str, Any]:
    """Returns the results in a folder."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def knowledge_claims(results: dict[str, Any]) -> dict[str, bool]:
    """Returns what the knowledge experiment is meant to show, and whether it does."""
    constant = max(row["test"]["accuracy"] for row in results["baselines"])
    without, reading = (row["test"] for row in results["models"])
    return {
        "the constant answer is right for at most 10%": constant <= 0.10,
        "without pretraining, about that or less": without["low"] <= constant,
        "with it, at least 3 times that, at the lower end of the interval": reading["low"] >= 3 * constant,
    }


def tour_claims(results: dict[str, Any], folder: Path) -> dict[str, bool]:
    """Returns what the other chapters of a tour are meant to show, and whether they do."""
    broken = [law for law in results["check"]["laws"] if law["status"] == "broken"]
    own = results["check"]["own_laws"]
    see = results["see"]
    head = see["heads"][0]
    rows = results["race"]["race"]["rows"]
    report = (folder / "report.html").read_text(encoding="utf-8")
    return {
        f"at least {FEWEST_PEOPLE} unseen people are asked": see["n"] >= FEWEST_PEOPLE,
        "the leaky performer is caught, with a reproducer": any(law["reproducer"] for law in broken),
        "regard's own performer keeps the laws that it breaks": bool(own) and all(x["status"] == "holds" for x in own),
        "without the head that is shown, half of what was right is lost": 2 * head["accuracy"] <= see["accuracy"],
        "the race has times of four mechanisms": len({row["what"] for row in rows}) == 4,
        "the report is whole, and so are the pages that it links to": report.rstrip().endswith("</html>")
        and all((folder / results[chapter]["page"]).is_file() for chapter in ("see", "race")),
    }


def main(folders: list[str]) -> int:
    """Prints what holds of each folder, and returns 1 where something does not."""
    holds = True
    for folder in map(Path, folders):
        results = read(folder)
        claims = {}
        if results["experiment"] == "tour":
            claims = tour_claims(results, folder)
            took = results["seconds"]
            results = read(folder / results["train"]["folder"]) | {"seconds": took}
        claims = knowledge_claims(results) | claims
        constant = max(row["test"]["accuracy"] for row in results["baselines"])
        without, reading = (row["test"] for row in results["models"])
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
