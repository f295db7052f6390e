"""Retention, gated and delta attention on a GPU: each kernel of regard beside the reference and the peers' own calls.

Milliseconds with the host, in turn with each other, forward and with gradients, the median of several rounds; and one
more token as a CUDA graph. Then steps of training a language model of 124 million parameters, softmax alone beside
three layers of gated delta attention to one of softmax, at 1,024 and 8,192 tokens. `--tiny` tries the script anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import KernelError
from regard.kernels import fast, plain, registered
from regard.mechanisms import GatedDelta, Memory, Recurrence, mechanism
from regard.models import GPT
from regard.shapes import Mask, Size

NAMES = ["retention", "gated", "delta", "gated-delta"]
Run = Callable[..., Tensor]


def draw(B: int, H: int, T: int, width: int, device: str) -> dict[str, Tensor]:
    """Returns q, k and v [B,H,T,width] with keys of length one, decays a and write strengths b [B,H,T]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, width, device=device) for _ in range(3))
    a = functional.logsigmoid(torch.randn(B, H, T, device=device) + 3)
    b = torch.rand(B, H, T, device=device)
    given = {"q": q, "k": functional.normalize(k, dim=-1), "v": v}
    given = {name: x.bfloat16() for name, x in given.items()} | {"a": a, "b": b}
    return {name: x.requires_grad_() for name, x in given.items()}


def contenders(name: str) -> dict[str, Recurrence]:
    """Returns the reference and each kernel that is registered, by name."""
    found: dict[str, Recurrence] = {"reference": plain(mechanism(name, checks=False))}
    for kernel in registered(type(found["reference"]))["parallel"]:
        if kernel.device != "cpu":
            found[kernel.name] = fast(mechanism(name, checks=False), kernel.name)
    return found


def peers(name: str) -> dict[str, Run]:
    """Returns calls of flash-linear-attention by itself; it has tokens before heads, so its inputs are made so."""
    if find_spec("fla") is None:
        return {}
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.retention import chunk_retention
    from fla.ops.simple_gla import chunk_simple_gla

    calls = {
        "retention": lambda q, k, v, a, b: chunk_retention(q, k, v)[0],
        "gated": lambda q, k, v, a, b: chunk_simple_gla(q, k, v, g=a)[0],
        "delta": lambda q, k, v, a, b: chunk_delta_rule(q, k, v, b.to(q.dtype))[0],
        "gated-delta": lambda q, k, v, a, b: chunk_gated_delta_rule(q, k, v, a, b.to(q.dtype))[0],
    }
    return {"fla by itself": calls[name]}


