"""What the four masks of an encoder-decoder are, in words."""

from __future__ import annotations

from typing import NamedTuple

_ARTICLE = "the article's tokens"
_SUMMARY = "the summary's tokens"


class MaskCaption(NamedTuple):
    """The title and the caption of a mask's picture, and what its rows (queries) and columns (keys) are."""

    title: str
    text: str
    queries: str
    keys: str


MASK_CAPTIONS = {
    "encoder": MaskCaption(
        "Encoder: padding",
        "Every token of the article sees every other; what only fills the row up is hidden from all.",
        _ARTICLE,
        _ARTICLE,
    ),
    "causal": MaskCaption(
        "Decoder: causal",
        "A token of the summary sees itself and those before it, never those that it is to predict.",
        _SUMMARY,
        _SUMMARY,
    ),
    "decoder": MaskCaption(
        "Decoder: causal and padding",
        "The same for a summary that is shorter than its neighbour in the batch.",
        _SUMMARY,
        _SUMMARY,
    ),
    "cross": MaskCaption(
        "Cross-attention: padding",
        "Every token of the summary sees the whole article, and none of its padding.",
        _SUMMARY,
        _ARTICLE,
    ),
}
