"""Times on a CPU against what the cost model predicts of them: regard.cost.floor and regard.cost.predicted.

    OMP_NUM_THREADS=1 python benchmarks/speed/predicted.py --out benchmarks/results/predicted-cpu-DATE.json
    python benchmarks/speed/predicted.py --docs

The second writes the tables of docs/cost.md from the newest results, without running anything.

Each row is run in turn with a large product, element-wise work and a copy, so that whatever else the machine does slows
the device of the model as it slows what is measured; of each the shortest time counts. The time is that of the one
thread, without the time that it waits for a core.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch

import regard
from regard import GPT, Size, cost
from regard.cost import crossing
from regard.cost.crossing import face_runner
from regard.cost.devices import elementwise
from regard.cost.formulas import QUANTITIES, formula
from regard.cost.timing import shortest_times
from regard.mechanisms import fitted

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "cost.md"
CPU = torch.device("cpu")
SIDE, COPIED, ELEMENTS = 1024, 1 << 24, 1 << 16


@dataclass(frozen=True)
class Row:
    """Something to run, and what it is said to cost."""

    what: str
    cost: cost.Cost
    run: Callable[[], object]


def mechanisms() -> Iterator[Row]:
    for name in ("softmax", "argmax", "elu", "quadratic", "performer", "synthesizer"):
        for N in (256, 1024, 4096):
            if N == 4096 and name in ("argmax", "synthesizer", "quadratic"):
                continue
            size = Size(1, N, N, 8, 8, 16 if name == "quadratic" else 64, 64)
            for training in (False, True):
                if training and N == 4096:
                    continue
                made = fitted(name, size)
                what = f"{name}, N = {N:,}" + (", with gradients" if training else "")
                yield Row(what, cost.of(made, size, training=training), face_runner(made, size, training=training))
    for name in ("softmax", "elu", "performer"):
        for S in (1024, 16384):
            size = Size(1, 1, S, 8, 8, 64, 64)
            made = fitted(name, size)
            yield Row(
                f"{name}, one token of {S:,}", cost.of(made, size, "recurrent"), face_runner(made, size, "recurrent")
            )


def models() -> Iterator[Row]:
    char = GPT.preset("char")
    tokens = torch.randint(256, (8, 129))
    total = char.summary(128, B=8).total
    yield Row("GPT char, B = 8, T = 128", total.whole, torch.no_grad()(lambda: char(tokens[:, :-1])))

    def step() -> None:
        char.zero_grad()
        char.loss(tokens[:, :-1], tokens[:, 1:]).backward()

    yield Row("GPT char, B = 8, T = 128, with gradients", total.training, step)
    with torch.no_grad():
        gpt2 = GPT.preset("gpt2").eval()
        prompt = torch.randint(50257, (1, 512))
        yield Row("GPT gpt2, T = 512", gpt2.summary(512).total.whole, torch.no_grad()(lambda: gpt2(prompt)))
        _, state = gpt2.prefill(prompt[:, :-1], None, 1)
        one = gpt2.summary(512).total.step
        yield Row("GPT gpt2, one token of 512", one, torch.no_grad()(lambda: gpt2.extend(prompt[:, -1:], state)))


def measured(row: Row, seconds: float) -> dict[str, object]:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    source, small = torch.ones(COPIED), torch.randn(ELEMENTS)
    target = torch.empty_like(source)
    rates = [lambda: a @ b, elementwise(small), lambda: target.copy_(source)]
    taken, product, rest, copy = shortest_times([row.run, *rates], CPU, seconds, rounds=5, clock=thread_time)
    device = cost.Device(
        "cpu", {torch.float32: 2 * SIDE**3 / product}, 2 * source.nbytes / copy, 5 * ELEMENTS / rest, measured=True
    )
    floor, predicted = (f(row.cost, device, torch.float32) for f in (cost.floor, cost.predicted))
    return {
        "what": row.what,
        "ms": round(1e3 * taken, 4),
        "floor_ms": round(1e3 * floor, 4),
        "predicted_ms": round(1e3 * predicted, 4),
        "ratio": round(taken / predicted, 3),
        "product_flops_a_second": round(device.flops[torch.float32]),
        "copy_bytes_a_second": round(device.bandwidth),
        "elementwise_flops_a_second": round(device.elements),
    }


def crossings() -> dict[str, dict[str, int | None]]:
    """From how many tokens on performer and elu beat softmax: by the floors, as predicted, by the clock."""
    found, device = {}, cost.measured_device("cpu", (torch.float32,))
    for name in ("performer", "elu"):
        given = (crossing.named(name), crossing.named("softmax"), Size(1, 1, 1, 8, 8, 64, 64))
        found[name] = {
            "floor": crossing.modelled(*given, device).tokens,
            "predicted": crossing.modelled(*given, device, time=cost.predicted).tokens,
            "measured": crossing.measured(*given, longest=8192).tokens,
        }
        print(name, found[name])
    return found


def newest(name: str) -> dict[str, Any]:
    """The latest results of a benchmark."""
    found: dict[str, Any] = json.loads(sorted(RESULTS.glob(f"{name}-*.json"))[-1].read_text(encoding="utf-8"))
    return found


def on_h200() -> Iterator[list[str]]:
    """Linear attention on an H200 as linear_gpu.py measured it, beside what its maker's figures predict."""
    device = cost.device("H200")
    for row in newest("linear-h200")["rows"]:
        if row["what"] != "regard":
            continue
        B, N, name = row["B"], row["N"], row["mechanism"]
        size = Size(B, N, N, 16, 16, 64, 64, row["causal"], torch.bfloat16)
        for training, key in ((False, "forward_device_ms"), (True, "both_device_ms")):
            one = cost.of(name, size, training=training)
            low, high = (1e3 * f(one, device, size.dtype) for f in (cost.floor, cost.predicted))
            what = f"{name}, B = {B}, N = {N:,}{'' if row['causal'] else ', not causal'}"
            yield cells(what + (", with gradients" if training else ""), row[key], low, high)


