"""Decoding on a GPU against transformers: the same random GPT-2 weights, bf16, greedy, the same prompts.

    python benchmarks/speed/generate_gpu.py [--out FILE] [--batches 1 8 64]

For each batch: milliseconds a step (medians of several runs of `generate`, taken in turn, prompts included), the ratio
to transformers' compiled `generate` with a static cache, the share of the copy speed at which the weights are read once
a step, the time that the host takes to start a step, and that of the step's graph on the device alone. Before them, one
step of attention alone against PyTorch's scaled_dot_product_attention, each replayed as a CUDA graph, and the host's
time of a call outside a graph.
Checks first that ours and theirs agree in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional
from twins import twin

from regard import generate
from regard.generate.decode import DecodingLoop
from regard.generate.sampler import Sampler
from regard.generate.settings import Settings
from regard.mechanisms import mechanism
from regard.models import GPT
from regard.shapes import Size

# Sequences, query heads, key/value heads, keys: of width 64
STEPS = {
    "multi-head, batch 1, 4k": (1, 16, 16, 4096),
    "multi-head, batch 64, 1k": (64, 16, 16, 1024),
    "grouped, batch 8, 4k": (8, 16, 4, 4096),
    "multi-query, batch 1, 1k": (1, 16, 1, 1024),
    "multi-query, batch 1, 64k": (1, 16, 1, 65536),
    "multi-query, batch 8, 8k": (8, 16, 1, 8192),
    "multi-query, batch 64, 1k": (64, 16, 1, 1024),
}


def copy_speed() -> float:
    """Returns the bytes a second of a large copy, read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (milliseconds(lambda: b.copy_(a), 12) / 1000)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Returns the median milliseconds of a run on the device."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def seconds(run: Callable[[], object]) -> float:
    """Returns the seconds of one run, all of the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def raced(ways: dict[str, Callable[[], object]], tokens: int, repeats: int) -> dict[str, list[float]]:
    """Returns the milliseconds a step of each way, taken in turn after two runs to warm up."""
    for run in ways.values():
        seconds(run)
        seconds(run)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            times[name].append(1000 * seconds(run) / tokens)
    return times


def time_step(model: GPT, prompts: list[list[int]], steps: int = 100) -> dict[str, float]:
    """Returns the host's time to start one step while the device works on those before, and the device's alone."""
    limits = [2 * steps] * len(prompts)
    streams = [0] * len(prompts)
    sampler = Sampler(Settings(max_tokens=2 * steps), limits, streams, 0, None, frozenset(), None, model.device)
    loop = DecodingLoop(model, prompts, sampler)
    for _ in range(steps // 2):
        loop.advance()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loop.advance()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    assert loop.graph is not None
    return {"host_us": elapsed / steps * 1e6, "device_ms": milliseconds(loop.graph.graph.replay, 30)}


def race_models(theirs: Any, ours: GPT, B: int, options: argparse.Namespace, speed: float) -> dict[str, Any]:
    """Returns one row of the table: a batch of B prompts."""
    prompts = torch.randint(0, theirs.config.vocab_size, (B, options.prompt), device="cuda")
    new = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False, "pad_token_id": 0}
    new["attention_mask"] = torch.ones_like(prompts)
    ways = {
        "regard": lambda: generate(ours, prompts, max_tokens=options.tokens),
        "transformers": lambda: theirs.generate(prompts, cache_implementation="static", **new),
    }
    times = raced(ways, options.tokens, options.repeats)
    mine = statistics.median(times["regard"])
    weights = sum(p.numel() * p.element_size() for p in ours.parameters())
    return {
        "batch": B,
        **{
            name: {"ms": statistics.median(found), "lowest": min(found), "highest": max(found)}
            for name, found in times.items()
        },
        "ratio": statistics.median(times["transformers"]) / mine,
        "share": weights / (mine / 1000) / speed,
        **time_step(ours, prompts.tolist()),
    }


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Returns a run as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@torch.inference_mode()
def race_attention(B: int, H: int, G: int, S: int) -> dict[str, float]:
    """Returns the microseconds of one step of attention over S keys, ours and PyTorch's, and the host's of ours."""
    softmax = mechanism("softmax")
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    q = torch.randn(B, H, 1, 64, **half)
    k, v = (torch.randn(B, G, S, 64, **half) for _ in range(2))
    empty = softmax.empty(Size(B=B, H=H, G=G, K=64, V=64, S=S, **half))
    state = softmax.write(empty, k[:, :, 1:], v[:, :, 1:])
    new_k, new_v = k[:, :, :1], v[:, :, :1]
    ours = captured(lambda: softmax.extend(q, new_k, new_v, state))
    theirs = captured(lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=G != H))
    found: dict[str, list[float]] = {"regard": [], "sdpa": []}
    for _ in range(5):
        found["regard"].append(1000 * milliseconds(ours.replay, 20))
        found["sdpa"].append(1000 * milliseconds(theirs.replay, 20))
    for _ in range(20):
        softmax.extend(q, new_k, new_v, state)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        softmax.extend(q, new_k, new_v, state)
    host = (time.perf_counter() - start) / 200 * 1e6
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in found.items()} | {"host_us": host}


def check_equal(theirs: Any, ours: GPT) -> tuple[float, bool]:
    """Returns by how much float32 logits differ, relative to the largest, and whether greedy tokens are the same."""
    prompt = torch.randint(0, theirs.config.vocab_size, (1, 32), device="cuda")
    with torch.inference_mode():
        want = theirs(prompt).logits
        gap = float((ours(prompt) - want).abs().max() / want.abs().max())
    ask = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    tokens = theirs.generate(prompt, max_new_tokens=32, **ask)[0, 32:].tolist()
    return gap, generate(ours, prompt[0], max_tokens=32).tokens == tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--out", help="also write the results as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=None, eos_token_id=None)).cuda().eval()
    ours = twin(theirs)
    gap, same = check_equal(theirs, ours)
    print(f"float32: logits differ by {gap:.1e}, greedy tokens {'the same' if same else 'differ'}")
    theirs, ours = theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    speed = copy_speed()
    steps = {}
    print(f"\nµs of a step of attention{'':10} {'regard':>8} {'SDPA':>8} {'host µs':>8}")
    for name, sizes in STEPS.items():
        found = race_attention(*sizes)
        steps[name] = found
        print(f"{name:35} {found['regard']:8.1f} {found['sdpa']:8.1f} {found['host_us']:8.0f}", flush=True)
    print(f"\nms a step; copy speed {speed / 1e12:.2f} TB/s")
    print(f"{'batch':>6} {'regard':>8} {'transformers':>12} {'ratio':>7} {'share':>7} {'host µs':>8} {'device ms':>10}")
    rows = []
    for B in options.batches:
        row = race_models(theirs, ours, B, options, speed)
        rows.append(row)
        print(
            f"{B:6} {row['regard']['ms']:8.3f} {row['transformers']['ms']:12.3f} {row['ratio']:6.2f}× "
            f"{row['share']:7.0%} {row['host_us']:8.0f} {row['device_ms']:10.3f}",
            flush=True,
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    result = {"rows": rows, "steps": steps, "tokens": options.tokens, "prompt": options.prompt, "float32_gap": gap}
    result |= {"same_tokens": same, "copy_bytes_a_second": speed, "device": torch.cuda.get_device_name()}
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result | {"versions": versions}, file, indent=2)


if __name__ == "__main__":
    main()
