"""Why scores are divided by √d."""

from regard.lab.scale.run import Scale, gradient_norm, identity, jacobian_norm, products, saturation, sums

__all__ = ["Scale", "gradient_norm", "identity", "jacobian_norm", "products", "saturation", "sums"]
