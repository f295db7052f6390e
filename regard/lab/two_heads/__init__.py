"""One head against two."""

from regard.lab.two_heads.run import TwoHeads, weights

__all__ = ["TwoHeads", "weights"]
