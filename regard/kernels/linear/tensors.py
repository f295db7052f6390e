"""Groups of tensors that are passed together. The package's docstring explains each tensor."""

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
    sums: Tensor | None  # the initial state, [B,G,F,V+1]
    peak: Tensor | None  # its peak, [B,G]
    map: str  # the feature map: "precomputed" (q and k are features), "elu", "performer", "fourier"
    causal: bool
    final: bool  # whether the state after the last token is wanted
    needs_grad: bool  # whether the backward pass will run


class ForwardResults(NamedTuple):
    """What the forward pass writes: the output, the final state if it is wanted, and the tensors that the backward pass
    needs. Tensors that the kernels of a call neither write nor read are empty."""

    out: Tensor
    final_sums: Tensor
    final_peak: Tensor
    inv_norm: Tensor
    query_peak: Tensor
    segment_sums: Tensor
    segment_S_cast: Tensor
    running_scales: Tensor
    chunk_S: Tensor
    chunk_Z_scales: Tensor
    q_shift: Tensor
    k_shift: Tensor
    stabiliser: Tensor


class SavedTensors(NamedTuple):
    """What the backward pass reads: inputs of the call, then `ForwardResults` without the final state."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    visible: Tensor | None
    peak: Tensor | None
    out: Tensor
    inv_norm: Tensor
    query_peak: Tensor
    segment_sums: Tensor
    segment_S_cast: Tensor
    running_scales: Tensor
    chunk_S: Tensor
    chunk_Z_scales: Tensor
    q_shift: Tensor
    k_shift: Tensor
    stabiliser: Tensor

    @classmethod
    def of(cls, call: LinearCall, results: ForwardResults) -> SavedTensors:
        """Returns the tensors that the backward pass of this call reads."""
        return cls(call.q, call.k, call.v, call.w, call.visible, call.peak, results.out, *results[3:])


class BackwardSums(NamedTuple):
    """R and ρ of each query head, summed over the queries from the end. They are stored as S and Z are: the segment
    sums hold R and ρ, chunk_Z_scales holds ρ."""

    segment_sums: Tensor
    segment_R_cast: Tensor
    running_scales: Tensor
    chunk_R: Tensor
    chunk_Z_scales: Tensor


def with_unit_stride(x: Tensor) -> Tensor:
    """Returns x [B,N,T,W] with stride 1 in its last dimension, as the kernels read it; a contiguous copy if
    necessary."""
    if x.stride(3) == 1:
        return x
    return x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Returns the strides of batch, heads and tokens of each tensor [B,N,T,W], in one flat tuple."""
    return tuple(n for x in tensors for n in x.stride()[:3])


def size_if(needed: bool, size: int) -> int:
    """Returns the size of a dimension, or 0 for a tensor that is not needed."""
    if needed:
        return size
    return 0
