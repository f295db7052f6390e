"""Speed on a CPU, as ratios within one run: ours and the peer take turns, medians are compared.

    make bench-cpu                 # or: python benchmarks/speed/cpu.py [--save]

One thread, float32, 8 heads, width 64, causal, forward and backward, in CPU time, which other processes disturb least;
imports in seconds of a clock. Exits with 1 where a ratio misses its target.
`performer-pytorch` is needed for one row: pip install -c constraints.txt '.[peers]'.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import regard
from regard.mechanisms import fitted
from regard.shapes import Mask, Size

H, K = 8, 64
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(name: str, N: int, **options: object) -> Run:
    mechanism = fitted(name, Size(1, N, N, H, H, K, K), **options)
    return lambda q, k, v: mechanism(q, k, v, Mask(causal=True))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def performer_pytorch() -> Run | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from performer_pytorch import FastAttention
    except ImportError:
        return None
    attention = FastAttention(dim_heads=K, nb_features=256, causal=True)
    return lambda q, k, v: attention(q, k, v)


def once(run: Run, N: int) -> float:
    """Seconds of CPU time of one forward and backward pass."""
    q, k, v = (torch.randn(1, H, N, K, requires_grad=True) for _ in range(3))
    start = time.process_time()
    run(q, k, v).sum().backward()
    return time.process_time() - start


def race(a: Run, b: Run, N: int, repeats: int) -> tuple[list[float], list[float]]:
    """Times of a and b, taken in turn after one warm-up each."""
    once(a, N), once(b, N)
    times = [(once(a, N), once(b, N)) for _ in range(repeats)]
    return [t[0] for t in times], [t[1] for t in times]


def imports(repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of `import regard` and of `import torch` in fresh interpreters."""

    def run(module: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        return time.perf_counter() - start

    run("regard")
    times = [(run("regard"), run("torch")) for _ in range(repeats)]
    return [t[0] for t in times], [t[1] for t in times]


def row(what: str, peer: str, times: tuple[list[float], list[float]], target: float) -> dict[str, object]:
    mine, theirs = (statistics.median(t) for t in times)
    spread = sorted(b / a for a, b in zip(*times, strict=True))
    ratio = theirs / mine
    return {
        "what": what,
        "peer": peer,
        "ours_ms": round(1000 * mine, 1),
        "peer_ms": round(1000 * theirs, 1),
        "ratio": round(ratio, 2),
        "lowest": round(spread[0], 2),
        "highest": round(spread[-1], 2),
        "target": target,
        "reached": ratio >= target,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", metavar="NAME", help="only rows that begin so, such as elu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/cpu-DATE.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = options.repeats
    few = max(n // 2, 2)
    wide = {"features": 256}
    listed = {
        "elu, N=4096": ("SDPA", lambda: race(ours("elu", 4096), sdpa, 4096, n), 5.0),
        "performer F=256, N=16384": ("SDPA", lambda: race(ours("performer", 16384, **wide), sdpa, 16384, few), 3.0),
    }
    peer = performer_pytorch()
    if peer is None:
        print("performer-pytorch is not installed: its row is left out", file=sys.stderr)
    else:
        performer = ours("performer", 4096, **wide)
        listed["performer F=256, N=4096"] = ("performer-pytorch", lambda: race(performer, peer, 4096, few), 8.0)
    listed["import regard"] = ("import torch", lambda: imports(2 * n), 1 / 1.2)
    rows = [
        row(what, beside, run(), target)
        for what, (beside, run, target) in listed.items()
        if what.startswith(options.only)
    ]
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/speed/cpu.py",
        "versions": {"regard": regard.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": 1, "load": round(load, 1)},
        "rows": rows,
    }
    if options.save:
        folder = Path(__file__).parents[1] / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"cpu-{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{'what':26} {'peer':18} {'ours ms':>9} {'peer ms':>9} {'ratio':>7} {'lowest–highest':>16} {'target':>7}"
        )
        for r in rows:
            spread = f"{r['lowest']}–{r['highest']}"
            mark = "" if r["reached"] else "  missed"
            print(
                f"{r['what']:26} {r['peer']:18} {r['ours_ms']:>9} {r['peer_ms']:>9} {r['ratio']:>7} {spread:>16} "
                f"{r['target']:>7.2f}{mark}"
            )
    sys.exit(0 if all(r["reached"] for r in rows) else 1)


if __name__ == "__main__":
    main()
