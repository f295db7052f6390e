"""Attention masks as rules (causal, window, chunk, padding), evaluated for any rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.lens.trace.tokens import Tokens

# "later": the causal mask hides a later key. "model": a mask of the model's own that no rule describes.
REASONS = ("padding", "later", "window", "chunk", "model")
MAX_ENTRIES = 1 << 21  # entries of mask or weights that are computed at a time


@dataclass(frozen=True)
class MaskRules:
    """An attention mask as a combination of rules; padding keys are always masked.

    causal: a query attends to keys at its own position or before. window: only to keys at a distance less than this.
    chunk: only to keys in the same chunk of so many positions. hidden: an explicit mask, True where an entry is masked.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    hidden: Bool[Tensor, "T S"] | None = None

    def reasons(self, queries: Tokens, keys: Tokens, rows: Int[Tensor, " R"]) -> Int[Tensor, "R S"]:
        """Returns for each entry 0 if it is allowed, else 1 + the index in REASONS of the first reason that applies."""
        p = queries.position_tensor[rows][:, None]
        other = keys.position_tensor[None, :]
        # Written in reverse order of REASONS, so that the first reason wins.
        reasons = torch.zeros(len(rows), len(keys), dtype=torch.int8)
        if self.hidden is not None:
            reasons[self.hidden[rows, : len(keys)]] = 5
        if self.chunk is not None:
            reasons[p // self.chunk != other // self.chunk] = 4
        if self.window is not None:
            reasons[(p - other).abs() >= self.window] = 3
        if self.causal:
            # A padding query shares its position with the next token that is not padding, which comes later.
            reasons[other >= p + queries.not_padding[rows][:, None].long()] = 2
        reasons[:, ~keys.not_padding] = 1
        return reasons

    def reach(self, queries: Tokens, keys: Tokens, rows: Int[Tensor, " R"]) -> int:
        """Returns the length of a key prefix that contains every key these queries may attend to.

        Only the causal rule makes it shorter than all keys. It is at least 1 if there are keys.
        """
        if not self.causal or not len(rows):
            return len(keys)
        near = (keys.position_tensor <= queries.position_tensor[rows].amax()).nonzero()
        if not len(near):
            return min(1, len(keys))
        return int(near[-1]) + 1

    def allowed(self, queries: Tokens, keys: Tokens, rows: Int[Tensor, " R"]) -> Bool[Tensor, "R S"]:
        """Returns True for every entry that is not masked: where `reasons` gives 0, in fewer passes."""
        p = queries.position_tensor[rows][:, None]
        other = keys.position_tensor[None, :]
        allowed = keys.not_padding[None].repeat(len(rows), 1)
        if self.causal:
            allowed &= other < p + queries.not_padding[rows][:, None].long()
        if self.window is not None:
            allowed &= (p - other).abs() < self.window
        if self.chunk is not None:
            allowed &= p // self.chunk == other // self.chunk
        if self.hidden is not None:
            allowed &= ~self.hidden[rows, : len(keys)]
        return allowed

    def as_dict(self) -> dict[str, object]:
        return {
            "causal": self.causal,
            "window": self.window,
            "chunk": self.chunk,
            "hidden": self.hidden is not None,
        }


def infer_rules(allowed: Bool[Tensor, "T S"] | None, queries: Tokens, keys: Tokens, cross: bool) -> MaskRules:
    """Returns the simplest rules that reproduce this mask (True: allowed); padding queries are ignored.

    If no rules reproduce it, returns rules with its inverse as `hidden`, which then applies to all heads.
    """
    if allowed is None:
        return MaskRules()
    candidates = [MaskRules()]
    if not cross:
        candidates += [MaskRules(causal=True)]
        # The size of a window is the number of allowed keys of a row if the mask is causal, else the number of allowed
        # keys up to the query itself.
        widths = [int(allowed[row].sum()) for row in _rows_showing_window(queries)]
        widths += [int(allowed[row, : row + 1].sum()) for row in _rows_showing_window(queries)]
        candidates += [MaskRules(causal=c, window=w) for w in sorted(set(widths)) if w > 0 for c in (True, False)]
        after_first_chunk = (~allowed[:, 0] & queries.not_padding).nonzero()[:, 0]
        if len(after_first_chunk):
            candidates.append(MaskRules(causal=True, chunk=max(1, queries.positions[int(after_first_chunk[0])])))
    for rules in candidates:
        if _reproduces(rules, allowed, queries, keys):
            return rules
    return MaskRules(hidden=~allowed)


def _rows_showing_window(queries: Tokens) -> list[int]:
    """Returns the last and the middle one of the queries that are not padding; [] if all are padding.

    The numbers of keys that they may attend to are candidates for the size of the window.
    """
    rows = queries.not_padding.nonzero()[:, 0]
    if not len(rows):
        return []
    return [int(rows[-1]), int(rows[len(rows) // 2])]


def _reproduces(rules: MaskRules, allowed: Tensor, queries: Tokens, keys: Tokens) -> bool:
    """Returns whether the rules allow exactly the entries of this mask, padding aside."""
    step = max(1, MAX_ENTRIES // max(1, len(keys)))
    for rows in torch.arange(len(queries)).split(step):
        rows = rows[queries.not_padding[rows]]
        if not torch.equal(rules.allowed(queries, keys, rows), allowed[rows] & keys.not_padding):
            return False
    return True
