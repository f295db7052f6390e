"""The Triton program behind `losses_and_gradient`. Imported only where it runs, since triton may be absent.

The package's docstring lists the tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.devices import power_of_2
from regard.kernels.linear.launch import launch

BLOCK = 8192  # logits that a program reads at a time
WARPS = 16


@triton.jit
def _losses_and_gradient(
    logits, targets, losses, stride, ignore, smoothing, N: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes the loss of one row, and writes the gradient over its logits; program i has row i.

    logits    [M,N]   rows `stride` numbers apart; written where GRADIENT
    targets   [M]     the token that comes next, or `ignore`
    losses    [M]     written, in float32
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    at = tl.arange(0, BLOCK)
    if target == ignore:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, N, BLOCK):
                tl.store(logits + start + at, tl.zeros([BLOCK], tl.float32), mask=start + at < N)
    else:
        # Each lane keeps the largest of its logits, and the sum of all relative to it: a single exponential a logit.
        peak = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        plain = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            inside = start + at < N
            z = tl.load(logits + start + at, mask=inside, other=float("-inf")).to(tl.float32)
            apart = tl.exp(-tl.abs(z - peak))
            total = tl.where(z > peak, total * apart + 1.0, total + apart)
            peak = tl.maximum(peak, z)
            plain += tl.where(inside, z, 0.0)
        highest = tl.max(peak, 0)
        normaliser = highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))
        # A target outside of the vocabulary has no loss that is a number.
        known = (target >= 0) & (target < N)
        z_target = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
        loss = normaliser - (1 - smoothing) * z_target
        if smoothing > 0:  # 0·(−∞) would be no number
            loss -= smoothing * tl.sum(plain, 0) / N
        tl.store(losses + row, loss)
        if GRADIENT:
            tl.debug_barrier()  # every thread has read the target's logit before one of them replaces it
            # The row was read just now, so it comes from the cache.
            for start in range(0, N, BLOCK):
                inside = start + at < N
                z = tl.load(logits + start + at, mask=inside, other=float("-inf")).to(tl.float32)
                found = tl.exp(z - normaliser) - smoothing / N
                found = tl.where(start + at == target, found - (1 - smoothing), found)
                tl.store(logits + start + at, found, mask=inside)


def replace_by_gradient(logits: Tensor, targets: Tensor, ignore: int, smoothing: float, gradient: bool) -> Tensor:
    """Returns the losses [M] of logits [M,N], which `gradient` replaces by their gradient."""
    M, N = logits.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        named = {"N": N, "GRADIENT": gradient, "BLOCK": min(BLOCK, power_of_2(N))}
        numbers = (logits.stride(0), ignore, smoothing)
        key = (_losses_and_gradient, "losses", logits.device, numbers, *named.values())
        tensors = (logits, targets.contiguous(), losses)
        launch(key, _losses_and_gradient, (M, 1, 1), tensors, numbers, lambda: named, lambda: [{"num_warps": WARPS}])
    return losses
