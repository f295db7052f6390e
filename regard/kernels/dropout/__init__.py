"""Dropout on a CPU: random bits in bulk, and attention with dropout."""

from regard.kernels.dropout.mask import Share, Stream, dropout, suits

__all__ = ["Share", "Stream", "dropout", "suits"]
