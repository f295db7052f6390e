"""The random directions w as the Triton programs take them: split into parts of the dtype of the inputs, and kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.kernels.linear.plan import Plan

_SPLIT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from w to (version, map, dtype) and its parts
_IDENTITIES: dict[tuple[int, torch.device], Tensor] = {}


def prepare_directions(plan: Plan, w: Tensor | None, x: Tensor) -> tuple[Plan, Tensor]:
    """Returns the plan with the number of parts, and the parts of w [D,K] one below the other, [W_PARTS·D,K].

    Where the map has no directions, that is the identity or, as something has to be passed, x. What was made is kept
    as long as w is.
    """
    if w is None:
        if plan.projects_identity:
            return plan._replace(w_parts=1), _identity(plan.K, x.device)
        return plan, x
    version = None
    if not w.is_inference():  # tensors made in inference mode have no version
        version = w._version
    key = (version, plan.map, x.dtype)
    kept: tuple[Any, Tensor] | None = _SPLIT.get(w)
    if kept is not None and kept[0] == key:
        return plan._replace(w_parts=kept[1].shape[0] // w.shape[0]), kept[1]
    parts = _split(plan.map, w.detach(), x.dtype).contiguous()
    if version is not None and not _is_capturing(w):
        _SPLIT[w] = key, parts
    return plan._replace(w_parts=parts.shape[0] // w.shape[0]), parts


def _split(map: str, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns parts of w that sum to it. Beside bfloat16 inputs they are bfloat16: one where w is bfloat16 itself, in a
    model that is; else two, or three for `fourier`, whose phases need them. Beside others w stays whole, in float32."""
    if dtype != torch.bfloat16:
        return w.float()
    if w.dtype == torch.bfloat16:
        return w
    count = 3
    if map == "performer":
        count = 2
    rest = w.float()
    parts = []
    for _ in range(count):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def _identity(K: int, device: torch.device) -> Tensor:
    """Returns the identity [K,K] in bfloat16: what is projected on it stays as it is."""
    identity = _IDENTITIES.get((K, device))
    if identity is None:
        identity = torch.eye(K, dtype=torch.bfloat16, device=device)
        if not _is_capturing(identity):
            _IDENTITIES[K, device] = identity
    return identity


def _is_capturing(x: Tensor) -> bool:
    """Returns whether a CUDA graph is being captured: what is made now belongs to the graph, and may not be kept."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
