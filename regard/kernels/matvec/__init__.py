"""A matrix times one vector or a few, as decoding asks for, with what stands before and after it.

    y = activation(norm(x) Wᵀ + b) + residual          gated: y = silu(norm(x) Wᵀ + b) ∘ (norm(x) Cᵀ + c) + residual

The tensors of the Triton programs (triton_project.py), all contiguous:

    name       shape      meaning
    x          [M,K]      the vectors, M ≤ 64 of them
    gamma      [K]        the norm's weight
    beta       [K]        the norm's bias
    w          [N,K]      the matrix; gated, [2N,K]: W and then C
    b          [N]        the bias; gated, [2N]
    residual   [M,N]      what is added
    y          [M,N]      the result

A program takes anything for a tensor that a call has not.
"""

from regard.kernels.matvec.linear import linear

__all__ = ["linear"]
