"""Experiments without a trained model: they calculate, and write what they found on a page.

`regard.lab.design` makes queries and keys that do what is asked of them.
"""

from regard.lab import approximate, design, scale, selecting, two_heads  # they register what `regard run` names
from regard.lab.base import LABS

__all__ = ["LABS", "approximate", "design", "scale", "selecting", "two_heads"]
