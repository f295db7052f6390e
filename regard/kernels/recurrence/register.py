"""Registers gated and delta attention by chunks for a CPU, forward and for a prompt that extends a state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from regard.kernels.recurrence.chunks import ChunkedRecurrence
from regard.kernels.registry import kernel
from regard.mechanisms import Delta, Gated, GatedDelta, Memory, Recurrence, Retention
from regard.mechanisms.base import can_read, without_autocast
from regard.mechanisms.cache import visible_counts
from regard.mechanisms.decays import STRONGEST
from regard.mechanisms.gates import prepare
from regard.mechanisms.nonfinite import mark_rows, replace_nonfinite, rows_of_documents
from regard.shapes import Mask

_NAME = "chunks"
CHUNK = 32  # tokens


def _refuses(mechanism: Recurrence, *inputs: Tensor | None) -> str | None:
    """Returns why a call cannot run here, or None."""
    given = [x for x in inputs if x is not None]
    if any(x.device.type != "cpu" for x in given):
        return "it is for a CPU"
    if mechanism.channels:
        return "it has one decay for each head, not one for each channel"
    if not all(can_read(x) for x in given):
        return "it does not run compiled, traced, transformed, counted, or without tokens"
    if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        return "it has gradients backward only"
    return None


def _refuses_forward(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, a: Tensor | None, b: Tensor | None
) -> str | None:
    if mask.documents is not None and v.dtype == torch.float64:
        return "packed documents in float64 would lose digits where it clears the memory between them"
    if q.shape[2] != v.shape[2]:
        return "it takes as many queries as keys"
    return _refuses(mechanism, q, k, v, a, b)


def _refuses_extend(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Memory,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> str | None:
    if v.shape[2] < 2:
        return "one token is one step"
    return _refuses(mechanism, q, k, v, a, b, state.memory)


def forward(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Returns the outputs of a whole sequence [B,H,T,V]."""
    B, G, _, V = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    memory = torch.zeros(B, G, k.shape[3], V, dtype=dtype)
    out, _ = _run(mechanism, q, k, v, memory, mask.visible, a, b, mask.document_ids())
    return out


def extend(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Memory,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Memory]:
    """Returns the outputs of new tokens [B,H,T,V], and the memory after them."""
    out, memory = _run(mechanism, q, k, v, state.memory, visible, a, b)
    return out, Memory(memory, state.tokens + visible_counts(v, visible).sum(1))


def _run(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns outputs and memory; what is not a number reaches the rows that see it, and the memory after them.

    `documents` [B,T] are the ids of packed documents.
    """
    T = v.shape[2]
    finite = replace_nonfinite(k, v, Mask(visible=visible))
    assert finite.k is not None
    with without_autocast(v):
        x = prepare(mechanism, q, finite.k, finite.v, visible, a, b, memory.dtype)
        if documents is not None:
            x = x._replace(a=_clear_between(x.a, documents))
        queries = _in_chunks(x.q.flatten(0, 1), T).transpose(1, 2).flatten(2, 3)
        keys, values, decay = (_in_chunks(y.flatten(0, 1), T) for y in (x.k, x.v, x.a))
        strength = None
        if x.b is not None:
            strength = _in_chunks(x.b.flatten(0, 1), T)
        result: tuple[Tensor, Tensor] = ChunkedRecurrence.apply(  # type: ignore[no-untyped-call]
            queries, keys, values, decay[..., 0], strength, memory.flatten(0, 1), mechanism
        )
    out, after = result
    heads = out.unflatten(2, (-1, keys.shape[2])).transpose(1, 2).flatten(2, 3)[:, :, :T]
    out = heads.reshape(*q.shape[:3], v.shape[3]).to(v.dtype)
    after = after.view_as(memory)
    broken = rows_of_documents(finite.broken, documents, True, T)
    if broken is None:
        return out, after
    return mark_rows(out, broken), mark_rows(after, broken[..., -1:])


def _clear_between(a: Tensor, documents: Tensor) -> Tensor:
    """Returns the decays [B,G,T,1] such that the first token of a document, hidden or not, clears the memory."""
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return a.masked_fill(begins[:, None, :, None], STRONGEST)


def _in_chunks(x: Tensor, T: int) -> Tensor:
    """Returns tokens [...,T,X] as chunks [...,n,C,X], the last one filled with zeros, which change nothing."""
    C = min(CHUNK, T)
    rest = -T % C
    if rest:
        x = functional.pad(x, (0, 0, 0, rest))
    # Where heads lie beside each other in memory, every product would copy its factors.
    chunks: Tensor = x.contiguous().unflatten(-2, (-1, C))
    return chunks


for _mechanism in (Retention, Gated, Delta, GatedDelta):
    kernel(_mechanism, "forward", name=_NAME, when=_refuses_forward, device="cpu")(forward)
    kernel(_mechanism, "extend", name=_NAME, when=_refuses_extend, device="cpu")(extend)
