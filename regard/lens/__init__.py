"""Seeing what a model attends to."""

from regard.lens.maps import attention_maps

__all__ = ["attention_maps"]
