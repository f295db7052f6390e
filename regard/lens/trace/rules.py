"""Who may see whom, and why not: the rules of one attention, evaluated for any rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.lens.trace.tokens import Tokens

REASONS = ("padding", "later", "window", "chunk", "model")
TILE = 1 << 21  # cells looked at together


@dataclass(frozen=True)
class Rules:
    """A cell is hidden for the first of `REASONS` that applies; keys that are padding always are."""

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    hidden: Bool[Tensor, "T S"] | None = None

    def reasons(self, queries: Tokens, keys: Tokens, rows: Int[Tensor, " R"]) -> Int[Tensor, "R S"]:
        """Returns for each cell 0 where it may be seen, else 1 + the number of the reason."""
        p = queries.places[rows][:, None]
        other = keys.places[None, :]
        # The last to apply is the first of REASONS, and overwrites the others.
        reasons = torch.zeros(len(rows), len(keys), dtype=torch.int8)
        if self.hidden is not None:
            reasons[self.hidden[rows, : len(keys)]] = 5
        if self.chunk is not None:
            reasons[p // self.chunk != other // self.chunk] = 4
        if self.window is not None:
            reasons[(p - other).abs() >= self.window] = 3
        if self.causal:
            reasons[other >= p + queries.seen[rows][:, None].long()] = 2
        reasons[:, ~keys.seen] = 1
        return reasons

    def reach(self, queries: Tokens, keys: Tokens, rows: Int[Tensor, " R"]) -> int:
        """Returns how many keys, from the first, hold all that these queries may see; at least one."""
        if not self.causal or not len(rows):
            return len(keys)
        near = (keys.places <= queries.places[rows].amax()).nonzero()
        if not len(near):
            return min(1, len(keys))
        return int(near[-1]) + 1

    def seen(self, queries: Tokens, keys: Tokens, rows: Int[Tensor, " R"]) -> Bool[Tensor, "R S"]:
        """Returns which cells may be seen."""
        return self.reasons(queries, keys, rows) == 0

    def as_dict(self) -> dict[str, object]:
        return {
            "causal": self.causal,
            "window": self.window,
            "chunk": self.chunk,
            "hidden": self.hidden is not None,
        }


def infer_rules(seen: Bool[Tensor, "T S"] | None, queries: Tokens, keys: Tokens, cross: bool) -> Rules:
    """Returns the shortest rules that allow just these cells; queries that are padding do not count.

    What no rule explains is kept bit by bit, which is still one bit a cell for all heads together.
    """
    if seen is None:
        return Rules()
    candidates = [Rules()]
    if not cross:
        candidates += [Rules(causal=True)]
        widths = [int(seen[row].sum()) for row in _full_rows(queries)]
        widths += [int(seen[row, : row + 1].sum()) for row in _full_rows(queries)]
        candidates += [Rules(causal=c, window=w) for w in sorted(set(widths)) if w > 0 for c in (True, False)]
        starts = (~seen[:, 0] & queries.seen).nonzero()[:, 0]
        if len(starts):
            candidates.append(Rules(causal=True, chunk=max(1, queries.positions[int(starts[0])])))
    for rules in candidates:
        if _explains(rules, seen, queries, keys):
            return rules
    return Rules(hidden=~seen)


def _full_rows(queries: Tokens) -> list[int]:
    """Returns the last query that is no padding, and one in the middle: they tell the width of a window."""
    rows = queries.seen.nonzero()[:, 0]
    if not len(rows):
        return []
    return [int(rows[-1]), int(rows[len(rows) // 2])]


def _explains(rules: Rules, seen: Tensor, queries: Tokens, keys: Tokens) -> bool:
    """Returns whether rules allow just the cells that are seen, padding left out."""
    step = max(1, TILE // max(1, len(keys)))
    for rows in torch.arange(len(queries)).split(step):
        rows = rows[queries.seen[rows]]
        if not torch.equal(rules.seen(queries, keys, rows), seen[rows] & keys.seen):
            return False
    return True
