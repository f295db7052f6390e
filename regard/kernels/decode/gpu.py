"""One decoding step of softmax attention in one or two launches: write the new token, attend over the cache, merge.

The slots of a row are split over many programs, so that even one sequence fills the GPU, and all query heads of a group
share one read of their keys and values. The number of tokens is read on the device: nothing waits for the host, and the
step can be captured in a CUDA graph.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.kernels.registry import kernel
from regard.mechanisms import Cache, Softmax
from regard.mechanisms.cache import grow_for_tokens

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256


def _when(
    mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, state: Cache, visible: Tensor | None = None
) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if not q.is_cuda or find_spec("triton") is None:
        return "it needs a CUDA device and triton"
    if q.shape[2] != 1 or visible is not None:
        return "it takes one visible token at a time"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, state.k, state.v)):
        return "it has no gradient"
    if state.rules.relative is not None or state.rules.sinks is not None:
        return "it knows no bias of relative positions and no sinks"
    if max(k.shape[3], v.shape[3]) > _WIDEST or v.dtype not in _DTYPES or state.v.dtype != v.dtype:
        return f"it takes widths up to {_WIDEST} and {', '.join(str(d).split('.')[1] for d in _DTYPES)}"
    return None


@kernel(Softmax, "extend", name="triton", when=_when, device="cuda")
def extend(
    mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, state: Cache, visible: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Returns the attention of the new token [B,H,1,V], and the cache with it."""
    from regard.kernels.decode.triton_decode import step

    state = grow_for_tokens(state, 1)
    assert state.k is not None
    counted = torch.empty_like(state.tokens)
    out = step(
        q, k, v, state.k, state.v, state.tokens, state.used, mechanism.score_scale(q.shape[3]), state.rules,
        arrived=_arrival_counters(v), counted=counted,
    )  # fmt: skip
    return out, state._replace(tokens=counted, used=state.used + 1)


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def _arrival_counters(v: Tensor) -> Tensor | None:
    """Returns zeros [B·G or more] in which the programs of one launch count themselves, or None while capturing.

    Each stream has its own, since its launches run one after the other and leave zeros behind. A graph may be replayed
    on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    rows = v.shape[0] * v.shape[1]
    key = (v.device, torch._C._cuda_getCurrentRawStream(v.get_device()))
    counters = _COUNTERS.get(key)
    if counters is None or counters.shape[0] < rows:
        counters = torch.zeros(max(1024, rows), dtype=torch.int32, device=v.device)
        _COUNTERS[key] = counters
    return counters
