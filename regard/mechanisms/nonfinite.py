"""Keeps NaN and infinity to the rows that may see them: a weight of zero times NaN is NaN, not zero.

Such entries of keys and values are replaced by zeros before any product, and the rows that see their token are made NaN
afterwards. So a token that is not a number reaches no earlier row, no other document, and none of their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.mechanisms.base import can_read
from regard.shapes import Mask


class FiniteTokens(NamedTuple):
    """Keys and values with zeros for NaN and infinity, and the tokens that held one.

    `broken` is None where it is known that no token did.
    """

    k: Tensor | None  # [B,G,S,K]
    v: Tensor  # [B,G,S,V]
    broken: Bool[Tensor, "B G S"] | None


def replace_nonfinite(k: Tensor | None, v: Tensor, mask: Mask) -> FiniteTokens:
    """Returns k and v with zeros for NaN, infinity, and hidden tokens, which are never `broken`."""
    v = mask.zero_hidden(v)
    broken = _is_broken(v)
    if k is not None:
        k = mask.zero_hidden(k)
        broken = broken | _is_broken(k)
    # On a CPU looking costs little, and there is hardly ever anything to do. On a GPU it would wait for the device.
    if v.device.type == "cpu" and can_read(v) and not broken.any():
        return FiniteTokens(k, v, None)
    if k is not None:
        k = k.nan_to_num(0.0, 0.0, 0.0)
    return FiniteTokens(k, v.nan_to_num(0.0, 0.0, 0.0), broken)


def _is_broken(x: Tensor) -> Bool[Tensor, "B G S"]:
    """Returns which vectors hold NaN or infinity: those whose multiple by zero is not zero."""
    return (x.detach() * 0).sum(-1) != 0  # a twentieth of the time of isfinite on a CPU


def rows_that_see(broken: Tensor | None, mask: Mask, T: int) -> Bool[Tensor, "B G #T"] | None:
    """Returns which of T queries may see a broken token; None where there is none."""
    if broken is None:
        return None
    if mask.window is None and mask.rows is None:
        return rows_of_documents(broken, mask.documents, mask.causal, T)
    allowed = mask.allowed(T, broken.shape[2], broken.device)
    if allowed is None:
        return broken.any(-1, keepdim=True)
    return (allowed & broken[:, :, None, :]).any(-1)


def rows_of_documents(
    broken: Bool[Tensor, "B G S"] | None, documents: Int[Tensor, "B S"] | None, causal: bool, T: int
) -> Bool[Tensor, "B G #T"] | None:
    """Returns which of the last T tokens have a broken one in their document, at or before them where causal.

    None where no token is broken. It takes no matrix [T,S]. A window is not looked at: within one document a row may be
    counted too many.
    """
    if broken is None:
        return None
    if documents is None and not causal:
        return broken.any(-1, keepdim=True)
    rows = _broken_before(broken, documents)
    if documents is not None and not causal:
        after = _broken_before(broken.flip(-1), documents.flip(-1))
        rows = rows | after.flip(-1)
    return rows[..., broken.shape[2] - T :]


def _broken_before(broken: Tensor, documents: Tensor | None) -> Tensor:
    """Returns for each token whether its document holds a broken one at or before it; ids of documents only grow."""
    count = broken.cumsum(-1)
    if documents is None:
        return count > 0
    # The count at the end of the document before: it never falls, so that its maximum so far is the latest one.
    at_start = torch.zeros_like(count)
    starts = (documents[:, 1:] != documents[:, :-1])[:, None]
    at_start[..., 1:] = torch.where(starts, count[..., :-1], 0)
    if at_start.shape[-1] > 0:
        at_start = at_start.cummax(-1).values
    return count > at_start


def mark_rows(out: Tensor, rows: Bool[Tensor, "B G #T"] | None) -> Tensor:
    """Returns the output [B,H,T,V] with NaN in these rows, if any, of every group of query heads."""
    if rows is None:
        return out
    heads = out.shape[1] // rows.shape[1]
    return torch.where(rows.repeat_interleave(heads, 1)[..., None], float("nan"), out)
