"""A causal window by blocks of queries: which rules allow it, and the rules of one block.

A block of C queries, C no less than the window, sees its own keys and those of the block before it. That holds where
whatever a query may see stands fewer than `window` places before it, in documents and behind padding as well: hidden
tokens that stand before all others leave no gaps. Gaps, and queries behind the last visible key, would reach farther.
"""

from __future__ import annotations

from torch import Tensor

from regard.mechanisms.base import can_read
from regard.shapes import Mask, Visible


def refuse_blocks(mask: Mask, T: int, S: int) -> str | None:
    """Returns why the rules of T queries over S keys cannot be taken block by block, or None."""
    if mask.window is None:
        return "it is for windows"
    if not mask.causal or mask.adjusts_scores or mask.rows is not None:
        return "it knows no rules beside causal, the window, documents and padding"
    if T != S:
        return "it takes each causal query to stand at the key of the same index"
    if mask.visible is not None and not _is_left_padded(mask.visible):
        return "it takes padding where it stands before all other tokens, and is read on a CPU"
    return None


def _is_left_padded(visible: Visible) -> bool:
    """Returns whether each row is known to hide nothing behind a visible token: asking a GPU would wait for it."""
    if visible.device.type != "cpu" or not can_read(visible):
        return False
    return bool((visible[:, 1:] >= visible[:, :-1]).all())


def rules_of_block(mask: Mask, first: int, end: int) -> Mask:
    """Returns the rules of the queries before `end` among the keys from `first` to there."""
    parts: dict[str, Tensor] = {}
    if mask.visible is not None:
        parts["visible"] = mask.visible[:, first:end]
    if mask.documents is not None:
        parts["documents"] = mask.documents[:, first:end]
    return mask.but(**parts)
