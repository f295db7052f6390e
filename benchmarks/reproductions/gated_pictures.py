"""What the usual picture of a gated delta layer misses in a trained model, by head: docs/gated.md has the numbers.

regard train gated --out runs/gated
python benchmarks/reproductions/gated_pictures.py runs/gated --out benchmarks/results/gated-pictures-cpu-DATE.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from regard.lens.models import open_recordable
from regard.lens.recording.memories import describe_misses

TEXT = "If the argument is a string, it must contain a decimal number, optionally preceded by a sign and a space."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the folder of a run of the recipe gated")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args()
    recording = open_recordable(chosen.run).record(TEXT).recordings[0]
    missed = [attended.missed for attended in recording.attentions]
    results = {
        "text": TEXT,
        "said": describe_misses([recording]),
        **{name: [round(x, 9) for layer in missed for x in layer[name]] for name in ("output", "usual", "moved")},
    }
    chosen.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(*results["said"], sep="\n")


if __name__ == "__main__":
    main()
