"""Scaled dot-product attention over q [B,T,K], k [B,S,K], v [B,S,V] with a mask [B,T,S], True where a key is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.grade.cases import Draw, GradeCase, causal_mask

Function = Callable[..., Tensor]


def plain(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases without a mask, also with fewer queries than keys."""
    for B, T, S, K, V in ((2, 5, 5, 3, 7), (1, 3, 11, 13, 2), (3, 7, 2, 6, 5)):
        yield GradeCase((draw.normal(B, T, K), draw.normal(B, S, K), draw.normal(B, S, V)))


def masked(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases with random masks of pairs."""
    for B, T, S, K, V in ((2, 5, 7, 3, 11), (3, 11, 5, 6, 2)):
        q, k, v = draw.normal(B, T, K), draw.normal(B, S, K), draw.normal(B, S, V)
        yield GradeCase((q, k, v, draw.visible(B, T, S)), words="with a mask of pairs")


def causal(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases with causal masks."""
    for B, T, K, V in ((2, 7, 3, 5), (1, 11, 6, 2)):
        q, k, v = draw.normal(B, T, K), draw.normal(B, T, K), draw.normal(B, T, V)
        yield GradeCase((q, k, v, causal_mask(T).expand(B, T, T).clone()), words="with a causal mask")


def padded(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases in which hidden keys and values are huge, as values in padding may be."""
    q, k, v = draw.normal(2, 5, 3), draw.normal(2, 7, 3), draw.normal(2, 7, 2)
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    for row, length in enumerate((4, 6)):
        mask[row, :, length:] = False
        k[row, length:] = 1e3
        v[row, length:] = 1e3
    yield GradeCase((q, k, v, mask), words="with padding")


def large(draw: Draw) -> Iterator[GradeCase]:
    """Yields a case with scores in the thousands, at which exp overflows."""
    yield GradeCase((80 * draw.normal(1, 5, 4), 80 * draw.normal(1, 5, 4), draw.normal(1, 5, 3)), words="large scores")


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _hide(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf"))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns softmax(q·kᵀ/√K where mask) v, [B,T,V]."""
    return _hide(_scores(q, k), mask).softmax(-1) @ v


def unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(q @ k.mT, mask).softmax(-1) @ v


def divided_by_width(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(q @ k.mT / q.shape[-1], mask).softmax(-1) @ v


def divided_by_length(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(q @ k.mT / math.sqrt(k.shape[-2]), mask).softmax(-1) @ v


def divided_by_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(q @ k.mT / math.sqrt(q.shape[-2]), mask).softmax(-1) @ v


def divided_by_value_width(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(q @ k.mT / math.sqrt(v.shape[-1]), mask).softmax(-1) @ v


def multiplied_by_root(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(q @ k.mT * math.sqrt(q.shape[-1]), mask).softmax(-1) @ v


def scaled_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return unscaled(q, k, v, mask) / math.sqrt(q.shape[-1])


def over_all_pairs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = _hide(_scores(q, k), mask)
    return scores.flatten(1).softmax(-1).view_as(scores) @ v


def over_everything(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = _hide(_scores(q, k), mask)
    return scores.flatten().softmax(0).view_as(scores) @ v


def last_key_unseen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is not None:
        mask = mask[..., :-1]
    return attention(q, k[:, :-1], v[:, :-1], mask)


def log_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(_scores(q, k), mask).log_softmax(-1) @ v


def is_transposed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(q, k, v, mask).mT


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(_scores(q, k), mask).softmax(-2).nan_to_num(0.0) @ v


def over_batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(_scores(q, k), mask).softmax(0).nan_to_num(0.0) @ v


def minus_too_small(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns attention with 10 subtracted from hidden scores, which does not hide a key whose score is large."""
    assert mask is not None
    return (_scores(q, k) - 10.0 * ~mask).softmax(-1) @ v


def causal_instead(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return attention(q, k, v, causal_mask(max(mask.shape[-2:]))[: mask.shape[-2], : mask.shape[-1]])


def ignores_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(q, k, v)


def inverted_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return _scores(q, k).masked_fill(mask, -1e9).softmax(-1) @ v


def inverted_infinite_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return _scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


def masked_by_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return (_scores(q, k) * mask).softmax(-1) @ v


def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return (_scores(q, k).softmax(-1) * mask) @ v


def mask_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return (_scores(q, k) + mask).softmax(-1) @ v


def no_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = _scores(q, k)
    if mask is not None:
        scores = scores * mask
    return scores @ v


def no_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(_scores(q, k), mask).exp() @ v


def keys_for_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(q, k, k, mask)


def returns_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(_scores(q, k), mask).softmax(-1)


def softmax_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _hide(_scores(q, k), mask).softmax(-1).softmax(-1) @ v


def unit_vectors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(normalize(q, dim=-1) * math.sqrt(q.shape[-1]), normalize(k, dim=-1), v, mask)


def unit_vectors_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(normalize(q, dim=-1), normalize(k, dim=-1), v, mask)


def always_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns attention that is causal if no mask is given."""
    assert mask is None
    return attention(q, k, v, causal_mask(max(q.shape[-2], k.shape[-2]))[: q.shape[-2], : k.shape[-2]])


def large_scores(f: Function, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Returns what is wrong with large scores: the slip "overflow" if they give NaN."""
    out = f(q, k, v)
    if not bool(torch.isfinite(out).all()):
        return "overflow"
    if not torch.allclose(out, attention(q, k, v), atol=1e-3):
        return "scores in the hundreds give another output than softmax"
    return None


def inputs_kept(f: Function, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    """Returns the slip of a function that changes its arguments; None if it does not."""
    given = [x.clone() for x in (q, k, v, mask)]
    f(*given)
    if all(torch.equal(a, b) for a, b in zip(given, (q, k, v, mask), strict=True)):
        return None
    return "changes_inputs"
