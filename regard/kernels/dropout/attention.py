"""Softmax attention with dropout on a CPU, where PyTorch's fused call has none.

Some heads are taken at a time, so that their weights stay in the processor's cache.

    P = softmax(scale·q·kᵀ + added)     out = (M ∘ P) v / kept     M: 0 where a weight is dropped, 1 elsewhere

    dS = M ∘ P ∘ (d_out·vᵀ) / kept − P ∘ (d_out · out)
    dq = scale·dS·k       dk = scale·dSᵀ·q       dv = (M ∘ P)ᵀ d_out / kept

What is dropped stands in the sign of P, so that one matrix is saved for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.dropout.mask import DropRate, RandomBits, draws_bits
from regard.shapes import Keys, Mask, Outputs, Queries, Values

_AT_A_TIME = 1 << 20  # weights: 4 MB fit into the shared cache, and threads that wait for busy cores meet seldom


def is_supported(q: Tensor, mask: Mask) -> bool:
    """Returns whether this can stand in for PyTorch's call; it has no gradient of what is added to the scores."""
    if mask.relative is not None and torch.is_grad_enabled():  # its table may be learned
        return False
    learned = any(x is not None and x.requires_grad for x in (mask.bias, mask.slopes))
    return draws_bits(q) and not torch.is_autocast_enabled("cpu") and not learned


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
    """Returns what PyTorch's function of that name returns. No row of `attn_mask` may hide every key."""
    if enable_gqa:
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
    added = _added_scores(q, k, attn_mask, is_causal)
    out: Tensor = DropoutAttention.apply(q, k, v, added, scale, dropout_p)  # type: ignore[no-untyped-call]
    return out


def _added_scores(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Returns what is added to the scores, [B|1,H|1,T|1,S|1]: −inf where a key is hidden."""
    if is_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril_()[None, None]
    if attn_mask is None:
        return q.new_zeros(1, 1, 1, 1)
    if attn_mask.dtype == torch.bool:
        return q.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
    return attn_mask


class DropoutAttention(torch.autograd.Function):
    """softmax(scale·q·kᵀ + added) with weights dropped, times v, for as many key/value heads as query heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float, p: float) -> Tensor:
        """Returns the output [B,H,T,V]."""
        bits = RandomBits()
        rate = DropRate(p)
        added = added.expand(*q.shape[:3], k.shape[2])
        out = _empty_heads(v, q.shape[2])
        saved = []
        for part in _parts(q, k):
            # [b·h,T,K] @ [b·h,K,S]
            scores = torch.baddbmm(_heads(added, part), _heads(q, part), _heads(k, part).mT, alpha=scale)
            weights = scores.softmax(-1)
            drawn = bits.draw(weights.numel()).to(weights.dtype).view(weights.shape)
            weights.copysign_(drawn.sub_(rate.first_kept))  # negative: dropped
            # [b·h,T,S] @ [b·h,S,V]
            _put(out, part, torch.bmm(weights.relu(), _heads(v, part)), 1 / rate.kept)
            saved.append(weights)
        ctx.save_for_backward(q, k, v, out, *saved)
        ctx.scale = scale
        ctx.kept = rate.kept
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k and v; what is added to the scores has none."""
        tensors = ctx.saved_tensors  # once: each look unpacks them anew, which checkpointing refuses
        q, k, v, out = tensors[:4]
        dq, dk, dv = (_empty_heads(x, x.shape[2]) for x in (q, k, v))
        for part, weights in zip(_parts(q, k), tensors[4:], strict=True):
            d = _heads(d_out, part)
            kept_weights = weights.relu()  # M ∘ P
            along = (d * _heads(out, part)).sum(-1, keepdim=True)  # d_out · out of each row
            # [b·h,T,V] @ [b·h,V,S]
            d_weights = torch.bmm(d, _heads(v, part).mT)
            d_scores = weights.abs().mul_(-along).addcmul_(kept_weights, d_weights, value=1 / ctx.kept)
            # [b·h,T,S] @ [b·h,S,K], then [b·h,S,T] @ [b·h,T,K] and [b·h,S,T] @ [b·h,T,V]
            _put(dq, part, torch.bmm(d_scores, _heads(k, part)), ctx.scale)
            _put(dk, part, torch.bmm(d_scores.mT, _heads(q, part)), ctx.scale)
            _put(dv, part, torch.bmm(kept_weights.mT, d), 1 / ctx.kept)
        return dq, dk, dv, None, None, None


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields the sequences and heads to take at a time: several sequences, or one, or some heads of one."""
    B, H, T, _ = q.shape
    heads = max(_AT_A_TIME // max(T * k.shape[2], 1), 1)
    rows = max(heads // H, 1)
    for row in range(0, B, rows):
        for head in range(0, H, heads):
            yield slice(row, row + rows), slice(head, head + heads)


def _heads(x: Tensor, part: tuple[slice, slice]) -> Tensor:
    """Returns the heads of one part, one behind the other: [b·h,T,·]."""
    return x[part].flatten(0, 1)


def _empty_heads(like: Tensor, T: int) -> Tensor:
    """Returns room for [B,H,T,V], laid out as [B,T,H,V]: merging the heads then moves nothing."""
    B, H, _, V = like.shape
    return like.new_empty(B, T, H, V).transpose(1, 2)


def _put(room: Tensor, part: tuple[slice, slice], x: Tensor, factor: float) -> None:
    """Writes x times a factor into the heads of one part."""
    torch.mul(x.view(room[part].shape), factor, out=room[part])
