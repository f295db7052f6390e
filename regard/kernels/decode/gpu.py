"""One decoding step of softmax attention in two launches: write the new token, attend over the cache, and merge.

The slots of a row are split over many programs, so that even one sequence fills the GPU, and all query heads of a group
share one read of their keys and values. The number of tokens is read on the device: nothing waits for the host, and the
step can be captured in a CUDA graph.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.kernels.decode.cpu import refuse_wide_ring
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
    if state.rules.adjusts_scores:
        return "it knows no slopes or softcap"
    if max(k.shape[3], v.shape[3]) > _WIDEST or v.dtype not in _DTYPES or state.v.dtype != v.dtype:
        return f"it takes widths up to {_WIDEST} and {', '.join(str(d).split('.')[1] for d in _DTYPES)}"
    return refuse_wide_ring(state)


@kernel(Softmax, "extend", name="triton", when=_when, device="cuda")
def extend(
    mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, state: Cache, visible: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Returns the attention of the new token [B,H,1,V], and the cache with it."""
    from regard.kernels.decode.triton_decode import step

    state = grow_for_tokens(state, 1)
    assert state.k is not None
    out, tokens = step(
        q, k, v, state.k, state.v, state.tokens, used=state.used, scale=mechanism.score_scale(q.shape[-1])
    )
    return out, state._replace(tokens=tokens, used=state.used + 1)
