"""Gated and delta attention by the functions of flash-linear-attention.

Its tensors have tokens before heads, and as many heads of q and k as of v:

    name            shape       meaning
    q, k, v         [B,T,H,·]   heads that share one are repeated
    g               [B,T,H]     logarithms of the decays, [B,T,H,K] by channel; float32
    beta            [B,T,H]     write strengths of a delta rule; float32
    initial_state   [B,H,K,V]   the memory before the first token; float32
    cu_seqlens      [N+1]       where each packed document begins, and the end; then B is 1

A hidden token is given as k = v = 0, g = 0 and beta = 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import KernelError
from regard.mechanisms import Recurrence
from regard.mechanisms.base import without_autocast
from regard.mechanisms.gates import prepare_gates
from regard.shapes import Mask

# e to this is zero in float32, and sums of it over a chunk, which are kept in float32, keep the digits of the others.
_STRONGEST = -100.0


class Functions(NamedTuple):
    """What computes a mechanism: a module of `fla.ops`, its functions, and what the decays are called for one token."""

    module: str
    sequence: str
    token: str
    decay: str | None = "g"
    token_decay: str | None = "g"


_SIMPLE = Functions("simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla")
_BY_CHANNEL = Functions("gla", "chunk_gla", "fused_recurrent_gla", token_decay="gk")
_DELTA = Functions("delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule", None, None)
_GATED_DELTA = Functions("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
_DELTA_BY_CHANNEL = Functions("kda", "chunk_kda", "fused_recurrent_kda")


def functions_of(mechanism: Recurrence) -> Functions:
    """Returns which functions compute a mechanism."""
    if mechanism.erases and "a" not in mechanism.needs:
        return _DELTA
    found = {
        (False, False): _SIMPLE,
        (False, True): _BY_CHANNEL,
        (True, False): _GATED_DELTA,
        (True, True): _DELTA_BY_CHANNEL,
    }
    return found[mechanism.erases, mechanism.channels]


def attend(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    *,
    documents: Tensor | None = None,
    memory: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs [B,H,T,V], and the memory [B,G,K,V] after the last token if one [B,G,K,V] is carried in.

    q [B,H,T,K], k [B,G,T,K] and v [B,G,T,V]; `documents` [B,T] are ids of packed documents, which have no memory.
    """
    B, H, T, _ = q.shape
    shared = H // v.shape[1]  # query heads that read one memory, each of which computes it
    functions = functions_of(mechanism)
    name = functions.sequence
    decays = functions.decay
    if memory is not None and T == 1:
        name = functions.token
        decays = functions.token_decay
    with without_autocast(v):
        mask = Mask(visible=visible)
        k = mask.zero_hidden(k)
        v = mask.zero_hidden(v)
        a, b = prepare_gates(mechanism, k, v, visible, a, b)
        given: dict[str, Any] = {"q": _tokens_first(q, 1), "k": _tokens_first(k, shared)}
        if decays is not None:
            given[decays] = _tokens_first(_limit_decays(mechanism, a), shared)
        if b is not None and mechanism.erases:
            given["beta"] = _tokens_first(b[..., 0].float(), shared)
        elif b is not None:
            v = v * b.to(v.dtype)
        given["v"] = _tokens_first(v, shared)
        if documents is not None:
            given = {name: x.flatten(0, 1)[None] for name, x in given.items()}
            given["cu_seqlens"] = document_bounds(documents)
        if memory is not None:
            given["initial_state"] = memory.float().repeat_interleave(shared, 1)
            given["output_final_state"] = True
        out, after = _load(functions.module, name)(scale=mechanism.score_scale(k.shape[3]), **given)
    out = out.reshape(B, T, H, v.shape[3]).transpose(1, 2).to(v.dtype)
    if memory is None:
        return out, None
    return out, after[:, ::shared]


def document_bounds(documents: Tensor) -> Tensor:
    """Returns where each document begins when rows of ids [B,T] stand one after the other, and the end, [N+1]."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    end = begins.new_tensor([begins.numel()], dtype=torch.long)
    return torch.cat([begins.flatten().nonzero()[:, 0], end])


def _limit_decays(mechanism: Recurrence, a: Tensor) -> Tensor:
    """Returns a [B,G,T,X] in float32 and at least the strongest, without the last axis where it has one number."""
    a = a.float().clamp(min=_STRONGEST)
    if mechanism.channels:
        return a
    return a[..., 0]


def _tokens_first(x: Tensor, times: int) -> Tensor:
    """Returns x [B,G,T,…] as [B,T,G·times,…], each head so many times side by side."""
    if times > 1:
        x = x.repeat_interleave(times, 1)
    return x.transpose(1, 2).contiguous()


def _load(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function of flash-linear-attention; raises where the one that is installed does not have it."""
    try:
        found: Callable[..., tuple[Tensor, Tensor]] = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise KernelError(f"kernel 'fla': cannot import {name} of fla.ops.{module}: {error}") from error
    return found
