"""Quadratic attention in Triton, pair by pair."""

from regard.kernels.quadratic import register

__all__ = ["register"]
