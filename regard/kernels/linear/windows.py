"""Linear attention within a window, a block of queries at a time, in plain PyTorch.

Sums cannot forget, so a window needs the pairs themselves; but a query has no business with keys beyond its window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.blocks import refuse_blocks, rules_of_block
from regard.kernels.registry import kernel
from regard.kernels.stretches import attend_by_stretches, find_stretches
from regard.mechanisms import AnyFeatures, Elu, Fourier, Linear, Performer, Quadratic
from regard.mechanisms.pairwise import attend_by_definition
from regard.shapes import Mask

_LEAST_BLOCK = 64  # queries of a block on a CPU: below it a block costs more than its products
_LEAST_BLOCK_ON_DEVICE = 1024  # and elsewhere, where launching them does


def _block(q: Tensor, mask: Mask) -> int:
    """Returns how many queries are taken at a time: at least as many as the window is wide."""
    assert mask.window is not None
    if q.device.type == "cpu":
        return max(_LEAST_BLOCK, mask.window)
    return max(_LEAST_BLOCK_ON_DEVICE, mask.window)


def _when(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns why the kernel cannot run, or None."""
    T = q.shape[2]
    if mask.window is not None and 2 * _block(q, mask) >= T:
        return "the sequence is hardly longer than the window"
    reason = refuse_blocks(mask, T, k.shape[2])
    if reason is not None and mask.window is not None and find_stretches(q, mask, k.shape[2]) is not None:
        return None  # padding behind other tokens, which is left out
    return reason


def forward(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns causal attention [B,H,T,V] within a window; what stands behind the visible tokens is taken by itself."""
    if refuse_blocks(mask, q.shape[2], k.shape[2]) is None:
        return _attend_by_blocks(mechanism, q, k, v, mask)
    rows = find_stretches(q, mask, k.shape[2])
    assert rows is not None

    def attend(q: Tensor, k: Tensor, v: Tensor, rules: Mask) -> Tensor:
        if rules.window is not None and 2 * _block(q, rules) < q.shape[2]:
            return _attend_by_blocks(mechanism, q, k, v, rules)
        return attend_by_definition(mechanism, q, k, v, rules)

    return attend_by_stretches(attend, q, k, v, mask, rows)


def _attend_by_blocks(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns causal attention [B,H,T,V] within a window by blocks of queries: `mask` leaves no gaps.

    Each block sees its own keys and those of the block before.
    """
    # Split and not sliced: the gradient of a slice would be as long as the whole sequence.
    C = _block(q, mask)
    queries, keys, values = (x.split(C, 2) for x in (q, k, v))
    outs = [attend_by_definition(mechanism, queries[0], keys[0], values[0], rules_of_block(mask, 0, C))]
    for i in range(1, len(queries)):
        near_keys = torch.cat(keys[i - 1 : i + 1], 2)
        near_values = torch.cat(values[i - 1 : i + 1], 2)
        rules = rules_of_block(mask, (i - 1) * C, (i + 1) * C)
        outs.append(attend_by_definition(mechanism, queries[i], near_keys, near_values, rules))
    return torch.cat(outs, 2)


for _cls in (Elu, AnyFeatures, Performer, Fourier, Quadratic):
    kernel(_cls, "forward", name="blocks", when=_when)(forward)
