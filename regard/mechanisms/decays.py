"""Decays within a stretch of tokens: how much of what token j wrote is left when token i reads.

With c = cumsum(a), that is e^{c_i − c_j}. The difference is taken before the exponential, so that nothing overflows,
and in float64: after a strong decay c is large, and what matters are its small differences.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

# e to this is zero in every dtype, float64 included; a decay of −∞ counts as this, since −∞ − (−∞) is no number.
STRONGEST = -800.0
BLOCK = 16  # rows whose decays by channel are compared pair by pair; earlier keys meet them in one product


def cumulate(a: Float[Tensor, "B G S X"]) -> Float[Tensor, "B G S X"]:
    """Returns c = cumsum(a) over the tokens, in float64."""
    return a.double().clamp(min=STRONGEST).cumsum(2)


def compare_decayed(
    x: Float[Tensor, "B G R T K"],
    k: Float[Tensor, "B G S K"],
    c: Float[Tensor, "B G S X"],
    allowed: Bool[Tensor, "..."],
) -> Float[Tensor, "B G R T S"]:
    """Returns Σ_k x_ik k_jk e^{c_ik − c_jk} where `allowed` [#B,#G,T,S] says so, and 0 elsewhere.

    The x belong to the last T of the S keys; c has one number a head (X = 1) or one a channel (X = K).
    """
    if c.shape[3] == 1:
        rows = c[:, :, c.shape[2] - x.shape[3] :]
        # Beyond what is allowed differences are positive: −∞ first, or their exponentials would overflow.
        decay = (rows - c.mT).masked_fill(~allowed, float("-inf")).exp().to(k.dtype)
        # [B,G,R·T,K] @ [B,G,K,S]
        products: Tensor = (x.flatten(2, 3) @ k.mT).unflatten(2, x.shape[2:4])
        return products * decay[:, :, None]
    return _compare_by_channel(x, k, c).masked_fill(~allowed[..., None, :, :], 0)


def _compare_by_channel(
    x: Float[Tensor, "B G R T K"], k: Float[Tensor, "B G S K"], c: Float[Tensor, "B G S X"]
) -> Float[Tensor, "B G R T S"]:
    """Returns Σ_k x_ik k_jk e^{c_ik − c_jk} for j ≤ i, and 0 for later keys.

    No product of matrices has a decay for each channel of each pair. But with r the first token of a block of rows,
    e^{c_i − c_j} = e^{c_i − c_r} e^{c_r − c_j}, and for keys before the block neither exponent is positive.
    """
    T = x.shape[3]
    S = k.shape[2]
    blocks = []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        first = S - T + start
        last = S - T + stop
        rows = x[:, :, :, start:stop]
        base = c[:, :, first : first + 1]
        toward = (c[:, :, first:last] - base).exp().to(k.dtype)
        since = (base - c[:, :, :first]).exp().to(k.dtype)
        # [B,G,R·n,K] @ [B,G,K,first]
        before = (rows * toward[:, :, None]).flatten(2, 3) @ (k[:, :, :first] * since).mT
        before = before.unflatten(2, rows.shape[2:4])
        within = _compare_pairs(rows, k[:, :, first:last], c[:, :, first:last])
        blocks.append(torch.cat([before, functional.pad(within, (0, S - last))], -1))
    if not blocks:
        return x.new_zeros(*x.shape[:4], S)
    return torch.cat(blocks, 3)


def _compare_pairs(
    x: Float[Tensor, "B G R n K"], k: Float[Tensor, "B G n K"], c: Float[Tensor, "B G n X"]
) -> Float[Tensor, "B G R n n"]:
    """Returns what a few tokens have to do with each other, each pair with the decays of its channels."""
    n = k.shape[2]
    later = torch.ones(n, n, dtype=torch.bool, device=k.device).triu(1)[..., None]
    decay = (c[:, :, :, None] - c[:, :, None]).masked_fill(later, float("-inf")).exp().to(k.dtype)
    keys = k[:, :, None] * decay  # [B,G,n,n,K]: key j as row i finds it
    return (x[:, :, :, :, None] * keys[:, :, None]).sum(-1)


def block_pairs(T: int, S: int) -> int:
    """Returns the pairs of T rows over S keys that meet in products of matrices when decays go by channel."""
    starts = range(0, T, BLOCK)
    return sum((min(start + BLOCK, T) - start) * (S - T + start) for start in starts)