def cells(what: str, ms: float, low: float, high: float) -> list[str]:
    ratio = ms / high
    return [what, *(f"{x:.3g}" for x in (ms, low, high)), f"{ratio:.2f}" if 0.5 <= ratio <= 2 else f"**{ratio:.2f}**"]


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables() -> dict[str, str]:
    """The tables of docs/cost.md by name: formulas, and times beside what is predicted."""
    size, made = Size(1, 8, 8, 2, 2, 4, 4), {}
    for kind in ("parallel", "training", "recurrent", "step"):
        rows = ([f"`{n}`", *formula(fitted(n, size), kind).values()] for n in regard.mechanisms())
        made[kind] = markdown(["", *QUANTITIES], rows).replace("--:", "---")
    orders = ([f"`{n}`", m.order, m.memory, m.training_memory] for n, m in regard.mechanisms().items())
    made["orders"] = markdown(["", "time", "state of a decoder", "memory in training"], orders).replace("--:", "---")
    head = ["", "measured, ms", "floor", "predicted", "measured / predicted"]
    cpu = newest("predicted-cpu")
    made["cpu"] = markdown(head, (cells(r["what"], r["ms"], r["floor_ms"], r["predicted_ms"]) for r in cpu["rows"]))
    made["h200"] = markdown(head, on_h200())
    head = ["tokens from which it beats softmax", "by the floors", "predicted", "by the clock"]
    crossed = ([f"`{n}`", *(f"{x:,}" if x else "none" for x in c.values())] for n, c in cpu["crossings"].items())
    made["crossings"] = markdown(head, crossed)
    return made


def filled(page: str) -> str:
    """A page with its tables as they should be: each stands between `<!-- name -->` and `<!-- end -->`."""
    for name, text in tables().items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        page = f"{before}{mark}\n{text}\n{rest[rest.index('<!-- end -->') :]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--docs", action="store_true", help="only write the tables of docs/cost.md")
    given = parser.parse_args()
    if given.docs:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    rows = []
    for source in (mechanisms(), models()):
        for row in source:
            if given.only in row.what:
                rows.append(measured(row, given.seconds))
                print(
                    "{what:40} {ms:10.3f} ms  floor {floor_ms:10.3f}  predicted {predicted_ms:10.3f}  ×{ratio}".format(
                        **rows[-1]
                    )
                )
    within = sum(0.5 <= r["ratio"] <= 2 for r in rows)
    print(f"{within} of {len(rows)} within a factor of two")
    document = {
        "date": str(date.today()),
        "command": "OMP_NUM_THREADS=1 python benchmarks/speed/predicted.py",
        "versions": {"regard": regard.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "device": {k: median(r[k] for r in rows) for k in rows[0] if k.endswith("a_second")},
        "crossings": crossings(),
        "rows": rows,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
