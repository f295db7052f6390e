"""A matrix times a few vectors, as decoding asks for."""

from regard.kernels.matvec.linear import linear

__all__ = ["linear"]
