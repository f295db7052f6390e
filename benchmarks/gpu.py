"""Measures on a GPU all that the docs say of one, piece by piece, and goes on where it was stopped.

    python benchmarks/gpu.py FOLDER [--minutes 25] [--only tests masks …] [--peers PEERS]
    python benchmarks/gpu.py FOLDER --tiny       # tries the scripts that can be tried without a GPU

Each piece is a process of its own with a limit in minutes. It writes FOLDER/NAME.json where its script has figures,
and all that it prints into FOLDER/NAME.log; FOLDER/pieces.json says which ended how. A piece that ended well is not run
again. With `--minutes`, none begins whose limit would pass them. Tests come first: the time of a kernel that is wrong
is worth nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Piece:
    """One process. command: what follows `python`; {out} is the file for its figures. tiny: it knows `--tiny`."""

    name: str
    minutes: float
    command: str
    tiny: bool = False
    peers: bool = False


PIECES = (
    Piece("tests-recurrence", 5, "-m pytest -q -m gpu tests/gpu/test_recurrence_gpu.py"),
    Piece("tests-linear", 8, "-m pytest -q -m gpu tests/gpu/test_linear_gpu.py"),
    Piece("tests-flex", 8, "-m pytest -q -m gpu tests/gpu/test_flex_gpu.py"),
    Piece("tests-decode", 5, "-m pytest -q -m gpu tests/gpu/test_decode_gpu.py tests/gpu/test_memory_gpu.py"),
    Piece("tests-train", 8, "-m pytest -q -m gpu tests/gpu/test_train_gpu.py tests/gpu/test_fsdp_gpu.py"),
    Piece("memory", 6, "benchmarks/speed/memory_gpu.py --out {out}", tiny=True),
    Piece("masks", 6, "benchmarks/speed/masks_gpu.py --out {out}", tiny=True),
    Piece("train", 6, "benchmarks/speed/train_gpu.py --out {out}", tiny=True),
    Piece("generate", 6, "benchmarks/speed/generate_gpu.py --out {out}"),
    Piece("linear", 6, "benchmarks/speed/linear_gpu.py --out {out}", peers=True),
    Piece("race", 6, "benchmarks/speed/race.py run {out}"),
    Piece("fsdp", 4, "benchmarks/speed/fsdp_gpu.py --out {out}", tiny=True),
    Piece("referee", 10, "benchmarks/reproductions/referee.py run --device cuda --seconds 570"),
)


def command_of(piece: Piece, out: Path, tiny: bool, peers: Path | None) -> list[str]:
    """Returns the words that start a piece, whose figures go to a file."""
    words = [word.replace("{out}", str(out)) for word in piece.command.split()]
    if tiny:
        words.append("--tiny")
    if piece.peers and peers is not None:
        words += ["--peers", str(peers)]
    return [sys.executable, *words]


def run_piece(piece: Piece, folder: Path, tiny: bool, peers: Path | None) -> dict[str, object]:
    """Runs one piece within its limit, its output in FOLDER/NAME.log, and returns its exit code and seconds.

    The code is 124 where the limit passed, as that of the command `timeout` is.
    """
    paths = [str(ROOT), *([str(peers)] if peers is not None else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    words = command_of(piece, folder.resolve() / f"{piece.name}.json", tiny, peers)
    start = time.monotonic()
    with (folder / f"{piece.name}.log").open("wb") as log:
        try:
            code = subprocess.run(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=60 * piece.minutes
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    return {"code": code, "seconds": round(time.monotonic() - start, 1), "tiny": tiny}


def chosen(names: list[str] | None, tiny: bool) -> list[Piece]:
    """Returns the pieces of these names, or all; of the tiny ones, those that know a tiny form."""
    known = {piece.name: piece for piece in PIECES if piece.tiny or not tiny}
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        sys.exit(f"no such piece: {', '.join(unknown)}. Expected some of {', '.join(known)}.")
    return [piece for name, piece in known.items() if names is None or name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would not end in them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these pieces")
    parser.add_argument("--peers", type=Path, help="a folder with flash-linear-attention and others unpacked")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, of the scripts that know them")
    options = parser.parse_args()
    peers = options.peers.resolve() if options.peers is not None else None
    options.folder.mkdir(parents=True, exist_ok=True)
    record = options.folder / "pieces.json"
    done = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    end = time.monotonic() + 60 * options.minutes
    for piece in chosen(options.only, options.tiny):
        before = done.get(piece.name)
        if before is not None and before["code"] == 0 and before["tiny"] == options.tiny:
            print(f"{piece.name:17} done before, in {before['seconds']} s", flush=True)
            continue
        if time.monotonic() + 60 * piece.minutes > end:
            print(f"{piece.name:17} not begun: it may take {piece.minutes:g} minutes", flush=True)
            continue
        done[piece.name] = run_piece(piece, options.folder, options.tiny, peers)
        record.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(f"{piece.name:17} exit code {done[piece.name]['code']}, {done[piece.name]['seconds']} s", flush=True)
    failed = [piece.name for piece in chosen(options.only, options.tiny) if done.get(piece.name, {}).get("code") != 0]
    if failed:
        sys.exit(f"not done: {', '.join(failed)}; what they printed is in {options.folder}/NAME.log")


if __name__ == "__main__":
    main()
