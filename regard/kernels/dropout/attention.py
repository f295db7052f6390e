"""Softmax attention with dropout on a CPU, where PyTorch's fused call has none: some heads at a time, so that their
weights stay in the cache.

    P = softmax(scale·q·kᵀ + added)     out = (M ∘ P) v / kept     M: 0 where a weight is dropped, 1 elsewhere

    dS = M ∘ P ∘ (d_out·vᵀ) / kept − P ∘ (d_out · out)
    dq = scale·dS·k       dk = scale·dSᵀ·q       dv = (M ∘ P)ᵀ d_out / kept

What is dropped stands in the sign of P, so one matrix is kept for the way back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.dropout.mask import Share, Stream
from regard.kernels.dropout.mask import suits as suits_dropout
from regard.shapes import Keys, Mask, Outputs, Queries, Values

_AT_A_TIME = 1 << 20  # weights: 4 MB fit into the shared cache, and threads that wait for busy cores meet seldom


def suits(q: Tensor, mask: Mask) -> bool:
    """Whether it can stand in for PyTorch's call; of what is added to the scores it has no gradient."""
    learned = (x is not None and x.requires_grad for x in (mask.bias, mask.slopes))
    if mask.relative is not None and torch.is_grad_enabled():  # its table may be learned
        return False
    return suits_dropout(q) and not torch.is_autocast_enabled("cpu") and not any(learned)


def scaled_dot_product_attention(
    q: Queries,
    k: Keys,
    v: Values,
    attn_mask: Bool[Tensor, "#B #H #T S"] | Float[Tensor, "#B #H #T S"] | None = None,
    *,
    dropout_p: float,
    is_causal: bool = False,
    scale: float,
    enable_gqa: bool = False,
) -> Outputs:
    """PyTorch's function of that name. No row of `attn_mask` may hide every key."""
    group, T, S = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    if enable_gqa:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if is_causal:
        attn_mask = torch.ones(T, S, dtype=torch.bool).tril_()[None, None]
    added = q.new_zeros(1, 1, 1, 1) if attn_mask is None else attn_mask
    if added.dtype == torch.bool:
        added = q.new_zeros(added.shape).masked_fill_(~added, -math.inf)
    out: Tensor = _Attend.apply(q, k, v, added, scale, dropout_p)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float, p: float) -> Tensor:
        stream, share = Stream(), Share(p)
        added = added.expand(*q.shape[:3], k.shape[2])
        out = _room(v, q.shape[2])
        kept = []
        for part in _parts(q, k):
            scores = torch.baddbmm(_heads(added, part), _heads(q, part), _heads(k, part).mT, alpha=scale)
            weights = scores.softmax(-1)
            bits = stream.bits(weights.numel()).to(weights.dtype).view(weights.shape)
            weights.copysign_(bits.sub_(share.first_kept))
            _put(out, part, torch.bmm(weights.relu(), _heads(v, part)), 1 / share.kept)
            kept.append(weights)
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.scale, ctx.share = scale, share.kept
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *kept = ctx.saved_tensors
        dq, dk, dv = (_room(x, x.shape[2]) for x in (q, k, v))
        for part, weights in zip(_parts(q, k), kept, strict=True):
            d, mixed = _heads(d_out, part), weights.relu()
            along = (d * _heads(out, part)).sum(-1, keepdim=True)
            d_weights = torch.bmm(d, _heads(v, part).mT)
            d_scores = weights.abs().mul_(-along).addcmul_(mixed, d_weights, value=1 / ctx.share)
            _put(dq, part, torch.bmm(d_scores, _heads(k, part)), ctx.scale)
            _put(dk, part, torch.bmm(d_scores.mT, _heads(q, part)), ctx.scale)
            _put(dv, part, torch.bmm(mixed.mT, d), 1 / ctx.share)
        return dq, dk, dv, None, None, None


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads to take at a time: several sequences, or one, or some heads of one."""
    B, H, T, _ = q.shape
    heads = max(_AT_A_TIME // max(T * k.shape[2], 1), 1)
    rows = max(heads // H, 1)
    for row in range(0, B, rows):
        for head in range(0, H, heads):
            yield slice(row, row + rows), slice(head, head + heads)


def _heads(x: Tensor, part: tuple[slice, slice]) -> Tensor:
    """The heads of one part in a row, [b·h,T,·]."""
    return x[part].flatten(0, 1)


def _room(like: Tensor, T: int) -> Tensor:
    """Room for [B,H,T,V], laid out as [B,T,H,V]: merging the heads then moves nothing."""
    B, H, _, V = like.shape
    return like.new_empty(B, T, H, V).transpose(1, 2)


def _put(room: Tensor, part: tuple[slice, slice], x: Tensor, factor: float) -> None:
    torch.mul(x.view(room[part].shape), factor, out=room[part])
