"""Redundant heads: pairs whose weights hardly differ, although both differ from uniform attention.

The distance of two heads is the Jensen–Shannon divergence of their rows, JS(p, q) = H((p+q)/2) − (H(p) + H(q))/2,
between 0 and ln 2, averaged over queries. Heads with nearly uniform attention are all similar, so a pair counts only if
its divergence is small relative to each head's divergence from uniform attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lens.trace.trace import Recording

MAX_FRACTION = 0.2  # largest divergence of a pair, as a fraction of the smaller divergence from uniform
MIN_DIVERGENCE = 0.02  # smallest divergence from uniform, in nats, of a head that is considered
ROWS = 48  # number of queries per text that are compared


def redundant_pairs(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns the pairs of self-attention heads that are redundant, most similar first."""
    head_ids, from_uniform, between = divergences(recordings)
    smaller = torch.minimum(from_uniform[:, None], from_uniform[None, :])
    alike = (between <= MAX_FRACTION * smaller) & (smaller >= MIN_DIVERGENCE)
    pairs = alike.triu(1).nonzero().tolist()
    found = [
        {
            "heads": [head_ids[a], head_ids[b]],
            "divergence": round(float(between[a, b]), 5),
            "from_even": round(float(smaller[a, b]), 5),
        }
        for a, b in pairs
    ]
    return sorted(found, key=lambda pair: pair["divergence"] / pair["from_even"])


def divergences(
    recordings: Sequence[Recording],
) -> tuple[list[dict[str, Any]], Float[Tensor, " N"], Float[Tensor, "N N"]]:
    """Returns the heads, the divergence [N] of each from uniform attention, and the divergence [N,N] of each pair.

    Divergences are means over at most ROWS queries of each text, in nats. A pair of heads over different sequences
    (encoder and decoder) gets ln 2, the maximum.
    """
    head_ids: list[dict[str, Any]] = [
        {"attention": n, "layer": a.layer, "side": a.side, "head": h}
        for n, a in enumerate(recordings[0].attentions)
        if a.kind == "self"
        for h in range(a.heads)
    ]
    N = len(head_ids)
    from_uniform = torch.zeros(N)
    between = torch.zeros(N, N)
    counted = 0
    query_sequences = torch.tensor([recordings[0].attentions[x["attention"]].queries for x in head_ids])
    for recording in recordings:
        for sequence in query_sequences.unique().tolist():
            mine = (query_sequences == sequence).nonzero()[:, 0]
            last = len(recording.sequences[sequence]) - 1
            rows = torch.linspace(min(1, last), last, ROWS).long().unique()
            p, uniform = _rows(recording, sequence, rows)
            from_uniform[mine] += _js_divergence(p, uniform)[:, 0]
            between[mine[:, None], mine[None]] += _js_divergence(p, p)
        counted += 1
    between[query_sequences[:, None] != query_sequences[None]] = counted * torch.log(torch.tensor(2.0))
    return head_ids, from_uniform / counted, between / counted


def _rows(recording: Recording, sequence: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the absolute weights [N,R,S] of all heads over one sequence, normalised, and uniform weights [1,R,S].

    The uniform weights are over the keys that the mask of the sequence's last module allows.
    """
    found = []
    allowed = torch.zeros(0)
    for attended in recording.attentions:
        if attended.kind == "self" and attended.queries == sequence:
            found.append(recording.head_weights(attended, range(attended.heads), rows).abs())
            allowed = attended.rules.allowed(*recording.query_and_key_tokens(attended), rows).float()
    p = torch.cat(found)
    return p / p.sum(-1, keepdim=True).clamp(min=1e-30), (allowed / allowed.sum(-1, keepdim=True).clamp(min=1))[None]


def _js_divergence(p: Float[Tensor, "N R S"], q: Float[Tensor, "M R S"]) -> Float[Tensor, "N M"]:
    """Returns the Jensen–Shannon divergence of each head of p from each head of q, averaged over rows."""
    own_p = _entropy(p)
    own_q = _entropy(q)
    return torch.stack(
        [(_entropy((x[None] + q) / 2) - (h[None] + own_q) / 2).mean(-1) for x, h in zip(p, own_p, strict=True)]
    )


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-30).log()).sum(-1)
