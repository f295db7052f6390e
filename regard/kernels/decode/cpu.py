"""One decoding step of softmax attention on a CPU: two matrix products over the whole room of the cache.

Reading only the used slots leaves a gap behind each head's keys, and every gap stops the processor from fetching ahead:
that costs more than the slots that it saves. So all of the room is read as soon as half of it is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.registry import kernel
from regard.mechanisms import Cache, Mechanism, Softmax
from regard.mechanisms.cache import append_to_cache


def refuse_special_step(mechanism: Mechanism, v: Tensor, state: Cache, visible: Tensor | None) -> str | None:
    """Returns why this is more than one visible token without rules, or None."""
    if v.shape[2] != 1 or visible is not None:
        return "it takes one visible token at a time"
    if state.v.dtype != v.dtype:
        return "it takes values of the dtype in which they are kept"
    if mechanism.training and mechanism.dropout:
        return "it has no dropout"
    if state.rules.adjusts_scores:
        return "it knows no slopes, softcap or sinks"
    return None


def refuse_wide_ring(state: Cache) -> str | None:
    """Returns why a step may not attend to all slots alike, or None: a ring of `window` slots holds just the window."""
    window = state.rules.window
    if window is not None and state.v.shape[2] > window:
        return "it takes a state with no more slots than its window"
    return None


def _when(
    mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, state: Cache, visible: Tensor | None = None
) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if q.device.type != "cpu":
        return "it is for a CPU"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "it has no gradient"
    if not state.even:
        return "it takes rows equally long"
    if v.dtype not in (torch.float32, torch.float64):
        return "it is for float32 and float64"
    return refuse_special_step(mechanism, v, state, visible) or refuse_wide_ring(state)


@kernel(Softmax, "extend", name="whole-room", when=_when, device="cpu")
def extend(
    mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, state: Cache, visible: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Returns the attention of the new token [B,H,1,V], and the cache with it.

    In a ring the slots are in no order, which softmax does not mind.
    """
    state = append_to_cache(state, k, v, None)
    assert state.k is not None
    B, G, room, K = state.k.shape
    H = q.shape[1]
    keys = state.k.view(B * G, room, K)
    V = state.v.shape[3]
    values = state.v.view(B * G, room, V)
    held = min(state.used, room)
    if 2 * held < room:
        room = held
        keys = keys[:, :room]
        values = values[:, :room]
    # [B·G,H/G,K] @ [B·G,K,room]
    scores = torch.bmm((q * mechanism.score_scale(K)).reshape(B * G, H // G, K), keys.mT)
    if held < room:
        scores[:, :, held:] = -math.inf
    # [B·G,H/G,room] @ [B·G,room,V]
    return torch.bmm(scores.softmax(-1), values).view(B, H, 1, V), state
