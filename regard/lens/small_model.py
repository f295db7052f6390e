"""The small model that is bundled with regard, which the lens shows where no model is named."""

from regard.hub.opening import is_shipped
from regard.hub.small_model import NAME, SUMS, TEXT, ShippedError, shipped, shipped_text

__all__ = ["NAME", "SUMS", "TEXT", "ShippedError", "is_shipped", "shipped", "shipped_text"]
