"""The Triton program behind `matvec`. Imported only where it runs, since triton may be absent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 4, 1024  # of W that a program reads at a time


@triton.jit
def _matvec(x, w, b, y, N, K, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows of W times x."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < N
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, K, BLOCK):
        kk = at + tl.arange(0, BLOCK)
        part = tl.load(x + kk, mask=kk < K, other=0.0).to(tl.float32)
        ws = tl.load(w + rows.to(tl.int64)[:, None] * K + kk, mask=there[:, None] & (kk < K), other=0.0)
        acc += ws.to(tl.float32) * part[None, :]
    out = tl.sum(acc, 1)
    if BIASED:
        out += tl.load(b + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(y + rows, out, mask=there)


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] of one row times weight [N,K], plus bias."""
    N, K = weight.shape
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    _matvec[(triton.cdiv(N, ROWS),)](
        x.contiguous(), weight, bias if bias is not None else weight, y, N, K, BIASED=bias is not None, ROWS=ROWS,
        BLOCK=BLOCK,
    )  # fmt: skip
    return y
