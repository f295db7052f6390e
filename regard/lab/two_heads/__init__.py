"""One head against two."""

from regard.lab.two_heads.results import TwoHeads
from regard.lab.two_heads.run import weights

__all__ = ["TwoHeads", "weights"]
