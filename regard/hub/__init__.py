"""Hugging Face models: loading them without running anyone's code, and hearing their attention."""

from regard.hub.attention import Call, Ear, HubError, listening
from regard.hub.check import HUB_LAWS, HubSubject
from regard.hub.export import Exported, NoEquivalentError, export
from regard.hub.foreign import Foreign, fetch, is_foreign, store, titled, untrained
from regard.hub.load import load
from regard.hub.use import Part, Place, places, restore, use

__all__ = [
    "HUB_LAWS",
    "Call",
    "Ear",
    "Exported",
    "Foreign",
    "HubError",
    "HubSubject",
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