def seconds(run: Run, given: dict[str, Tensor], gradients: bool, repeats: int) -> float:
    """Returns the seconds of one call, the host included."""
    inputs = list(given.values())
    device = inputs[0].device
    direction = None
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        with torch.set_grad_enabled(gradients):
            out = run(**given)
        if gradients:
            if direction is None:
                direction = torch.ones_like(out)
            torch.autograd.grad(out, inputs, direction, allow_unused=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def sequence_rows(name: str, sizes: tuple[int, int, int, int], device: str, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each contender over a whole sequence."""
    given = draw(*sizes, device)
    turned = {n: x.detach().transpose(1, 2).contiguous().requires_grad_() for n, x in given.items()}
    runs: dict[str, tuple[Run, dict[str, Tensor]]] = {}
    for what, m in contenders(name).items():
        needs = [letter for letter in "ab" if letter in m.needs]

        def run(q: Tensor, k: Tensor, v: Tensor, *, m: Any = m, needs: Any = needs, **gates: Tensor) -> Tensor:
            out: Tensor = m(q, k, v, Mask(causal=True), **{n: gates[n] for n in needs})
            return out

        runs[what] = (run, given)
    for what, call in peers(name).items():
        runs[what] = (call, turned)
    times: dict[tuple[str, bool], list[float]] = {}
    for what in list(runs):
        try:
            for gradients in (False, True):
                seconds(*runs[what], gradients, 2)
        except (KernelError, RuntimeError, torch.cuda.OutOfMemoryError) as error:
            print(f"{name}, {what}: {str(error)[:200]}", flush=True)
            del runs[what]
    for _ in range(rounds):
        for what, (call, inputs) in runs.items():
            for gradients in (False, True):
                times.setdefault((what, gradients), []).append(seconds(call, inputs, gradients, 3))
    rows = []
    for what in runs:
        forward = statistics.median(times[what, False]) * 1e3
        both = statistics.median(times[what, True]) * 1e3
        rows.append({"mechanism": name, "what": what, "forward_ms": forward, "both_ms": both})
        print(f"{name:12s} {what:14s} {forward:9.3f} {both:9.3f} ms", flush=True)
    return rows


def token_rows(name: str, B: int, H: int, width: int, device: str) -> list[dict[str, Any]]:
    """Returns a row for each contender for one more token, as a CUDA graph where there is a GPU."""
    given = {n: x.detach() for n, x in draw(B, H, 1, width, device).items()}
    rows = []
    for what, m in contenders(name).items():
        gates = {n: given[n] for n in "ab" if n in m.needs}
        state = m.empty(Size(B=B, H=H, G=H, K=width, V=width, dtype=torch.bfloat16, device=device))

        def step(m: Any = m, gates: Any = gates, state: Memory = state) -> Any:
            with torch.no_grad():
                return m.extend(given["q"], given["k"], given["v"], state, **gates)

        try:
            step()
            found = graph_seconds(step) if device == "cuda" else timed(step, 5)
        except (KernelError, RuntimeError) as error:
            print(f"{name}, {what}, one token: {str(error)[:200]}", flush=True)
            continue
        rows.append({"mechanism": name, "what": what, "token_us": found * 1e6})
        print(f"{name:12s} {what:14s} one token {found * 1e6:9.2f} µs", flush=True)
    return rows


def hybrid(T: int, tiny: bool, mechanisms: list[str]) -> GPT:
    """Returns a language model of GPT-2's size for T tokens, with a pattern of mechanisms."""
    sizes = {"vocabulary": 50304, "width": 768, "layers": 12}
    heads = 12
    if tiny:
        sizes = {"vocabulary": 65, "width": 32, "layers": 4}
        heads = 2
    attention: dict[str, Any] = {"heads": heads}
    if "gated-delta" in mechanisms:
        own = {"qk_norm": "l2", "convolution": {"width": 4}, "output": {"norm": True}}
        attention["by_mechanism"] = {"gated-delta": own}
    return GPT(
        **sizes,
        length=T,
        mechanism=mechanisms,
        position="rotary",
        attention=attention,
        block={"norm": "rms", "bias": False},
    )


def training_rows(T: int, batch: int, device: str, rounds: int, tiny: bool) -> list[dict[str, Any]]:
    """Returns a row for softmax and for each kernel of the hybrid: milliseconds of a step, AdamW included, in turn."""
    pattern = ["gated-delta", "gated-delta", "gated-delta", "softmax"]
    kernels = [None, "plain", *(k.name for k in registered(GatedDelta)["parallel"] if k.device != "cpu")]
    steps: dict[str, Callable[[], None]] = {}
    for kernel in kernels:
        torch.manual_seed(0)
        names = ["softmax"] if kernel is None else pattern
        what = "softmax" if kernel is None else f"hybrid, {kernel}"
        model = hybrid(T, tiny, names).to(device)
        if kernel is not None:
            fast(model, {"gated-delta": kernel})
        steps[what] = training_step(model, torch.randint(0, 65, (batch, T), device=device))
    times: dict[str, list[float]] = {}
    for what in list(steps):
        try:
            timed(steps[what], 2)
        except (KernelError, RuntimeError, torch.cuda.OutOfMemoryError) as error:
            print(f"T = {T}, {what}: {str(error)[:200]}", flush=True)
            del steps[what]
    for _ in range(rounds):
        for what, step in steps.items():
            times.setdefault(what, []).append(timed(step, 3))
    rows = []
    for what, found in times.items():
        rows.append({"T": T, "batch": batch, "what": what, "step_ms": statistics.median(found) * 1e3})
        print(f"T = {T:5d} {what:22s} {rows[-1]['step_ms']:9.2f} ms a step", flush=True)
    return rows


def training_step(model: GPT, tokens: Tensor) -> Callable[[], None]:
    """Returns one step of training in bfloat16 by autocast, waited for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    targets = tokens.roll(-1, 1)

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize()

    return step


def timed(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def graph_seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds of one replay of what a function does, captured as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=NAMES, help="these mechanisms only")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda"
    sizes = (2, 16, 16384, 128)
    rounds = options.rounds
    if options.tiny:
        device = "cpu"
        sizes = (1, 2, 130, 16)
        rounds = 1
    trained = [(1024, 16), (8192, 2)]
    if options.tiny:
        trained = [(70, 2)]
    machine = "cpu" if options.tiny else torch.cuda.get_device_name()
    result: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "B, H, T, width": sizes, "rows": []}

    def keep(rows: list[dict[str, Any]]) -> None:
        result["rows"] += rows
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for name in options.only:
        keep(sequence_rows(name, sizes, device, rounds))
        keep(token_rows(name, 1, sizes[1], sizes[3], device))
    for T, batch in trained:
        keep(training_rows(T, batch, device, rounds, options.tiny))


if __name__ == "__main__":
    main()
