"""Races of all mechanisms and their peers, dated, and the picture of them in the README.

    python benchmarks/speed/race.py run FILE [--device cuda] [--peers FOLDER]  # measures; FILE: results/race-….json
    python benchmarks/speed/race.py run FILE --device cuda --only softmax,elu  # some of them again
    python benchmarks/speed/race.py draw                                       # docs/images/race.png from the results

On a GPU: bf16, 16 heads, 32,768 tokens in all; on a CPU: float32, 8 heads, one sequence, all cores that PyTorch takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from regard.lab.bench.page import picture
from regard.lab.bench.results import RaceResults
from regard.lab.bench.run import Race, race
from regard.storage import atomic_write

RESULTS = Path(__file__).parents[1] / "results"
IMAGE = Path(__file__).parents[2] / "docs" / "images" / "race.png"
DRAWN = ("softmax", "elu", "quadratic", "performer", "fourier", "SDPA", "fla", "fla + features", "performer-pytorch")
PEERS = ("SDPA", "fla", "fla + features", "performer-pytorch")
# The laws of the kernels are asked by `make gpu-test`: so many small shapes would take longer to compile than the race.
GPU: dict[str, Any] = {"tokens": (1024, 4096, 16384, 65536), "total": 32768, "heads": 16, "groups": 16}
GPU |= {"dtype": "bfloat16", "seconds": 0.2, "patience": 0.5, "draws": 0}


def measured(file: Path, device: str, peers: str | None, only: tuple[str, ...] = ()) -> None:
    """Writes the file anew after each size: what was measured stays, however the race ends."""
    if peers:
        sys.path.insert(0, peers)
    command = f"python benchmarks/speed/race.py run {file.name} --device {device}"
    command += f" --only {','.join(only)}" if only else ""

    def keep(results: RaceResults) -> None:
        document = {"lab": "bench", "command": command, **results.as_dict()}
        with atomic_write(file) as out:
            out.write(json.dumps(document, indent=1).encode() + b"\n")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    config = Race(device=device, **(GPU if device.startswith("cuda") else {}))
    keep(race(config, only, peers=() if only else PEERS, say=say, keep=keep))


def drawn() -> None:
    """On each device the last race of everyone, without those whose lines would only hide others'."""
    last: dict[str, dict[str, Any]] = {}
    for file in sorted(RESULTS.glob("race-*.json")):
        found = json.loads(file.read_text())
        again = {row["what"] for row in found["rows"]}
        before = last.get(found["config"]["device"], {"rows": []})["rows"]
        rows = [row for row in before if row["what"] not in again] + found["rows"]
        found["rows"] = sorted((r for r in rows if r["what"] in DRAWN), key=lambda r: DRAWN.index(r["what"]))
        last[found["config"]["device"]] = found
    picture([RaceResults.from_dict(last[name]) for name in sorted(last, reverse=True)], IMAGE)
    print(IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("run", "draw"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", help="a folder with the peers unpacked")
    parser.add_argument("--only", default="", help="names with commas; none: all and the peers")
    options = parser.parse_args()
    if options.do == "draw":
        drawn()
        return
    if options.file is None:
        parser.error("run needs a FILE to write")
    measured(options.file, options.device, options.peers, tuple(filter(None, options.only.split(","))))


if __name__ == "__main__":
    main()
