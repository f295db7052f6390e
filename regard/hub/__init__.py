"""Hugging Face models: loading them without running anyone's code, and hearing their attention."""

from regard.hub.attention import Call, Ear, HubError, listening
from regard.hub.exporting import Exported, NoEquivalentError, export
from regard.hub.foreign import Foreign, fetch, is_foreign, store, titled, untrained
from regard.hub.loading import load
from regard.hub.replacement import Part, Place, places, restore, use

__all__ = [
    "Call",
    "Ear",
    "Exported",
    "Foreign",
    "HubError",
    "NoEquivalentError",
    "Part",
    "Place",
    "export",
    "fetch",
    "is_foreign",
    "listening",
    "load",
    "places",
    "restore",
    "store",
    "titled",
    "untrained",
    "use",
]
