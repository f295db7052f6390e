"""Hugging Face models: loading them without running anyone's code, and hearing their attention."""

from regard.hub.attention import Call, Ear, HubError, listening
from regard.hub.foreign import Foreign, fetch, is_foreign, titled, untrained

__all__ = ["Call", "Ear", "Foreign", "HubError", "fetch", "is_foreign", "listening", "titled", "untrained"]
