"""Synthesizers: attention whose weights do not compare queries with keys. Heads come second; T tokens, at most L.

Dense:  weights = softmax(relu(x·w1 + b1)·w2 + b2), over the first T columns.   Random:  softmax(R[:T, :T]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, leaky_relu

from regard.grade.cases import Draw, GradeCase, causal_mask

Function = Callable[..., Tensor]
NEVER = float("-inf")


def dense(draw: Draw) -> Iterator[GradeCase]:
    """Yields inputs of the dense synthesizer, shorter than its L tokens and as long."""
    for B, H, T, K, V, L in ((2, 3, 5, 4, 7, 11), (1, 2, 6, 3, 2, 6)):
        yield GradeCase(_dense_arguments(draw, (B, H, T, K, V, L)))


def random(draw: Draw) -> Iterator[GradeCase]:
    """Yields inputs of the random synthesizer, shorter than its L tokens and as long."""
    for B, H, T, V, L in ((2, 3, 5, 7, 11), (1, 2, 6, 3, 6)):
        yield GradeCase((draw.normal(H, L, L), draw.normal(B, H, T, V)))


def _dense_arguments(draw: Draw, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns x, w1, b1, w2, b2, v."""
    B, H, T, *widths = sizes
    K, V, L = widths
    x = draw.normal(B, H, T, K)
    weights = (draw.normal(K, K), draw.normal(K), draw.normal(K, L), draw.normal(L))
    return (x, *weights, draw.normal(B, H, T, V))


def _mix(scores: Tensor, v: Tensor) -> Tensor:
    """Returns causal softmax of scores [B,H,T,T] times values."""
    return scores.masked_fill(~causal_mask(v.shape[-2]), NEVER).softmax(-1) @ v


def _hidden(x: Tensor, w1: Tensor, b1: Tensor) -> Tensor:
    return torch.relu(x @ w1 + b1)


