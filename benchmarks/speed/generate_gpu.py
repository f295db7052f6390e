"""Decoding on a GPU against transformers: the same random GPT-2 weights, bf16, greedy, the same prompt.

    python benchmarks/speed/generate_gpu.py [--out FILE]

Milliseconds a token (medians of several runs, taken in turn), ratios to transformers' default `generate` and to its
compiled one with a static cache, and the share of the memory bandwidth that reading the weights once a token reaches.
Checks first that ours and theirs agree in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from twins import twin

from regard import generate


def bandwidth(device: str) -> float:
    """Bytes a second of a large copy, read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * a.numel() / statistics.median(times)


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one run, all of the device's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def raced(ways: dict[str, Callable[[], object]], tokens: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds a token of each way, taken in turn after two runs to warm up."""
    for name, run in ways.items():
        print(f"{name}: first run {seconds(run):.1f} s", flush=True)
        seconds(run)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            times[name].append(1000 * seconds(run) / tokens)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any device, to try the script")
    parser.add_argument("--out", help="also write the results as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200} if options.tiny else {}
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, **small)
    theirs = transformers.GPT2LMHeadModel(config).to(device).eval()
    ours = twin(theirs)
    prompt = torch.randint(0, config.vocab_size, (1, options.prompt), device=device)
    # Random weights give near ties, which two ways of rounding break differently: compare logits, then tokens.
    with torch.inference_mode():
        gap = float((ours(prompt) - theirs(prompt).logits).abs().max() / theirs(prompt).logits.abs().max())
    ask = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    want = theirs.generate(prompt, max_new_tokens=32, **ask)[0, options.prompt :].tolist()
    same = generate(ours, prompt[0], max_tokens=32).tokens == want
    print(f"float32: logits differ by {gap:.1e}, greedy tokens {'the same' if same else 'differ'}")
    theirs, ours = theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    new = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, **ask}
    ways = {
        "regard": lambda: generate(ours, prompt[0], max_tokens=options.tokens),
        "transformers": lambda: theirs.generate(prompt, **new),
        "transformers, compiled, static cache": lambda: theirs.generate(prompt, cache_implementation="static", **new),
    }

    times = raced(ways, options.tokens, options.repeats)
    weights = sum(p.numel() * p.element_size() for p in ours.parameters())
    mine = statistics.median(times["regard"])
    rows = []
    for name, found in times.items():
        ms = statistics.median(found)
        rows.append({"what": name, "ms": ms, "lowest": min(found), "highest": max(found), "ratio": ms / mine})
        print(f"{name:40} {ms:8.3f} ms a token ({min(found):.3f}–{max(found):.3f}), {ms / mine:6.2f}× ours")
    result = {"rows": rows, "tokens": options.tokens, "prompt": options.prompt, "float32_gap": gap, "same_tokens": same}
    if device == "cuda":
        peak = bandwidth(device)
        share = weights / (mine / 1000) / peak
        print(f"reading {weights / 1e6:.0f} MB of weights a token: {100 * share:.0f}% of {peak / 1e12:.2f} TB/s (copy)")
        result |= {"weight_bytes": weights, "copy_bytes_a_second": peak, "share": share}
        result["device"] = torch.cuda.get_device_name()
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    result["versions"]["python"] = platform.python_version()
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
