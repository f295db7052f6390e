"""A head at a glance: its weights pooled into a small picture, and a few figures, in one pass over its rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.trace import Attended, Recording

SIDE = 32  # rows and columns of an overview, at most
_FIGURES = ("entropy", "distance", "first", "self", "peak")
_SELF_ONLY = ("distance", "self")  # figures that cross-attention does not have


def add_overview(recording: Recording, attended: Attended) -> None:
    """Fills in `overview` and `figures`, and normalisers where they are not known yet.

    Figures are means over the queries that see something: the entropy as a part of the largest possible, the distance
    that is looked, the weight on the first token and on itself, and the largest weight.
    """
    queries, keys = recording.read(attended)
    T, S, H = len(queries), len(keys), attended.heads
    r = min(T, SIDE)
    c = min(S, SIDE)
    row_of = torch.arange(T) * r // max(T, 1)
    column_of = torch.arange(S) * c // max(S, 1)
    pooled = torch.zeros(H, r, S)
    sums = {name: torch.zeros(H) for name in _FIGURES}
    first = int(keys.seen.int().argmax())
    counts = torch.zeros(H, dtype=torch.long)
    for rows, weights in recording.tiles(attended):
        pooled.index_add_(1, row_of[rows], weights)
        size = weights.abs() if attended.signed else weights
        total = size.sum(-1, keepdim=True)
        share = size / total.masked_fill(total == 0, 1)
        seen = attended.rules.seen(queries, keys, rows)
        counted = (total[..., 0] > 0) & queries.seen[rows]
        counts += counted.sum(1)
        most = seen.sum(-1).clamp(min=2).log()
        entropy = -(share * share.clamp(min=1e-30).log()).sum(-1) / most
        sums["entropy"] += (entropy * counted).sum(1)
        sums["first"] += (weights[..., first] * counted).sum(1)
        sums["peak"] += (weights.amax(-1) * counted).sum(1)
        if attended.kind == "self":
            distance = (queries.places[rows][:, None] - keys.places[None]).abs().float()
            sums["distance"] += ((share * distance).sum(-1) * counted).sum(1)
            sums["self"] += (weights.gather(2, rows[None, :, None].expand(H, -1, 1))[..., 0] * counted).sum(1)
    rows_pooled = torch.bincount(row_of, minlength=r).clamp(min=1)
    picture = torch.zeros(H, r, c).index_add_(2, column_of, pooled)
    attended.overview = picture / rows_pooled[None, :, None]
    attended.figures = {name: _mean(total, counts) for name, total in sums.items()}
    if attended.kind != "self":
        attended.figures |= dict.fromkeys(_SELF_ONLY)


def _mean(total: Float[Tensor, " H"], counts: Int[Tensor, " H"]) -> list[float]:
    means: list[float] = (total / counts.clamp(min=1)).tolist()
    return means
