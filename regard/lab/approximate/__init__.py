"""How far random features are from softmax."""

from regard.lab.approximate.results import Approximate
from regard.lab.approximate.run import bias, relative_kernel, relative_variance, shift, variance_law

__all__ = ["Approximate", "bias", "relative_kernel", "relative_variance", "shift", "variance_law"]
