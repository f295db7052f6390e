"""A matrix times one vector, as decoding asks for.

The tensors of the Triton program (triton_matvec.py), all contiguous:

    name    shape     meaning
    x       [...,K]   one vector; all its other dimensions are 1
    w       [N,K]     the matrix
    b       [N]       the bias, or anything where there is none
    y       [...,N]   x Wᵀ + b
"""

from regard.kernels.matvec.linear import linear

__all__ = ["linear"]
