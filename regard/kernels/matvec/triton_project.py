"""The Triton programs behind `project`. Imported only where one runs, since triton may be absent.

The package's docstring lists the tensors. Sizes padded for a program end in P, since blocks are powers of two.
All of them may start while the one before them still runs (`EARLY`): they fetch weights, which nobody writes, and
then wait for it to end before they read what it has written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from regard.kernels.devices import power_of_2, shared_memory
from regard.kernels.launch_step import launch_step


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """Returns the activation of y, in float32."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # ½·(1 + tanh(z)) = 1/(1 + exp(−2z)); the first factor is 2·√(2/π)
        y = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    elif ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    return y


@triton.jit
def _project_one(
    x, gamma, beta, w, b, residual, y, N, K, eps,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of W by the only row of x; program i has the rows from i·ROWS on.

    x          [1,K]        the vector
    gamma      [K]          the norm's weight; not read unless NORM
    beta       [K]          the norm's bias; not read unless SHIFTED
    w          [N|2N,K]     the matrix; where GATED, N rows of gates and then N of values
    b          [N|2N]       the bias; not read unless BIASED
    residual   [1,N]        what is added; not read unless ADDED
    y          [1,N]        written: activation(norm(x) Wᵀ + b) + residual
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kk = tl.arange(0, KP)
    in_y = rows < N
    in_x = kk < K
    # Rows in 64 bits: a vocabulary times a width may be more than 2³¹.
    places = rows.to(tl.int64)[:, None] * K + kk[None, :]
    in_w = in_y[:, None] & in_x[None, :]
    ws = tl.load(w + places, mask=in_w, other=0.0)
    values = ws
    bias = tl.zeros([ROWS], tl.float32)
    value_bias = bias
    if BIASED:
        bias = tl.load(b + rows, mask=in_y, other=0.0).to(tl.float32)
    if GATED:
        value_places = (rows + N).to(tl.int64)[:, None] * K + kk[None, :]
        values = tl.load(w + value_places, mask=in_w, other=0.0)
        if BIASED:
            value_bias = tl.load(b + N + rows, mask=in_y, other=0.0).to(tl.float32)
    scale = tl.full([KP], 1.0, tl.float32)
    shift = tl.zeros([KP], tl.float32)
    if NORM != "none":
        scale = tl.load(gamma + kk, mask=in_x, other=0.0).to(tl.float32)
    if SHIFTED:
        shift = tl.load(beta + kk, mask=in_x, other=0.0).to(tl.float32)
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    added = tl.zeros([ROWS], tl.float32)
    if ADDED:
        added = tl.load(residual + rows, mask=in_y, other=0.0).to(tl.float32)
    xs = tl.load(x + kk, mask=in_x, other=0.0).to(tl.float32)
    if NORM == "layer":
        xs = tl.where(in_x, xs - tl.sum(xs, 0) / K, 0.0)
    if NORM != "none":
        xs = xs * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps) * scale + shift
    # [ROWS,KP] · [KP], as a sum of products
    out = activate(tl.sum(ws.to(tl.float32) * xs[None, :], 1) + bias, ACTIVATION)
    if GATED:
        out *= tl.sum(values.to(tl.float32) * xs[None, :], 1) + value_bias
    tl.store(y + rows, out + added, mask=in_y)


