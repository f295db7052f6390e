"""The Triton programs behind `pick_likeliest`. Imported only where one runs, since triton may be absent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from regard.kernels.devices import power_of_2
from regard.kernels.launch_step import launch_step

BLOCK = 2048  # logits that a program reads


@triton.jit
def _scan_split(logits, parts, places, N, splits, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Finds the largest of one split of a row's logits; program (b, split).

    logits   [B,N]           logits of the next token
    parts    [2,B,splits]    written: the largest logit of the split, and Σ exp(logit − largest)
    places   [B,splits]      written: the token of the largest, the first of equal ones
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    b = tl.program_id(0)
    split = tl.program_id(1)
    tokens = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * N + tokens, mask=tokens < N, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    place = b * splits + split
    tl.store(parts + place, peak)
    tl.store(parts + tl.num_programs(0) * splits + place, tl.sum(tl.exp(x - peak), 0))
    tl.store(places + place, split * BLOCK + tl.argmax(x, 0))


@triton.jit
def _pick_split(parts, places, best, logp, splits, SP: tl.constexpr, EARLY: tl.constexpr):
    """Finds the largest of all splits of one row; program b.

    parts, places            what `_scan_split` has written
    best     [B]             written: the likeliest token
    logp     [B]             written: its log probability
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    b = tl.program_id(0)
    s = tl.arange(0, SP)
    peaks = tl.load(parts + b * splits + s, mask=s < splits, other=float("-inf"))
    totals = tl.load(parts + (tl.num_programs(0) + b) * splits + s, mask=s < splits, other=0.0)
    total = tl.sum(totals * tl.exp(peaks - tl.max(peaks, 0)), 0)
    tl.store(best + b, tl.load(places + b * splits + tl.argmax(peaks, 0)).to(tl.int64))
    tl.store(logp + b, -tl.log(total))  # its own logit is the peak, which cancels


def pick_likeliest(logits: Tensor, best: Tensor, logp: Tensor) -> None:
    """Writes the likeliest token of each row of logits [B,N] to `best` [B], and its log probability to `logp` [B]."""
    B, N = logits.shape
    splits = triton.cdiv(N, BLOCK)
    parts = torch.empty(2, B, splits, dtype=torch.float32, device=logits.device)
    places = torch.empty(B, splits, dtype=torch.int32, device=logits.device)
    launch_step(_scan_split, (B, splits, 1), (logits, parts, places), (N, splits), {"BLOCK": BLOCK})
    launch_step(_pick_split, (B, 1, 1), (parts, places, best, logp), (splits,), {"SP": power_of_2(splits)})
