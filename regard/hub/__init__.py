"""Hugging Face models: loading them without running anyone's code, and hearing their attention."""

from regard.hub.attention import Call, Ear, HubError, listening
from regard.hub.load import Foreign, is_foreign, load, titled, untrained

__all__ = ["Call", "Ear", "Foreign", "HubError", "is_foreign", "listening", "load", "titled", "untrained"]
