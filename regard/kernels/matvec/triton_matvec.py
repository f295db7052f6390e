"""The Triton program behind `matvec`. Imported only where it runs, since triton may be absent.

The package's docstring lists the tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# What a program reads of W at a time.
ROWS = 4
BLOCK = 1024


@triton.jit
def _matvec(x, w, b, y, N, K, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiplies ROWS rows of W by x; program i has the rows from i·ROWS on.

    x   [K]     the vector
    w   [N,K]   the matrix
    b   [N]     the bias; not read unless BIASED
    y   [N]     written: w·x + b
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_w = rows < N
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, K, BLOCK):
        kk = at + tl.arange(0, BLOCK)
        part = tl.load(x + kk, mask=kk < K, other=0.0).to(tl.float32)
        # Rows in 64 bits: a vocabulary times a width may be more than 2³¹.
        ws = tl.load(w + rows.to(tl.int64)[:, None] * K + kk, mask=in_w[:, None] & (kk < K), other=0.0)
        # [ROWS,BLOCK] ∘ [1,BLOCK]; summed over BLOCK once, after the loop
        acc += ws.to(tl.float32) * part[None, :]
    out = tl.sum(acc, 1)
    if BIASED:
        out += tl.load(b + rows, mask=in_w, other=0.0).to(tl.float32)
    tl.store(y + rows, out, mask=in_w)


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [...,K] of one row times weight [N,K], plus bias [N]: [...,N]."""
    N, K = weight.shape
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    b = weight if bias is None else bias  # a program takes some pointer; this one is not read
    _matvec[(triton.cdiv(N, ROWS),)](
        x.contiguous(), weight, b, y, N, K, BIASED=bias is not None, ROWS=ROWS, BLOCK=BLOCK
    )
    return y
