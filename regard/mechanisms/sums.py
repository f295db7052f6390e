"""The state of linear attention: sums over all keys so far, and the steps by which a chunk of tokens meets them.

Shapes, with R = H/G query heads of a group, T queries and S keys of a chunk:

    queries   ψ(q)                [B,G,R,T,F]
    psi, c    of the keys         [B,G,S,F], [B,G,S]; φ(k) = eᶜ·ψ, and c None means 0
    values    [v, 1]              [B,G,S,V+1]
    documents ids of documents    [B,T]; `current` [B] is the document that the sums hold, None before the first chunk
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Sums(NamedTuple):
    """All that is kept of the past; float32 or better whatever the inputs."""

    sums: Float[Tensor, "B G F V+1"]  # Σ eᶜ⁻ᵐ ψ(k) [v, 1]ᵀ: S, and Z as the last column
    peak: Float[Tensor, "B G"]  # m, the largest c so far
    tokens: Int[Tensor, " B"]  # visible tokens so far


def split_tokens(n: int, *tensors: Tensor | None) -> Iterator[Sequence[Any]]:
    """Yields n tokens at a time of [B,·,T,·] and [B,T] tensors; None stays None."""
    if all(x is None or x.shape[x.dim() // 2] <= n for x in tensors):
        yield tensors  # as they are: one token of a decoder would take longer to split than to add
        return
    # Split, not sliced: the gradient of a slice is as long as the whole. Tokens are axis 2 of four, or 1 of two.
    split = {i: x.split(n, x.dim() // 2) for i, x in enumerate(tensors) if x is not None}
    for parts in zip(*split.values(), strict=True):
        chunk = dict(zip(split, parts, strict=True))
        yield [chunk.get(i) for i in range(len(tensors))]


def concatenate(parts: list[Tensor]) -> Tensor:
    """Returns the tokens of all parts [B,·,T,·] as one tensor."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 2)


def compare(
    queries: Tensor, psi: Tensor, c: Tensor | None, allowed: Tensor | None, peak_before: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the similarities of a chunk's pairs [B,G,R,T,S], and the largest c that each row has seen [B,G,T].

    A similarity is φ(q)·φ(k) where the pair counts and 0 elsewhere, divided by e to that largest c. `peak_before` is
    the largest c before the chunk. Without c there is nothing to divide by, and the second is None.
    """
    # [B,G,R·T,F] @ [B,G,F,S]
    similarities = (queries.flatten(2, 3) @ psi.mT).unflatten(2, queries.shape[2:4])
    if c is None:
        if allowed is not None:
            similarities = similarities.masked_fill(~allowed[:, :, None], 0)
        return similarities, None
    c = c[:, :, None, :]
    if allowed is not None:
        c = torch.where(allowed, c, float("-inf"))
    peaks = _largest(c)
    if peak_before is not None:
        peaks = torch.maximum(peaks, peak_before)
    return similarities * torch.exp(c - _finite(peaks)[..., None])[:, :, None], peaks


def has_negative(queries: Tensor, psi: Tensor, allowed: Tensor | None) -> bool:
    """Returns whether a pair that counts has a similarity below zero by more than rounding."""
    # [B,G,R·T,F] @ [B,G,F,S], and what a sum of so many terms can be off by
    similarities = (queries.flatten(2, 3) @ psi.mT).unflatten(2, queries.shape[2:4])
    terms = (queries.abs().flatten(2, 3) @ psi.abs().mT).unflatten(2, queries.shape[2:4])
    negative = similarities < -4 * torch.finfo(psi.dtype).eps * psi.shape[-1] * terms
    if allowed is not None:
        negative = negative & allowed[:, :, None]
    return bool(negative.any())


def _largest(c: Tensor) -> Tensor:
    """Returns the largest c over the keys [...,S], −inf where there are none; a scale, so it has no gradient."""
    if c.shape[-1] == 0:
        return c.new_full(c.shape[:-1], float("-inf"))
    return c.detach().amax(-1)


def _finite(peak: Tensor) -> Tensor:
    """Returns the peak with a number for −inf (nothing seen yet), so that −inf − peak stays −inf."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)


def past_peak(state: Sums, documents: Tensor | None, current: Tensor | None) -> Tensor:
    """Returns the largest c of the sums for each row that may read them [B,G,T|1], and −inf for the others."""
    past = state.peak[..., None]
    if documents is None or current is None:
        return past
    return torch.where((documents == current[:, None])[:, None], past, float("-inf"))


def scale_for_past(
    queries: Tensor, state: Sums, peaks: Tensor | None, documents: Tensor | None, current: Tensor | None
) -> Tensor:
    """Returns query features scaled for reading the sums: by exp(m_old − m_row), and by 0 across documents."""
    if peaks is not None:
        queries = queries * torch.exp(state.peak[..., None] - _finite(peaks)).clamp(max=1)[:, :, None, :, None]
    if documents is not None and current is not None:
        queries = queries.masked_fill((documents != current[:, None])[:, None, None, :, None], 0)
    return queries


def keep_current_document(
    state: Sums, psi: Tensor, c: Tensor | None, documents: Tensor, current: Tensor | None
) -> tuple[Sums, Tensor, Tensor | None]:
    """Returns the sums, ψ(k) and c without what does not belong to the document that a chunk ends in."""
    last = documents[:, -1:]
    if current is not None:
        ended = last[:, 0] != current
        state = state._replace(
            sums=state.sums.masked_fill(ended[:, None, None, None], 0),
            peak=state.peak.masked_fill(ended[:, None], float("-inf")),
        )
    other = (documents != last)[:, None]
    psi = psi.masked_fill(other[..., None], 0)
    if c is not None:
        c = c.masked_fill(other, float("-inf"))
    return state, psi, c


def add_keys(state: Sums, psi: Tensor, c: Tensor | None, values: Tensor, tokens: Tensor | int) -> Sums:
    """Returns the sums with more keys in them, rescaled where the largest c has grown."""
    psi = psi.to(state.sums.dtype)
    values = values.to(state.sums.dtype)
    # [B,G,F,S] @ [B,G,S,V+1]
    if c is None:
        return Sums(state.sums + psi.mT @ values, state.peak, state.tokens + tokens)
    c = c.to(state.peak.dtype)
    peak = torch.maximum(state.peak, _largest(c))
    base = _finite(peak)
    kept = state.sums * torch.exp(state.peak - base).unsqueeze(2).unsqueeze(3)
    psi = psi * torch.exp(c - base.unsqueeze(2)).unsqueeze(3)
    return Sums(kept + psi.mT @ values, peak, state.tokens + tokens)
