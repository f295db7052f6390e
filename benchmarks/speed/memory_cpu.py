"""Gated delta attention on one CPU thread beside transformers' plain PyTorch, forward and with gradients.

OMP_NUM_THREADS=1 python benchmarks/speed/memory_cpu.py --out benchmarks/results/memory-cpu-DATE.json

One text of 4,096 tokens, 8 heads of 64, float32. What regard runs by default and its reference take turns with
`torch_chunk_gated_delta_rule` of Qwen3-Next; times are CPU time, which other processes disturb least, and ratios are
those of neighbours. Exits with 1 where a median misses its target: 1.5 forward, 3 with gradients.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next

from regard.kernels import fast, plain
from regard.mechanisms import mechanism
from regard.shapes import Mask

SIZE = (1, 8, 4096, 64)
ROUNDS = {"forward": 15, "training": 9}
TARGETS = {"forward": 1.5, "training": 3.0}
Run = Callable[[dict[str, Tensor]], Tensor]


def draw() -> dict[str, Tensor]:
    """Returns q, k and v [B,H,T,K] with keys of length one, decays a and write strengths b [B,H,T]."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *SIZE)
    a = -functional.softplus(2 * torch.randn(SIZE[:3]) - 2)
    return {"q": q, "k": functional.normalize(k, dim=-1), "v": v, "a": a, "b": torch.rand(SIZE[:3])}


def peer() -> Run:
    """Returns transformers' function, which has tokens before heads, as its inputs here do."""
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    rule = getattr(rule, "__wrapped__", rule)
    return lambda x: rule(x["q"], x["k"], x["v"], x["a"], x["b"])[0]


def seconds(run: Run, given: dict[str, Tensor], training: bool) -> float:
    """Returns the CPU time of one call, with its gradients or without."""
    tensors = {name: x.detach().requires_grad_(training) for name, x in given.items()}
    start = time.process_time()
    out = run(tensors)
    if training:
        out.sum().backward()
    return time.process_time() - start


def race(rounds: dict[str, int]) -> list[dict[str, Any]]:
    """Returns a row for each pass of what regard runs by default, and of its reference."""
    given = draw()
    turned = {name: x.transpose(1, 2).contiguous() for name, x in given.items()}
    causal = Mask(causal=True)
    theirs = peer()
    rows = []
    for what, choose in (("default", fast), ("reference", plain)):
        ours = choose(mechanism("gated-delta"))
        for name, count in rounds.items():
            training = name == "training"
            pairs = []
            for _ in range(count + 1):  # the first of each is a warm-up
                own = seconds(lambda x: ours(x["q"], x["k"], x["v"], causal, a=x["a"], b=x["b"]), given, training)  # noqa: B023
                pairs.append((own, seconds(theirs, turned, training)))
            ratios = sorted(theirs / own for own, theirs in pairs[1:])
            own, other = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
            times = {"ours_ms": round(1e3 * own, 1), "peer_ms": round(1e3 * other, 1)}
            spread = {"ratio": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
            rows.append(
                {"what": what, "pass": name, "rounds": count} | times | {k: round(x, 2) for k, x in spread.items()}
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, help="pairs of runs; 15 forward and 9 with gradients unless said")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = race(dict.fromkeys(ROUNDS, chosen.rounds) if chosen.rounds else ROUNDS)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    document = {"peer": "torch_chunk_gated_delta_rule", "size": SIZE, "versions": versions, "rows": rows}
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(document, indent=1) + "\n")
    missed = [row for row in rows if row["what"] == "default" and row["ratio"] < TARGETS[row["pass"]]]
    raise SystemExit(len(missed) > 0)


if __name__ == "__main__":
    main()
