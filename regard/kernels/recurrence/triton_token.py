"""One token of gated or delta attention in one launch: the memory fades, is corrected, written to and read."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.devices import power_of_2
from regard.kernels.linear.launch import launch
from regard.kernels.linear.plan import ceil_div
from regard.kernels.linear.tensors import with_unit_stride
from regard.mechanisms import Memory, Recurrence
from regard.mechanisms.decays import STRONGEST

FEW_HEADS = 128  # with fewer memories, a program does 16 columns of one, not 32, to occupy the GPU


@triton.jit
def token_kernel(
    q, k, v, a, write, visible, memory, tokens, out, new_memory, new_tokens,
    q_b, q_h, k_b, k_h, v_b, v_h, H, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr,
    Q_SHARED: tl.constexpr, K_SHARED: tl.constexpr, R: tl.constexpr, X: tl.constexpr, STRONGEST: tl.constexpr,
    WRITES: tl.constexpr, ERASES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one token to a memory and reads it. One program does BV columns of one memory, for all its query heads:

        S ← e^a S,      S ← S + b k (v − Sᵀk)ᵀ,      out = scale · Sᵀq

    Reads:
        q [B,·,1,K], k [B,·,1,K], v [B,G,1,V]: the token; strides of batch and heads. Q_SHARED memories have one query
            head, or R query heads belong to each; K_SHARED memories have one key head.
        a [B,G,1,X]: logarithms of the decays, of each row of S if X = K. write [B,G,1,1]: b, if WRITES.
        visible [B,1]: a hidden token leaves the memory as it is, if MASKED. memory [B,G,K,V], tokens [B]: the state.
    Writes:
        out [B,1,H,V], new_memory [B,G,K,V], new_tokens [B].
    """
    bg = tl.program_id(0)
    b = bg // G
    g = bg % G
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    seen = b >= 0  # always true, as a tensor
    if MASKED:
        seen = tl.load(visible + b) != 0
    inside = (kk < K)[:, None] & (vv < V)[None, :]
    entries = bg.to(tl.int64) * K * V + kk[:, None] * V + vv[None, :]
    S = tl.load(memory + entries, mask=inside, other=0.0)
    key = tl.load(k + b * k_b + (g // K_SHARED) * k_h + kk, mask=seen & (kk < K), other=0.0).to(tl.float32)
    value = tl.load(v + b * v_b + g * v_h + vv, mask=seen & (vv < V), other=0.0).to(tl.float32)
    decay = tl.load(a + bg * X + tl.where(kk < X, kk, 0)).to(tl.float32)
    # A decay that is not a number shows: the larger of it and a number would be the number, which clears the memory.
    S *= tl.exp(tl.maximum(decay, STRONGEST, propagate_nan=tl.PropagateNan.ALL))[:, None]
    if ERASES:
        # [BK] @ [BK,BV] -> [BV]
        value -= tl.sum(key[:, None] * S, 0)
    if WRITES:
        value *= tl.load(write + bg).to(tl.float32)
    # [BK,1] · [1,BV] -> [BK,BV]
    S += key[:, None] * value[None, :]
    tl.store(new_memory + entries, S, mask=inside)
    if tl.program_id(1) == 0 and g == 0:
        tl.store(new_tokens + b, tl.load(tokens + b) + seen.to(tl.int64))
    for r in range(R):
        query = tl.load(q + b * q_b + (g // Q_SHARED * R + r) * q_h + kk, mask=kk < K, other=0.0).to(tl.float32)
        result = tl.sum(query[:, None] * S, 0) * SCALE
        tl.store(out + (b * H + g * R + r) * V + vv, result, mask=vv < V)


def decode_token(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    visible: Tensor | None,
    state: Memory,
) -> tuple[Tensor, Memory]:
    """Returns the outputs [B,H,1,V] of one more token, and the state after it.

    q [B,·,1,K], k [B,·,1,K], v [B,G,1,V]; a [B,G,1,1], or [B,G,1,K] by channel; b [B,G,1,1]; visible [B,1].
    """
    B, G, _, V = v.shape
    K = k.shape[3]
    H = max(q.shape[1], G)
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    # Laid out as [B,T,H,V], so that the layer merges heads without a copy.
    out = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    memory = state.memory.contiguous()
    after = Memory(torch.empty_like(memory), torch.empty_like(state.tokens))
    a = a.contiguous()
    write = a  # stands in where nothing scales what is written
    if b is not None:
        write = b.contiguous()
    seen = a
    if visible is not None:
        seen = visible.contiguous()
    columns = 32
    if B * G < FEW_HEADS:
        columns = 16
    named = {
        "K": K, "V": V, "BK": max(16, power_of_2(K)), "BV": columns, "SCALE": mechanism.score_scale(K),
        "Q_SHARED": max(1, G // q.shape[1]), "K_SHARED": G // k.shape[1], "R": H // G, "X": a.shape[3],
        "STRONGEST": STRONGEST, "WRITES": b is not None, "ERASES": mechanism.erases, "MASKED": visible is not None,
    }  # fmt: skip
    numbers = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), H, G)
    launch(
        (token_kernel, "token_kernel", v.device, numbers, *named.values()), token_kernel,
        (B * G, ceil_div(V, columns), 1), (q, k, v, a, write, seen, memory, state.tokens, out, *after), numbers,
        lambda: named, lambda: [{"num_warps": 4}],
    )  # fmt: skip
    return out.transpose(1, 2), after
