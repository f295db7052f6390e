"""Pairs of texts for a Hugging Face model: how its tokenizer joins them, and which text each token belongs to."""

from __future__ import annotations

import warnings
from typing import Any

from regard.errors import OptionError

BETWEEN = "\n"  # what stands between the two texts where they are shown as one


def check_pair(model: Any, text: Any, pair: Any, tokenizer: Any) -> None:
    """Raises OptionError if a model cannot be given two texts: its tokenizer puts nothing between them."""
    if not isinstance(text, str) or not isinstance(pair, str):
        raise OptionError("a pair is two texts, which the model's tokenizer joins: give both as text, not as token ids")
    if tokenizer is None:
        raise OptionError("a pair needs a tokenizer, which joins the two texts: give tokenizer=")
    if not joins_pairs(model, tokenizer):
        raise OptionError(
            f"a {type(model).__name__} reads one text: its tokenizer puts nothing between two, and the model does not "
            "tell them apart; leave out the pair, or write both in one text"
        )


def joins_pairs(model: Any, tokenizer: Any) -> bool:
    """Returns whether a model can tell two texts apart: by what its tokenizer puts between them, or by token types."""
    if tokenizer is None:
        return False
    alone, both = (tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return bool(alone < both or _token_types(model) > 1)


def tokenizer_options(model: Any) -> dict[str, Any]:
    """Returns the options with which a tokenizer is given a pair: it returns token types if the model has several."""
    if _token_types(model) < 2:
        return {}
    return {"return_token_type_ids": True}


def warn_about_typed_separator(model: Any, text: str, tokenizer: Any) -> None:
    """Warns where a separator is typed in a single text: the model then reads both sides as one segment."""
    separator = getattr(tokenizer, "sep_token", None)
    if separator and separator in text.strip() and _token_types(model) > 1:
        warnings.warn(
            f"{separator} is typed in the text, so both sides of it have token type 0, which {type(model).__name__} "
            "was not trained on: give the second text by itself, as pair= or --pair",
            stacklevel=5,
        )


def segments_of(encoding: Any, ids: list[int], first: str, tokenizer: Any) -> list[int]:
    """Returns which text each token of a pair belongs to: 0 or 1, or −1 for special tokens between them."""
    if getattr(tokenizer, "is_fast", False):
        return [-1 if text is None else int(text) for text in encoding.sequence_ids(0)]
    # A slow tokenizer tells no texts apart, but the tokens of the first come first, as many as it has alone.
    special = {int(i) for i in tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    left = len(tokenizer(first, add_special_tokens=False)["input_ids"])
    segment = []
    for i in ids:
        if i in special:
            segment.append(-1)
            continue
        segment.append(0 if left > 0 else 1)
        left -= 1
    return segment


def _token_types(model: Any) -> int:
    return int(getattr(model.config, "type_vocab_size", 0) or 0)
