"""The random directions w as the kernels take them: bfloat16 parts for bfloat16 inputs, else one part in float32. The
parts are cached.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.kernels.linear.plan import Plan

_SPLIT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from w to (version, map, dtype) and its parts
_IDENTITIES: dict[tuple[int, torch.device], Tensor] = {}


def prepare_directions(plan: Plan, w: Tensor | None, x: Tensor) -> tuple[Plan, Tensor]:
    """Returns the plan with the number of parts, and the parts of w [D,K] stacked below each other, [W_PARTS·D,K].

    For maps without directions the second result is the identity, or x as a placeholder if nothing is projected.
    The latest parts of each w are cached as long as w exists, except if w is an inference tensor or a CUDA graph is
    being captured. x: any tensor with the dtype and the device of the call, such as v. The parts depend on its dtype,
    the identity is on its device, and its contents are not read.
    """
    if w is None:
        if plan.projects_identity:
            return plan._replace(w_parts=1), _identity(plan.K, x.device)
        return plan, x
    version = None
    if not w.is_inference():  # tensors made in inference mode have no version
        version = w._version
    key = (version, plan.map, x.dtype)
    cached: tuple[Any, Tensor] | None = _SPLIT.get(w)
    if cached is not None and cached[0] == key:
        return plan._replace(w_parts=cached[1].shape[0] // w.shape[0]), cached[1]
    parts = _split(plan.map, w.detach(), x.dtype).contiguous()
    if version is not None and not _is_capturing(w):
        _SPLIT[w] = key, parts
    return plan._replace(w_parts=parts.shape[0] // w.shape[0]), parts


def _split(map: str, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns parts that sum to w, stacked below each other.

    For bfloat16 inputs the parts are bfloat16: one part if w is bfloat16 (a bfloat16 model), else two for `performer`
    or three for `fourier`, whose phases need the additional bits. For other inputs there is one part, w in float32.
    """
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
    """Returns the identity [K,K] in bfloat16; projecting on it changes nothing."""
    identity = _IDENTITIES.get((K, device))
    if identity is None:
        identity = torch.eye(K, dtype=torch.bfloat16, device=device)
        if not _is_capturing(identity):
            _IDENTITIES[K, device] = identity
    return identity


def _is_capturing(x: Tensor) -> bool:
    """Returns whether a CUDA graph is being captured. Tensors allocated meanwhile belong to the graph and must not be
    cached."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
