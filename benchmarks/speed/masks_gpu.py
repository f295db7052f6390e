"""Attention under the masks that people use, on a GPU: milliseconds and memory, beside SDPA and FlexAttention.

Softmax under each rule, and then other mechanisms under a causal mask. "16/4": 16 query heads, 4 key/value heads.

Each row is timed with the host, in turn with the others: the median of several rounds, forward and with gradients.
`--tiny` tries the script anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from regard.mechanisms import Softmax, mechanism
from regard.shapes import Mask

H, K = 16, 64


def _inputs(B: int, N: int, device: str, dtype: torch.dtype, G: int = H) -> list[torch.Tensor]:
    """Returns q, k and v with G key/value heads."""
    return [torch.randn(B, n, N, K, device=device, dtype=dtype, requires_grad=device == "cuda") for n in (H, G, G)]


def _padding(B: int, N: int, device: str) -> torch.Tensor:
    """Returns rows of which between a quarter and nothing is padding on the right."""
    lengths = torch.linspace(N * 3 // 4, N, B, device=device).long()
    return torch.arange(N, device=device) < lengths[:, None]


def _cases(B: int, N: int, device: str) -> dict[str, object]:
    """Returns a function of (q, k, v) for each row of the table."""
    compiled = torch.compile(flex_attention) if device == "cuda" else flex_attention
    softmax = Softmax()
    visible = _padding(B, N, device)
    documents = (torch.arange(N, device=device) // (N // 8)).expand(B, -1).contiguous()
    slopes = 2.0 ** -torch.arange(1, H + 1, device=device).float()

    def rule(**fields: object) -> object:
        mask = Mask(causal=True, **fields)  # type: ignore[arg-type]
        return lambda q, k, v: softmax(q, k, v, mask)

    def other(name: str, **options: object) -> object:
        built = mechanism(name, **options).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
        return lambda q, k, v: built(q, k, v, Mask(causal=True))

    def peer(mask_mod: object, score_mod: object = None, per_row: bool = False) -> object:
        blocks = create_block_mask(mask_mod, B if per_row else None, None, N, N, device=device)  # type: ignore[arg-type]
        return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=blocks)

    def causal(b, h, i, j):
        return i >= j

    cases = {
        "SDPA causal": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "regard causal": rule(),
        "FlexAttention causal": peer(causal),
        "regard padding": rule(visible=visible),
        "regard window 256": rule(window=256),
        "FlexAttention window 256": peer(lambda b, h, i, j: (i >= j) & (i - j < 256)),
        f"regard window {N}": rule(window=N),
        "regard documents": rule(documents=documents),
        "FlexAttention documents": peer(lambda b, h, i, j: (i >= j) & (documents[b, i] == documents[b, j]), None, True),
        "regard slopes": rule(slopes=slopes),
        "FlexAttention slopes": peer(causal, lambda s, b, h, i, j: s - slopes[h] * (i - j)),
        "regard softcap 50": rule(softcap=50.0),
        "FlexAttention softcap 50": peer(causal, lambda s, b, h, i, j: 50 * torch.tanh(s / 50)),
        "regard argmax": other("argmax"),
        "regard argmax, straight-through": other("argmax", gradient="straight_through"),
        "regard quadratic": other("quadratic"),
        "regard elu": other("elu"),
        "regard elu 16/4": other("elu"),
        "regard performer": other("performer", features=256, width=K),
    }
    if N <= 4096:
        bias = torch.randn(1, H, N, N, device=device, dtype=torch.bfloat16)
        cases["regard bias"] = rule(bias=bias)
        cases["FlexAttention bias"] = peer(causal, lambda s, b, h, i, j: s + bias[0, h, i, j])
    return cases


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _measure(run, inputs: list[torch.Tensor], gradients: bool, device: str, repeats: int) -> float:
    """Returns milliseconds of one call, the host included."""
    _sync(device)
    start = time.perf_counter()
    for _ in range(repeats):
        if gradients:
            out = run(*inputs)
            torch.autograd.grad(out, inputs, inputs[0].detach(), allow_unused=True)
        else:
            with torch.no_grad():
                run(*inputs)
    _sync(device)
    return (time.perf_counter() - start) / repeats * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="these cases only, by name")
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 16384], help="of 32,768 tokens in all")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    torch._dynamo.config.recompile_limit = 64  # one script compiles more rules than a program would
    sizes = [(2, 256)] if options.tiny else [(32768 // N, N) for N in options.lengths]
    rows = []
    for B, N in sizes:
        dtype = torch.float32 if options.tiny else torch.bfloat16
        with_heads = {G: _inputs(B, N, device, dtype, G) for G in (H, 4)}
        cases = {n: c for n, c in _cases(B, N, device).items() if not options.only or n in options.only}
        times: dict[tuple[str, bool], list[float]] = {}
        peak: dict[str, float] = {}
        for name, run in list(cases.items()):
            inputs = with_heads[4 if "16/4" in name else H]
            try:
                _measure(run, inputs, False, device, 2)
                if not options.tiny:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    _measure(run, inputs, True, device, 2)
                    peak[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
            except Exception as error:
                print(f"{name}, N = {N}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                del cases[name]
                if not options.tiny:
                    torch.cuda.empty_cache()
        for _ in range(options.rounds):
            for name, run in cases.items():
                inputs = with_heads[4 if "16/4" in name else H]
                for gradients in (False, True):
                    if gradients and options.tiny:
                        continue
                    found = _measure(run, inputs, gradients, device, 5)
                    times.setdefault((name, gradients), []).append(found)
        for name in cases:
            row = {"case": name, "B": B, "N": N, "forward_ms": statistics.median(times[name, False])}
            if (name, True) in times:
                row["both_ms"] = statistics.median(times[name, True])
                row["peak_gb"] = peak[name]
            rows.append(row)
            both = f"{row.get('both_ms', float('nan')):8.3f}"
            print(f"{name:32s} {B:3d} {N:6d} {row['forward_ms']:8.3f} {both} {peak.get(name, 0):7.2f} GB", flush=True)
            if options.out:
                machine = torch.cuda.get_device_name() if not options.tiny else "cpu"
                result = {"machine": machine, "torch": torch.__version__, "heads": H, "width": K, "rows": rows}
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
