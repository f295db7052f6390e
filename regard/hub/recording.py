"""What is recorded of an attention call: its weights in chunks of queries, and its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.errors import HubError
from regard.hub.calls import Call

MAX_WEIGHTS = 1 << 22  # attention weights computed at once while recording


@runtime_checkable
class AttentionRecorder(Protocol):
    """Receives every attention call: first `begin`, then `rows` for each chunk of R queries, then `end`.

    `rows` gets the weights [H,R,S] of the batch's first example, for the queries start, …, start + R − 1. `end` gets
    the output [B,T,H,V] and returns the output that the model continues with.
    """

    def begin(self, call: Call) -> None: ...
    def rows(self, call: Call, start: int, weights: Tensor) -> None: ...
    def end(self, call: Call, out: Tensor) -> Tensor: ...


def record_call(call: Call, recorder: AttentionRecorder, function: Callable[..., Any]) -> Tensor:
    """Returns the output [B,T,H,V] that the recorder gives back for a call, after passing it the call's weights.

    Weights are computed for one chunk of queries at a time. A chunk has as many queries as MAX_WEIGHTS weights allow,
    and at least one. Queries do not depend on each other, so the chunks give the same result.
    """
    B, H, T, _ = call.q.shape
    S = call.k.shape[2]
    step = max(1, MAX_WEIGHTS // max(1, B * H * S))
    recorder.begin(call)
    outputs = []
    for start in range(0, T, step):
        queries = slice(start, min(T, start + step))
        attend = _cut_to_queries(call, queries, function)
        q = call.q[:, :, queries]
        if torch.is_grad_enabled():  # the backward pass recomputes the weights, so that they are not kept
            out, weights = checkpoint(attend, q, call.k, call.v, use_reentrant=False)
        else:
            out, weights = attend(q, call.k, call.v)
        recorder.rows(call, start, weights[0].detach())
        outputs.append(out)
    return recorder.end(call, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))


@dataclass(frozen=True)
class _AttentionForQueries:
    """An attention function for a chunk of R queries of a call, with the mask and the keywords of these queries."""

    call: Call
    function: Callable[..., Any]
    mask: Tensor | None
    kwargs: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns out [B,R,H,V] and weights [B,H,R,S] of the queries q [B,H,R,K]."""
        call = self.call
        out, weights = self.function(call.module, q, k, v, self.mask, scaling=call.scaling, dropout=0.0, **self.kwargs)
        if weights is None:
            raise HubError(f"{call.name}: the model's own attention function gives no weights")
        return out, weights


def _cut_to_queries(call: Call, queries: slice, function: Callable[..., Any]) -> _AttentionForQueries:
    """Returns the attention function for some queries of a call; cuts the mask and the keywords to these queries."""
    kwargs = {name: _slice_queries(x, queries, call) for name, x in call.kwargs.items() if name != "dropout"}
    mask = call.mask
    if mask is not None:
        if mask.shape[-2] > 1:
            mask = mask[:, :, queries]
        mask = mask[..., : call.k.shape[2]]
        if mask.dtype == torch.bool:
            mask = mask_for_eager(mask, call.q.dtype)
    return _AttentionForQueries(call, function, mask, kwargs)


def _slice_queries(value: Any, queries: slice, call: Call) -> Any:
    """Cuts a keyword's value [B,H,T,S], such as a position bias, to some queries; returns any other value unchanged."""
    T = call.q.shape[2]
    S = call.k.shape[2]
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2] == T and value.shape[-1] >= S:
        return value[..., queries, :]
    return value


def mask_for_eager(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns a boolean mask into an additive one, as transformers' eager functions expect it.

    Hidden keys get the lowest finite number and not −∞, so that a query that sees no key yields no NaN.
    """
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill(~allowed, torch.finfo(dtype).min)
