"""Hugging Face models: opening them without running anyone's code, replacing and recording their attention.

To read in this order:

- files: `safety` and `gate` (what is refused), `weights`, `fetching` (transformers' models), `opening` (any model);
- attention: `masks`, `calls`, `cache`, `recording` (weights in chunks), `memories` (gated and delta layers),
  `attention` (the entries in transformers' tables: recording, and calling replacements), `replacement` (`use` and
  `restore`), `entries` (`register`);
- converting weights between transformers' models and regard's: `keys`, `families`, `loading`, `exporting`,
  `tokenizer_files`;
- on top of these: `classifier` (fine-tunes an encoder), `costs`, `tiny` (small configs), `small_model`.
"""

from regard.hub.attention import AttentionRecorder, Call, HubError, recording_attention
from regard.hub.entries import register
from regard.hub.exporting import Exported, NoEquivalentError, export
from regard.hub.fetching import LoadedModel, display_name, fetch, is_hub_folder, save_pretrained, untrained
from regard.hub.loading import load
from regard.hub.opening import ModelSource, find_source, load_regard_model, open_model
from regard.hub.replacement import Part, Place, places, restore, use

__all__ = [
    "AttentionRecorder",
    "Call",
    "Exported",
    "HubError",
    "LoadedModel",
    "ModelSource",
    "NoEquivalentError",
    "Part",
    "Place",
    "display_name",
    "export",
    "fetch",
    "find_source",
    "is_hub_folder",
    "load",
    "load_regard_model",
    "open_model",
    "places",
    "recording_attention",
    "register",
    "restore",
    "save_pretrained",
    "untrained",
    "use",
]