def dense_synthesizer(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    """Returns causal dense synthesizer attention, [B,H,T,V]."""
    return _mix((_hidden(x, w1, b1) @ w2 + b2)[..., : v.shape[-2]], v)


def random_synthesizer(R: Tensor, v: Tensor) -> Tensor:
    """Returns causal random synthesizer attention, [B,H,T,V]."""
    T = v.shape[-2]
    return _mix(R[:, :T, :T], v)


def no_relu(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix(((x @ w1 + b1) @ w2 + b2)[..., : v.shape[-2]], v)


def relu_after(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix(torch.relu((x @ w1 + b1) @ w2 + b2)[..., : v.shape[-2]], v)


def no_second_bias(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix((_hidden(x, w1, b1) @ w2)[..., : v.shape[-2]], v)


def no_first_bias(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return dense_synthesizer(x, w1, torch.zeros_like(b1), w2, b2, v)


def dense_tanh(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix(((x @ w1 + b1).tanh() @ w2 + b2)[..., : v.shape[-2]], v)


def dense_gelu(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix((gelu(x @ w1 + b1) @ w2 + b2)[..., : v.shape[-2]], v)


def last_columns(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix((_hidden(x, w1, b1) @ w2 + b2)[..., -v.shape[-2] :], v)


def dense_scaled(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix((_hidden(x, w1, b1) @ w2 + b2)[..., : v.shape[-2]] / x.shape[-1] ** 0.5, v)


def dense_not_causal(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return (_hidden(x, w1, b1) @ w2 + b2)[..., : v.shape[-2]].softmax(-1) @ v


def dense_masked_by_zero(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return ((_hidden(x, w1, b1) @ w2 + b2)[..., :T] * causal_mask(T)).softmax(-1) @ v


def softmax_before_cut(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    weights = (_hidden(x, w1, b1) @ w2 + b2).softmax(-1)[..., :T]
    return (weights * causal_mask(T)) @ v


def _dense_scores(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, T: int) -> Tensor:
    return (_hidden(x, w1, b1) @ w2 + b2)[..., :T]


def _hidden_after(scores: Tensor, v: Tensor) -> Tensor:
    return (scores.softmax(-1) * causal_mask(v.shape[-2])) @ v


def _over_queries(scores: Tensor, v: Tensor) -> Tensor:
    return scores.masked_fill(~causal_mask(v.shape[-2]), NEVER).softmax(-2) @ v


def _without_itself(scores: Tensor, v: Tensor) -> Tensor:
    return scores.masked_fill(~causal_mask(v.shape[-2]).tril(-1), NEVER).softmax(-1) @ v


def _inverted(scores: Tensor, v: Tensor) -> Tensor:
    return scores.masked_fill(~causal_mask(v.shape[-2]).mT, NEVER).softmax(-1) @ v


def dense_hidden_after(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _hidden_after(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]), v)


def dense_over_queries(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _over_queries(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]), v)


def dense_without_itself(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _without_itself(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]), v)


def dense_inverted(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _inverted(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]), v)


def dense_sigmoid(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix(((x @ w1 + b1).sigmoid() @ w2 + b2)[..., : v.shape[-2]], v)


def dense_relu_before(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix(((torch.relu(x) @ w1 + b1) @ w2 + b2)[..., : v.shape[-2]], v)


def dense_bias_after_relu(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix((torch.relu(x @ w1) + b1) @ w2[:, : v.shape[-2]] + b2[: v.shape[-2]], v)


def dense_softmax_twice(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _softmax_twice(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]), v)


def random_softmax_twice(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return _softmax_twice(R[:, :T, :T], v)


def random_softmax_before(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return _mix(R[:, :T, :T].softmax(-1), v)


def random_relu(R: Tensor, v: Tensor) -> Tensor:
    return random_synthesizer(torch.relu(R), v)


def _softmax_twice(scores: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention in which the causal softmax is applied twice."""
    hidden = ~causal_mask(v.shape[-2])
    return _mix(scores.masked_fill(hidden, NEVER).softmax(-1), v)


def dense_not_divided(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _dense_scores(x, w1, b1, w2, b2, v.shape[-2]).exp().tril() @ v


def random_not_divided(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return R[:, :T, :T].exp().tril() @ v


def dense_leaky(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix((leaky_relu(x @ w1 + b1) @ w2 + b2)[..., : v.shape[-2]], v)


def relu_twice(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _mix(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]).relu(), v)


def dense_transposed(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return dense_synthesizer(x, w1.mT, b1, w2, b2, v)


def _one_later(scores: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(1), NEVER).softmax(-1) @ v


def dense_one_later(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, v: Tensor) -> Tensor:
    return _one_later(_dense_scores(x, w1, b1, w2, b2, v.shape[-2]), v)


def random_one_later(R: Tensor, v: Tensor) -> Tensor:
    return _one_later(_random_scores(R, v), v)


def random_even(R: Tensor, v: Tensor) -> Tensor:
    return _mix(torch.zeros_like(_random_scores(R, v)), v)


def random_masked_by_zero(R: Tensor, v: Tensor) -> Tensor:
    return _random_scores(R, v).tril().softmax(-1) @ v


def _random_scores(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return R[:, :T, :T].expand(v.shape[0], -1, -1, -1)


def random_hidden_after(R: Tensor, v: Tensor) -> Tensor:
    return _hidden_after(_random_scores(R, v), v)


def random_over_queries(R: Tensor, v: Tensor) -> Tensor:
    return _over_queries(_random_scores(R, v), v)


def random_without_itself(R: Tensor, v: Tensor) -> Tensor:
    return _without_itself(_random_scores(R, v), v)


def random_inverted(R: Tensor, v: Tensor) -> Tensor:
    return _inverted(_random_scores(R, v), v)


def random_transposed(R: Tensor, v: Tensor) -> Tensor:
    return _mix(_random_scores(R, v).mT, v)


def random_scaled(R: Tensor, v: Tensor) -> Tensor:
    return _mix(_random_scores(R, v) / v.shape[-1] ** 0.5, v)


def random_not_causal(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return R[:, :T, :T].softmax(-1).expand(v.shape[0], -1, -1, -1) @ v


def random_softmax_before_cut(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return (R.softmax(-1)[:, :T, :T] * causal_mask(T)).expand(v.shape[0], -1, -1, -1) @ v


def random_other_rows(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return _mix(R[:, -T:, :T], v)


def random_no_softmax(R: Tensor, v: Tensor) -> Tensor:
    return _random_scores(R, v).tril() @ v


def random_one_head(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return _mix(R[:1, :T, :T], v)


def random_from_end(R: Tensor, v: Tensor) -> Tensor:
    T = v.shape[-2]
    return _mix(R[:, -T:, -T:], v)


def dense_looks_back(f: Function, x: Tensor, *rest: Tensor) -> Any:
    """Returns the slip of an output that depends on later tokens, or what is wrong with the output's shape."""
    *weights, v = rest
    before = f(x, *weights, v)
    if before.shape != v.shape:
        return f"the output has the shape {list(before.shape)}, expected {list(v.shape)}"
    changed = (x.clone(), v.clone())
    for tensor in changed:
        tensor[..., -1, :] += 3.0
    after = f(changed[0], *weights, changed[1])
    if torch.allclose(before[..., :-1, :], after[..., :-1, :], atol=1e-5, equal_nan=True):
        return None
    return "looks_ahead"
