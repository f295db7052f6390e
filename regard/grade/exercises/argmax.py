"""Argmax attention over q [B,T,K], k [B,S,K], v [B,S,V]: each query copies the value of the key with the largest
q·k."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from regard.grade.cases import Draw, GradeCase, causal_mask

Function = Callable[..., Tensor]


def plain(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases in which every query sees every key."""
    for B, T, S, K, V in ((2, 5, 7, 3, 11), (3, 7, 4, 2, 5), (1, 3, 2, 6, 4), (2, 5, 5, 3, 4)):
        yield GradeCase((draw.normal(B, T, K), draw.normal(B, S, K), draw.normal(B, S, V), False))


def causal(draw: Draw) -> Iterator[GradeCase]:
    """Yields causal cases, in one of which all scores are negative."""
    for B, T, K, V in ((2, 7, 3, 5), (1, 11, 4, 2)):
        yield GradeCase((draw.normal(B, T, K), draw.normal(B, T, K), draw.normal(B, T, V), True), words="causal")
    q, k = draw.normal(2, 7, 3).abs(), -draw.normal(2, 7, 3).abs()
    yield GradeCase((q, k, draw.normal(2, 7, 5), True), words="causal, all scores negative")


def ties(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases in which several keys have the same score."""
    k = draw.normal(2, 3, 4).repeat(1, 2, 1)
    yield GradeCase((draw.normal(2, 5, 4), k, draw.normal(2, 6, 3), False), words="every key occurs twice")


def _scores(q: Tensor, k: Tensor, causal: bool, hidden: float = float("-inf")) -> Tensor:
    scores = q @ k.mT
    if causal:
        scores = scores.masked_fill(~causal_mask(q.shape[-2]), hidden)
    return scores


def _pick(best: Tensor, v: Tensor) -> Tensor:
    return one_hot(best, v.shape[-2]).to(v.dtype) @ v


def argmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns the value of each query's best key, the first of equal ones, [B,T,V]."""
    return _pick(_scores(q, k, causal).argmax(-1), v)


def softmax_instead(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _scores(q, k, causal).softmax(-1) @ v


def scaled_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return (_scores(q, k, causal) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def ignores_causal(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return argmax_attention(q, k, v, False)


def always_causal(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return argmax_attention(q, k, v, q.shape[-2] == k.shape[-2])


def sees_what_is_later(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    assert causal
    return _pick((q @ k.mT).masked_fill(~causal_mask(q.shape[-2]).mT, float("-inf")).argmax(-1), v)


def hidden_by_minus_one(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _pick(_scores(q, k, causal, -1.0).argmax(-1), v)


def hidden_by_zero(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _pick(_scores(q, k, causal, 0.0).argmax(-1), v)


def over_queries(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns the output for an argmax along the queries, in which each key chooses a query."""
    scores = _scores(q, k, causal)
    chosen = one_hot(scores.argmax(-2), q.shape[-2]).mT.to(v.dtype)
    return chosen @ v


def over_queries_by_number(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns the output [B,S,V] for an argmax along the queries whose indices are used as those of keys."""
    numbers = _scores(q, k, causal).argmax(-2)
    return v.gather(1, numbers[..., None].expand(-1, -1, v.shape[-1]))


def without_itself(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    assert causal
    return _pick((q @ k.mT).masked_fill(~causal_mask(q.shape[-2]).tril(-1), float("-inf")).argmax(-1), v)


def unit_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return argmax_attention(q, k / k.norm(dim=-1, keepdim=True), v, causal)


def nearest_key(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    near = -torch.cdist(q, k)
    if causal:
        near = near.masked_fill(~causal_mask(q.shape[-2]), float("-inf"))
    return _pick(near.argmax(-1), v)


def smallest(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _pick(_scores(q, k, causal, float("inf")).argmin(-1), v)


def largest_size(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _pick(_scores(q, k, causal).nan_to_num(neginf=0.0).abs().argmax(-1), v)


def returns_indices(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _scores(q, k, causal).argmax(-1)


def returns_weights(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return one_hot(_scores(q, k, causal).argmax(-1), k.shape[-2]).to(v.dtype)


def returns_float_indices(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return returns_indices(q, k, v, causal).to(v.dtype)


def returns_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _pick(_scores(q, k, causal).argmax(-1), k)


def times_score(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = _scores(q, k, causal)
    return _pick(scores.argmax(-1), v) * scores.amax(-1, keepdim=True)


def last_of_ties(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    flipped = _scores(q, k, causal).flip(-1).argmax(-1)
    return _pick(k.shape[-2] - 1 - flipped, v)


def mean_of_ties(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = _scores(q, k, causal)
    best = (scores >= scores.amax(-1, keepdim=True) - 1e-5).to(v.dtype)
    return best @ v / best.sum(-1, keepdim=True)


def sum_of_ties(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = _scores(q, k, causal)
    return (scores >= scores.amax(-1, keepdim=True) - 1e-5).to(v.dtype) @ v


def first_column(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns the first entry of the best value in every column."""
    return argmax_attention(q, k, v, causal)[..., :1].expand(-1, -1, v.shape[-1])


def more_than_half(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns the value of a key to which softmax gives more than half of the weight; zeros if there is none."""
    return (_scores(q, k, causal).softmax(-1) > 0.5).to(v.dtype) @ v


def one_for_all(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns for every query the value of one key, that with the largest score of any query."""
    best = _scores(q, k, causal).amax(-2).argmax(-1)
    return v[torch.arange(len(v)), best][:, None].expand(-1, q.shape[-2], -1)


def first_batch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return v[0][_scores(q, k, causal).argmax(-1)]


def one_later(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns argmax attention in which a query also sees the next key."""
    assert causal
    T = q.shape[-2]
    return _pick((q @ k.mT).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(1), float("-inf")).argmax(-1), v)


def masked_after(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Returns argmax attention with zeros for queries whose best key is a later one."""
    assert causal
    return one_hot((q @ k.mT).argmax(-1), k.shape[-2]).to(v.dtype).tril() @ v


def long_queries_do_not_matter(f: Function, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    """Returns what is wrong if ten times the query has another output: its best key is the same."""
    if torch.allclose(f(q, k, v, causal), f(10 * q, k, v, causal), atol=1e-5):
        return None
    return "a query ten times as long gets another output, though the best key is the same"
