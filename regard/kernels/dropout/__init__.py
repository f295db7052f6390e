"""Dropout on a CPU: random bits in bulk, and attention with dropout."""

from regard.kernels.dropout.mask import DropRate, RandomBits, draws_bits, dropout

__all__ = ["DropRate", "RandomBits", "draws_bits", "dropout"]
