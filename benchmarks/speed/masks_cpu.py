"""Windows, packed documents and padding on one CPU thread beside the same attention without rules.

OMP_NUM_THREADS=1 python benchmarks/speed/masks_cpu.py --out benchmarks/results/masks-cpu-DATE.json

2,048 tokens as one text or as two, 8 heads of 64, float32, causal but for the last two cases, forward and with
gradients. All cases of a mechanism take turns; times are CPU time, which other processes disturb least, and a ratio is
the median over that of the case without rules. Exits with 1 where a window of 128 takes softmax more than .5 of no
window, or a rule takes it more than 1.05 of none.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from regard.mechanisms import mechanism
from regard.shapes import Mask

N, H, K = 2048, 8, 64
HIDDEN = 300  # tokens of one of two texts
NARROW = 0.5  # of no window, what a window of 128 may take
IDLE = 1.05  # of no rules, what any others may take


class Case(NamedTuple):
    """A rule, the number of texts that the tokens are, and the case beside which it is shown."""

    mask: Mask
    texts: int
    beside: str


def cases() -> dict[str, Case]:
    """Returns the rules by name."""
    one, two = "one text", "two texts"
    documents = torch.arange(N)[None]
    places = torch.arange(N // 2)
    left = places >= torch.tensor([[HIDDEN], [0]])
    right = places < torch.tensor([[N // 2 - HIDDEN], [N]])
    return {
        one: Case(Mask(causal=True), 1, one),
        "window 128": Case(Mask(causal=True, window=128), 1, one),
        "window 2048": Case(Mask(causal=True, window=N), 1, one),
        "4 documents": Case(Mask(causal=True, documents=documents // 512), 1, one),
        "64 documents": Case(Mask(causal=True, documents=documents // 32), 1, one),
        "4 documents, window 128": Case(Mask(causal=True, documents=documents // 512, window=128), 1, one),
        two: Case(Mask(causal=True), 2, two),
        "padding on the left": Case(Mask(causal=True, visible=left), 2, two),
        "padding on the right": Case(Mask(causal=True, visible=right), 2, two),
        "padding on the left, window 128": Case(Mask(causal=True, visible=left, window=128), 2, two),
        "padding on the right, window 128": Case(Mask(causal=True, visible=right, window=128), 2, two),
        "two texts, both ways": Case(Mask(), 2, "two texts, both ways"),
        "padding, both ways": Case(Mask(visible=right), 2, "two texts, both ways"),
    }


def seconds(run: Callable[..., torch.Tensor], case: Case, training: bool) -> float:
    """Returns the CPU time of one call, with its gradients or without."""
    inputs = [torch.randn(case.texts, H, N // case.texts, K, requires_grad=training) for _ in range(3)]
    start = time.process_time()
    out = run(*inputs, case.mask)
    if training:
        out.sum().backward()
    return time.process_time() - start


def measure(name: str, rounds: int) -> list[dict[str, object]]:
    """Returns a row for each case of a mechanism: milliseconds and ratios, forward and with gradients."""
    attention = mechanism(name)
    listed = cases()
    times: dict[tuple[str, bool], list[float]] = {(case, way): [] for case in listed for way in (False, True)}
    for turn in range(rounds + 1):
        for (case, training), found in times.items():
            spent = seconds(attention, listed[case], training)
            if turn > 0:  # the first is for warming up
                found.append(spent)
    median = {key: statistics.median(found) for key, found in times.items()}
    rows = []
    for name_of_case, case in listed.items():
        row: dict[str, object] = {"mechanism": name, "case": name_of_case, "beside": case.beside}
        for training, what in ((False, "forward"), (True, "both")):
            row[f"{what}_ms"] = round(1000 * median[name_of_case, training], 1)
            row[f"{what}_ratio"] = round(median[name_of_case, training] / median[case.beside, training], 2)
        rows.append(row)
    return rows


def missed(row: dict[str, object]) -> bool:
    """Returns whether softmax takes more under a rule than it may."""
    limit = NARROW if row["case"] == "window 128" else IDLE
    return row["mechanism"] == "softmax" and max(row["forward_ratio"], row["both_ratio"]) > limit  # type: ignore[type-var, operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "elu", "performer"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    busy = os.getloadavg()[0]
    rows = []
    for name in options.mechanisms:
        for row in measure(name, options.rounds):
            rows.append(row)
            mark = "  missed" if missed(row) else ""
            times = f"{row['forward_ms']:>7} {row['both_ms']:>7} ms"
            print(
                f"{name:10}{row['case']:34}{times}  {row['forward_ratio']:>5} {row['both_ratio']:>5}{mark}", flush=True
            )
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/speed/masks_cpu.py",
        "note": f"CPU time, {options.rounds} rounds in turn; the load of the machine was {busy:.0f} at the beginning",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": 1},
        "size": {"tokens": N, "heads": H, "width": K},
        "rows": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if any(missed(row) for row in rows) else 0)


if __name__ == "__main__":
    main()