@triton.jit
def _normalize(
    x, gamma, beta, y, K, eps, NORM: tl.constexpr, SHIFTED: tl.constexpr, EARLY: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Norms one row of x [M,K] into y [M,K]; program m has row m."""
    kk = tl.arange(0, KP)
    in_x = kk < K
    scale = tl.load(gamma + kk, mask=in_x, other=0.0).to(tl.float32)
    shift = tl.zeros([KP], tl.float32)
    if SHIFTED:
        shift = tl.load(beta + kk, mask=in_x, other=0.0).to(tl.float32)
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    place = tl.program_id(0) * K + kk
    xs = tl.load(x + place, mask=in_x, other=0.0).to(tl.float32)
    if NORM == "layer":
        xs = tl.where(in_x, xs - tl.sum(xs, 0) / K, 0.0)
    tl.store(y + place, xs * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps) * scale + shift, mask=in_x)


@triton.jit
def _project_many(
    x, w, b, residual, y, M, N, K,
    BIASED: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows of W by all M rows of x on the tensor cores; the tensors are those of `_project_one`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, MP)
    in_y = (m < M)[:, None] & (rows < N)[None, :]
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    acc = tl.zeros([MP, ROWS], tl.float32)
    value_acc = tl.zeros([MP, ROWS], tl.float32)
    for at in range(0, K, BLOCK):
        kk = at + tl.arange(0, BLOCK)
        in_x = (m < M)[:, None] & (kk < K)[None, :]
        xs = tl.load(x + m[:, None] * K + kk[None, :], mask=in_x, other=0.0)
        places = rows.to(tl.int64)[:, None] * K + kk[None, :]
        in_w = (rows < N)[:, None] & (kk < K)[None, :]
        ws = tl.load(w + places, mask=in_w, other=0.0)
        # [MP,BLOCK] @ [BLOCK,ROWS]
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
        if GATED:
            value_places = (rows + N).to(tl.int64)[:, None] * K + kk[None, :]
            values = tl.load(w + value_places, mask=in_w, other=0.0)
            value_acc = tl.dot(xs, tl.trans(values), value_acc, input_precision="ieee")
    if BIASED:
        acc += tl.load(b + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    out = activate(acc, ACTIVATION)
    if GATED:
        if BIASED:
            value_acc += tl.load(b + N + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
        out *= value_acc
    places = m.to(tl.int64)[:, None] * N + rows[None, :]
    if ADDED:
        out += tl.load(residual + places, mask=in_y, other=0.0).to(tl.float32)
    tl.store(y + places, out, mask=in_y)


class Norm(NamedTuple):
    """A norm of rows: its kind, "layer" or "rms", and its numbers."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Returns activation(norm(x) Wᵀ + b) + residual, [...,N], of x [...,K] with at most 64 rows.

    One row is normed in the same program, several in one before. `early`: weights may be fetched while the program
    before still runs, since it does not write them.
    """
    K = weight.shape[1]
    N = weight.shape[0] // (2 if gated else 1)
    M = x.numel() // K
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    # A program takes some pointer for what it does not read.
    b = x if bias is None else bias
    added = x if residual is None else residual
    flags: dict[str, Any] = {"BIASED": bias is not None, "ADDED": residual is not None, "GATED": gated}
    flags["ACTIVATION"] = activation
    if M > 1:
        if norm is not None:
            x = normalize(x, norm, early)
        sizes, settings = _many_sizes(M, N, weight, gated)
        grid = (triton.cdiv(N, sizes["ROWS"]), 1, 1)
        launch_step(_project_many, grid, (x, weight, b, added, y), (M, N, K), flags | sizes, early, **settings)
        return y
    kind, gamma, beta, eps = norm or ("none", x, None, 0.0)
    sizes, settings = _one_sizes(N, K)
    flags |= {"NORM": kind, "SHIFTED": beta is not None} | sizes
    tensors = (x, gamma, x if beta is None else beta, weight, b, added, y)
    launch_step(_project_one, (triton.cdiv(N, sizes["ROWS"]), 1, 1), tensors, (N, K, eps), flags, early, **settings)
    return y


def normalize(x: Tensor, norm: Norm, early: bool) -> Tensor:
    """Returns the norm of each row of x [...,K]."""
    K = x.shape[-1]
    y = torch.empty_like(x)
    beta = norm.weight if norm.bias is None else norm.bias
    flags = {"NORM": norm.kind, "SHIFTED": norm.bias is not None, "KP": power_of_2(K)}
    launch_step(_normalize, (x.numel() // K, 1, 1), (x, norm.weight, beta, y), (K, norm.eps), flags, early)
    return y


def _one_sizes(N: int, K: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns how many rows of W a program of `_project_one` reads, and its warps; measured on an H200.

    Where few programs share the matrix, each has more threads, so that enough is fetched at the same time.
    """
    KP = power_of_2(K)
    rows = 4
    if N > 16384:
        rows = 16
    rows = max(1, min(rows, 16384 // KP))
    per_thread = 64
    if triton.cdiv(N, rows) < 512:
        per_thread = 16
    return {"ROWS": rows, "KP": KP}, {"num_warps": max(1, min(16, rows * KP // (32 * per_thread)))}


def _many_sizes(M: int, N: int, weight: Tensor, gated: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the block sizes of `_project_many`, and its warps and stages; measured on an H200.

    As much of x and W is fetched ahead as the shared memory holds.
    """
    MP = max(16, power_of_2(M))
    rows = 16
    if N > 1024:
        rows = 32
    if N > 16384:
        rows = 128
    room = shared_memory(weight.device)
    block = 256
    while block > 16:
        stages = room // ((MP + rows * (2 if gated else 1)) * block * weight.element_size())
        if stages >= 3:
            return {"ROWS": rows, "MP": MP, "BLOCK": block}, {"num_warps": 4, "num_stages": min(stages, 4)}
        block //= 2
    return {"ROWS": 16, "MP": MP, "BLOCK": 16}, {"num_warps": 4, "num_stages": 2}
