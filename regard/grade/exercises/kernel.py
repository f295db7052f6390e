"""Kernel attention over q [B,T,K], k [B,S,K], v [B,S,V] with a feature map φ, in two forms with equal outputs.

Pairs:  out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s).   Linear:  out_t = φ(q_t) S_t / φ(q_t) z_t with the sums
S_t = Σ_s φ(k_s) v_sᵀ and z_t = Σ_s φ(k_s), which never form a matrix of all pairs. Causal: s runs up to t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.grade.cases import Draw, GradeCase, causal_mask

Map = Callable[[Tensor], Tensor]
Function = Callable[..., Tensor]


def elu_plus_one(x: Tensor) -> Tensor:
    """Returns elu(x) + 1."""
    return torch.nn.functional.elu(x) + 1


def squares(x: Tensor) -> Tensor:
    """Returns all products of two coordinates, so that φ(q)·φ(k) = (q·k)²."""
    return (x[..., :, None] * x[..., None, :]).flatten(-2)


def both_ways(draw: Draw) -> Iterator[GradeCase]:
    """Yields cases in which every query sees every key."""
    for phi, (B, T, S, K, V) in (
        (elu_plus_one, (2, 5, 7, 3, 11)),
        (squares, (1, 7, 3, 2, 5)),
        (squares, (2, 5, 5, 2, 3)),
    ):
        yield GradeCase((draw.normal(B, T, K), draw.normal(B, S, K), draw.normal(B, S, V), phi, False))


def causal(draw: Draw) -> Iterator[GradeCase]:
    """Yields causal cases."""
    for phi, (B, T, K, V) in ((elu_plus_one, (2, 7, 3, 5)), (squares, (1, 11, 2, 3))):
        tensors = (draw.normal(B, T, K), draw.normal(B, T, K), draw.normal(B, T, V))
        yield GradeCase((*tensors, phi, True), words="causal")


def long(draw: Draw) -> Iterator[GradeCase]:
    """Yields long sequences, for which a matrix of all pairs is much larger than all other tensors."""
    for flag, words in ((False, "not causal"), (True, "causal")):
        tensors = (draw.normal(1, 600, 2), draw.normal(1, 600, 2), draw.normal(1, 600, 3))
        yield GradeCase((*tensors, elu_plus_one, flag), words=words)


def _similarities(q: Tensor, k: Tensor, phi: Map, is_causal: bool) -> Tensor:
    found = phi(q) @ phi(k).mT
    if is_causal:
        found = found * causal_mask(q.shape[-2])
    return found


def _divide(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v / weights.sum(-1, keepdim=True)


def kernel_attention(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    """Returns kernel attention [B,T,V], computed by pairs; it is the reference of both forms."""
    return _divide(_similarities(q, k, phi, causal), v)


def not_normalised(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return _similarities(q, k, phi, causal) @ v


def ignores_causal(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return kernel_attention(q, k, v, phi, False)


def without_itself(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = _similarities(q, k, phi, causal).tril(-1)
    return (weights @ v / weights.sum(-1, keepdim=True)).nan_to_num(0.0)


def softmax_of_similarities(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = phi(q) @ phi(k).mT
    if causal:
        weights = weights.masked_fill(~causal_mask(q.shape[-2]), float("-inf"))
    return weights.softmax(-1) @ v


def map_of_scores(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = phi(q @ k.mT)
    if causal:
        weights = weights * causal_mask(q.shape[-2])
    return _divide(weights, v)


def scaled(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return kernel_attention(q / q.shape[-1] ** 0.5, k, v, phi, causal)


def normalised_over_queries(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = _similarities(q, k, phi, causal)
    return weights / weights.sum(-2, keepdim=True) @ v


def divided_by_keys(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    assert not causal
    return not_normalised(q, k, v, phi, causal) / phi(k).sum((-2, -1), keepdim=True)


def no_map(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return kernel_attention(q, k, v, lambda x: x, causal)


def map_of_keys_only(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = q @ phi(k).mT
    if causal:
        weights = weights * causal_mask(q.shape[-2])
    return _divide(weights, v)


def map_of_queries_only(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = phi(q) @ k.mT
    if causal:
        weights = weights * causal_mask(q.shape[-2])
    return _divide(weights, v)


def always_causal(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return kernel_attention(q, k, v, phi, q.shape[-2] == k.shape[-2])


def sees_what_is_later(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    assert causal
    return _divide(_similarities(q, k, phi, False).triu(), v)


def one_later(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    assert causal
    return _divide(_similarities(q, k, phi, False).tril(1), v)


def map_twice(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return kernel_attention(phi(q), phi(k), v, phi, causal)


def unit_rows(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    return normalize(_similarities(q, k, phi, causal), dim=-1) @ v


def normalised_by_all(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    everything = _similarities(q, k, phi, False).sum(-1, keepdim=True)
    return _similarities(q, k, phi, causal) @ v / everything


def sums_of_all(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    own = _similarities(q, k, phi, causal).sum(-1, keepdim=True)
    return phi(q) @ (phi(k).mT @ v) / own


def hidden_by_large_negative(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    assert causal
    weights = (phi(q) @ phi(k).mT).masked_fill(~causal_mask(q.shape[-2]), -1e9)
    return _divide(weights, v)


def hidden_by_infinity(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    assert causal
    weights = (phi(q) @ phi(k).mT).masked_fill(~causal_mask(q.shape[-2]), float("-inf"))
    return _divide(weights, v)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~causal_mask(q.shape[-2]), float("-inf"))
    return scores.softmax(-1) @ v


def divided_by_everything(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = _similarities(q, k, phi, causal)
    return weights @ v / weights.sum()


def first_row_without_itself(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    """Returns kernel attention with a mask without its diagonal: the first row is 0/0, NaN."""
    assert causal
    return _divide(_similarities(q, k, phi, causal).tril(-1), v)


def divided_by_count(q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Tensor:
    weights = _similarities(q, k, phi, causal)
    seen = (weights != 0).sum(-1, keepdim=True)
    return weights @ v / seen


class _LargestTensor(TorchDispatchMode):
    """Records the number of entries of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return made


def forms_no_pairs(f: Function, q: Tensor, k: Tensor, v: Tensor, phi: Map, causal: bool) -> Any:
    """Returns the slip of a linear form that computes a matrix of all pairs of queries and keys."""
    with _LargestTensor() as largest:
        f(q, k, v, phi, causal)
    # Sums of every prefix, T·K·V entries, are fine; T·T are not.
    if largest.entries >= q.shape[1] * k.shape[1]:
        return "forms_pairs"
    return None
