"""Linear attention on a GPU against its peers: bf16, 16 heads, width 64, 32,768 tokens in all (65,536 at N = 64k).

    python benchmarks/speed/linear_gpu.py [--peers FOLDER] [--only regard] [--out FILE]

Milliseconds forward and forward + backward: medians by CUDA events with the cache emptied between calls ("ms", what a
program sees that launches one call after the other), and by replaying a CUDA graph ("device_ms", without the host);
peak memory above the inputs; and the floor, the larger of bytes over the speed of a copy and FLOPs over that of a large
matrix product, both measured here. Peers (flash-linear-attention, performer-pytorch) are timed where they can be
imported, from FOLDER first. Checks first that regard's kernels agree with its reference.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

import regard
from regard.mechanisms import Mechanism
from regard.shapes import Mask

H, D, F = 16, 64, 256
SIZES = {1024: 32, 4096: 8, 16384: 2, 65536: 1}
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
CASES: list[tuple[str, bool, tuple[int, ...]]] = [
    ("elu", True, (1024, 4096, 16384, 65536)),
    ("elu", False, (16384,)),
    ("performer", True, (1024, 4096, 16384, 65536)),
    ("performer", False, (4096, 16384)),
    ("fourier", True, (4096, 16384)),
]


def milliseconds(run: Callable[[], object], flush: Tensor) -> float:
    """Median time of a call that finds nothing in the cache."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(5, min(15, int(0.3 / (time.perf_counter() - began))))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def graph(run: Callable[[], object]) -> Callable[[], object]:
    """Captures the work in a CUDA graph and returns what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        run()
    return made.replay


def timed(attend: Run, inputs: list[Tensor], flush: Tensor, graphs: bool) -> dict[str, float]:
    """Forward and forward + backward of one way to attend."""
    direction = torch.randn_like(attend(*inputs))

    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def both() -> None:
        for x in inputs:
            x.grad = None
        attend(*inputs).backward(direction)

    found = {}
    for name, run in (("forward", forward), ("both", both)):
        found[f"{name}_ms"] = milliseconds(run, flush)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        found[f"{name}_peak_MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
        for x in inputs:
            x.grad = None
    if not graphs:
        return found
    return found | {f"{n}_device_ms": milliseconds(graph(r), flush) for n, r in (("forward", forward), ("both", both))}


def floors(name: str, causal: bool, tokens: int, copy: float, product: float) -> dict[str, float]:
    """The least a device must do: each input read and each output written once, and the matrix products of the causal
    half in chunks of 64. Backward: three times the FLOPs in all, eleven tensors moved instead of four."""
    features = {"elu": D, "performer": F, "fourier": 2 * F}[name]
    flops = 4 * features * (D + 1) + (64 * (features + D) if causal else 0) + (0 if name == "elu" else 4 * D * F)
    moved = 2 * tokens * H * 4 * D
    return {
        "forward_floor_ms": 1e3 * max(tokens * H * flops / product, moved / copy),
        "both_floor_ms": 1e3 * max(3 * tokens * H * flops / product, moved * 11 / 4 / copy),
    }


def ceilings(flush: Tensor) -> tuple[float, float]:
    """Bytes a second of a large copy, FLOPs a second of a large product."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.numel() / milliseconds(lambda: b.copy_(a), flush) * 1e3
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copy, 2 * 8192**3 / milliseconds(lambda: x @ x, flush) * 1e3


def made(name: str) -> Mechanism:
    """Returns the mechanism in bfloat16, its random directions too, as it stands in a model."""
    options = {} if name == "elu" else {"features": F, "width": D}
    return regard.mechanism(name, **options).to("cuda", torch.bfloat16)


def ours(name: str, causal: bool) -> Run:
    mechanism = made(name)
    fast = regard.kernels.fast(mechanism, "triton")
    return lambda q, k, v: fast(q, k, v, Mask(causal=causal))


