"""Linear attention in Triton, segment by segment."""

from regard.kernels.linear import register

__all__ = ["register"]
