"""Summarising each head: a thumbnail of its weights (overview), and summary statistics (figures)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.trace import RecordedAttention, Recording
from regard.lens.trace.weighing import as_shares

OVERVIEW_SIZE = 32  # maximum number of rows and columns of an overview
_FIGURES = ("entropy", "distance", "first", "self", "peak")
_SELF_ONLY = ("distance", "self")  # statistics that are not defined for cross-attention


def add_overview(recording: Recording, attended: RecordedAttention) -> None:
    """Sets `overview` and `figures` of an attention module, and its normalisers if they are not known yet.

    In the overview, weights are averaged over neighbouring queries and summed over neighbouring keys. The figures are
    means over the queries that are not padding and have a weight other than 0: the entropy divided by its maximum, the
    attention distance, the weight on the first token, the weight on the query's own token, and the largest weight; the
    weights of a memory, which sum to anything, count as shares |w| / Σ|w|.
    """
    queries, keys = recording.query_and_key_tokens(attended)
    T, S, H = len(queries), len(keys), attended.heads
    r = min(T, OVERVIEW_SIZE)
    c = min(S, OVERVIEW_SIZE)
    row_of = torch.arange(T) * r // max(T, 1)
    column_of = torch.arange(S) * c // max(S, 1)
    pooled = torch.zeros(H, r, S)
    sums = {name: torch.zeros(H) for name in _FIGURES}
    first = int(keys.not_padding.int().argmax())
    counts = torch.zeros(H, dtype=torch.long)
    for rows, weights in recording.reached_chunks(attended):
        s = weights.shape[2]  # no query of these may attend to later keys
        pooled[..., :s].index_add_(1, row_of[rows], weights)
        allowed = attended.rules.allowed(queries, keys.prefix(s), rows)
        shares = as_shares(attended, weights)
        p = weights.abs() if attended.signed else weights
        total = p.sum(-1, keepdim=True)
        counted = (total[..., 0] > 0) & queries.not_padding[rows]
        counts += counted.sum(1)
        if first < s:
            sums["first"] += (shares[..., first] * counted).sum(1)
        sums["peak"] += (shares.amax(-1) * counted).sum(1)
        if attended.kind == "self":
            sums["self"] += (_own_shares(shares, rows) * counted).sum(1)
        # The weights were made for this chunk, so what follows is done in place: these are passes over every cell.
        p = p.div_(total.masked_fill_(total == 0, 1))
        max_entropy = allowed.sum(-1).clamp(min=2).log()
        sums["entropy"] += (_entropies(p) / max_entropy * counted).sum(1)
        if attended.kind == "self":
            distance = (queries.position_tensor[rows][:, None] - keys.position_tensor[None, :s]).abs().float()
            sums["distance"] += (p.mul_(distance).sum(-1) * counted).sum(1)
    rows_pooled = torch.bincount(row_of, minlength=r).clamp(min=1)
    picture = torch.zeros(H, r, c).index_add_(2, column_of, pooled)
    attended.overview = picture / rows_pooled[None, :, None]
    attended.figures = {name: _mean(total, counts) for name, total in sums.items()}
    if attended.kind != "self":
        attended.figures |= dict.fromkeys(_SELF_ONLY)


def _own_shares(shares: Float[Tensor, "H R s"], rows: Int[Tensor, " R"]) -> Float[Tensor, "H R"]:
    """Returns the share of each query's own token, 0 where it is not among the keys that were reached."""
    s = shares.shape[2]
    own = shares.gather(2, rows.clamp(max=s - 1)[None, :, None].expand(len(shares), -1, 1))[..., 0]
    return own.masked_fill(rows >= s, 0)


def _entropies(p: Float[Tensor, "H R s"]) -> Float[Tensor, "H R"]:
    """Returns the entropy of each row; `torch.special.entr` gives the same numbers in several times the time."""
    smallest = torch.finfo(p.dtype).tiny
    return p.clamp(min=smallest).log_().mul_(p).sum(-1).neg_()


def _mean(total: Float[Tensor, " H"], counts: Int[Tensor, " H"]) -> list[float]:
    means: list[float] = (total / counts.clamp(min=1)).tolist()
    return means
