"""A head at a glance: its weights pooled into a small picture, and a few figures, in one pass over its rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.trace import Attended, Recording

SIDE = 32  # rows and columns of an overview, at most


def overview(recording: Recording, attended: Attended) -> None:
    """Fills in `overview` and `figures`, and normalisers where they are not known yet."""
    queries, keys = recording.read(attended)
    T, S, H = len(queries), len(keys), attended.heads
    r, c = min(T, SIDE), min(S, SIDE)
    row_of, column_of = torch.arange(T) * r // max(T, 1), torch.arange(S) * c // max(S, 1)
    pooled = torch.zeros(H, r, S)
    sums = {name: torch.zeros(H) for name in ("entropy", "distance", "first", "self", "peak")}
    first = int(keys.seen.int().argmax())
    counted = torch.zeros(H, dtype=torch.long)
    for rows, weights in recording.tiles(attended):
        pooled.index_add_(1, row_of[rows], weights)
        size = weights.abs() if attended.signed else weights
        total = size.sum(-1, keepdim=True)
        share = size / total.masked_fill(total == 0, 1)
        seen = attended.rules.seen(queries, keys, rows)
        looks = (total[..., 0] > 0) & queries.seen[rows]
        counted += looks.sum(1)
        most = seen.sum(-1).clamp(min=2).log()
        entropy = -(share * share.clamp(min=1e-30).log()).sum(-1) / most
        sums["entropy"] += (entropy * looks).sum(1)
        sums["first"] += (weights[..., first] * looks).sum(1)
        sums["peak"] += (weights.amax(-1) * looks).sum(1)
        if attended.kind == "self":
            distance = (queries.places[rows][:, None] - keys.places[None]).abs().float()
            sums["distance"] += ((share * distance).sum(-1) * looks).sum(1)
            sums["self"] += (weights.gather(2, rows[None, :, None].expand(H, -1, 1))[..., 0] * looks).sum(1)
    per_row = torch.bincount(row_of, minlength=r).clamp(min=1)
    made = torch.zeros(H, r, c).index_add_(2, column_of, pooled)
    attended.overview = made / per_row[None, :, None]
    only_self = ("distance", "self")
    attended.figures = {
        name: _mean(total, counted) if attended.kind == "self" or name not in only_self else None
        for name, total in sums.items()
    }


def _mean(total: Float[Tensor, " H"], counted: Int[Tensor, " H"]) -> list[float]:
    means: list[float] = (total / counted.clamp(min=1)).tolist()
    return means
