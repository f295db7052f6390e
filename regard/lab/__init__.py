"""Experiments: one folder each, with what it measures (`run.py`) and how that is shown (`page.py`).

`regard.lab.design` makes queries and keys that do what is asked of them.
"""

from regard.lab import approximate, design, scale, two_heads
from regard.lab.base import EXPERIMENTS

__all__ = ["EXPERIMENTS", "approximate", "design", "scale", "two_heads"]
