"""Groups of tensors that travel together through a call of linear attention. The package's docstring explains each."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearCall(NamedTuple):
    """The arguments of one call, in the order of the operator `regard::linear_attention`."""

    q: Tensor  # [B,H,T,K]
    k: Tensor  # [B,G,T,K]
    v: Tensor  # [B,G,T,V]
    w: Tensor | None  # directions [D,K] of random features
    visible: Tensor | None  # [B,T]
    sums: Tensor | None  # a state to start from, [B,G,F,V+1]
    peak: Tensor | None  # its peak, [B,G]
    map: str  # the feature map: "given" (q and k are features), "elu", "performer", "fourier"
    causal: bool
    final: bool  # whether the state after the last token is wanted
    learns: bool  # whether a gradient will be


class ForwardResults(NamedTuple):
    """What forward writes: the output, the state after the last token where it is wanted, and what the gradient needs.
    Tensors that a call does not need are empty."""

    out: Tensor
    final_sums: Tensor
    final_peak: Tensor
    inv_norm: Tensor
    row_peak: Tensor
    segment_sums: Tensor
    segment_S_cast: Tensor
    segment_stats: Tensor
    chunk_S: Tensor
    chunk_stats: Tensor
    q_shift: Tensor
    k_shift: Tensor
    stabiliser: Tensor


class SavedTensors(NamedTuple):
    """What the gradient reads: inputs of the call, then `ForwardResults` without the final state."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    visible: Tensor | None
    peak: Tensor | None
    out: Tensor
    inv_norm: Tensor
    row_peak: Tensor
    segment_sums: Tensor
    segment_S_cast: Tensor
    segment_stats: Tensor
    chunk_S: Tensor
    chunk_stats: Tensor
    q_shift: Tensor
    k_shift: Tensor
    stabiliser: Tensor

    @classmethod
    def of(cls, call: LinearCall, results: ForwardResults) -> SavedTensors:
        """Returns what the gradient of this call reads."""
        return cls(call.q, call.k, call.v, call.w, call.visible, call.peak, results.out, *results[3:])


class BackwardSums(NamedTuple):
    """R and ρ, summed over the queries of each head from the end. Named as S and Z, whose places they take."""

    segment_sums: Tensor
    segment_S_cast: Tensor
    segment_stats: Tensor
    chunk_S: Tensor
    chunk_stats: Tensor


def with_unit_stride(x: Tensor) -> Tensor:
    """Returns x [B,N,T,W] with the numbers of a vector side by side, as the programs read them; copied if need be."""
    if x.stride(3) == 1:
        return x
    return x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Returns the strides of batch, heads and tokens of each tensor [B,N,T,W], one after the other."""
    return tuple(n for x in tensors for n in x.stride()[:3])


def size_if(needed: bool, size: int) -> int:
    """Returns the size of a dimension, or 0 for a tensor that is not needed."""
    if needed:
        return size
    return 0