def peers(name: str, causal: bool, N: int) -> dict[str, Run]:
    """Those that can be imported. fla wants heads third, features already made."""
    found: dict[str, Run] = {}
    if name == "performer" and (not causal or N == 4096):  # its causal time hardly depends on N, and is long
        try:
            from performer_pytorch.performer_pytorch import FastAttention

            found["performer-pytorch"] = FastAttention(D, nb_features=F, causal=causal).cuda()
        except ImportError as error:
            print(f"performer-pytorch: {error}")
    if not causal or name == "fourier":
        return found
    try:
        from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn
    except ImportError as error:
        print(f"flash-linear-attention: {error}")
        return found
    if name == "elu":  # their features come for nothing
        for label, call in (("fla chunk", chunk_linear_attn), ("fla fused chunk", fused_chunk_linear_attn)):
            found[label] = lambda q, k, v, call=call: call(q, k, v, normalize=True)[0]
        return found
    w = torch.randn(F, D, device="cuda", dtype=torch.bfloat16)

    def positive(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = x * D**-0.25
        y = x @ w.T - x.float().square().sum(-1, keepdim=True).to(x.dtype) / 2
        return torch.exp(y - y.amax(axes, keepdim=True).detach()) + 1e-4

    found["features in torch, fla chunk"] = lambda q, k, v: chunk_linear_attn(
        positive(q, (3,)), positive(k, (1, 3)), v, scale=1.0, normalize=True
    )[0]
    return found


def agrees(name: str, causal: bool) -> float:
    """Largest error of the kernel against the reference in float64, relative to the largest output."""
    mechanism = made(name)
    q, k, v = (torch.randn(1, 4, 1031, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fast = regard.kernels.fast(mechanism, "triton")(q, k, v, Mask(causal=causal)).double()
    want = regard.kernels.plain(mechanism)(q.double(), k.double(), v.double(), Mask(causal=causal))
    return float((fast - want).abs().max() / want.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="a folder with the peers unpacked")
    parser.add_argument("--only", default="", help="'regard' leaves the peers out, 'elu' all other mechanisms")
    parser.add_argument("--out", help="also write the results as JSON")
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, options.peers)
    torch.manual_seed(0)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    copy, product = ceilings(flush)
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    for name, causal, lengths in CASES:
        if options.only not in ("", "regard", name):
            continue
        print(f"{name}, {'causal' if causal else 'full'}: error {agrees(name, causal):.1e}")
        for N in lengths:
            B = SIZES[N]
            ways = {"regard": ours(name, causal)} | ({} if options.only == "regard" else peers(name, causal, N))
            for label, attend in ways.items():
                shape = (B, N, H, D) if "fla" in label else (B, H, N, D)
                inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
                if "fla" in label and name == "elu":
                    inputs[:2] = [torch.nn.functional.elu(x) + 1 for x in inputs[:2]]
                row = {"mechanism": name, "causal": causal, "B": B, "N": N, "what": label}
                try:
                    # A capture that fails leaves CUDA broken, and these two cannot be captured.
                    graphs = label not in ("performer-pytorch", "features in torch, fla chunk")
                    row |= timed(attend, [x.requires_grad_() for x in inputs], flush, graphs)
                except Exception as error:  # a peer that cannot run should not end the race
                    print(f"  {label} at {N}: {type(error).__name__}: {str(error)[:100]}")
                    continue
                row |= floors(name, causal, B * N, copy, product) if label == "regard" else {}
                rows.append(row)
                names = ("forward_ms", "both_ms", "forward_device_ms", "both_device_ms")
                times = [f"{row[n]:8.3f}" if n in row else "       –" for n in names]
                print(f"  N {N:6} {label:30} {' '.join(times)} ms, peak {row['both_peak_MiB']:6.0f} MiB", flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if options.out:
        with open(options.out, "w") as file:
            found = {"rows": rows, "device": torch.cuda.get_device_name(), "versions": versions}
            json.dump(found | {"copy_bytes_a_second": copy, "product_flops_a_second": product}, file, indent=2)


if __name__ == "__main__":
    main()
