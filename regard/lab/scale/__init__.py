"""Why scores are divided by √d."""

from regard.lab.scale.results import Scale
from regard.lab.scale.run import gradient_norm, identity, jacobian_norm, products, saturation, sums

__all__ = ["Scale", "gradient_norm", "identity", "jacobian_norm", "products", "saturation", "sums"]
