"""Heads that do the same: pairs whose weights hardly differ, although both differ from an even spread.

The distance of two heads is the Jensen–Shannon divergence of their rows, JS(p, q) = H((p+q)/2) − (H(p) + H(q))/2,
between 0 and ln 2, as a mean over queries. Heads that spread their attention evenly are all alike; a pair counts only
where their divergence is a small part of that of either from even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lens.trace.trace import Recording

SHARE = 0.2  # of the divergence from even, at most
LEAST = 0.02  # nats from even, at least
ROWS = 48  # queries of each text that are looked at


def redundant_pairs(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns pairs of heads of self-attention that hardly differ, most alike first."""
    names, even, apart = divergences(recordings)
    near = torch.minimum(even[:, None], even[None, :])
    alike = (apart <= SHARE * near) & (near >= LEAST)
    pairs = alike.triu(1).nonzero().tolist()
    found = [
        {
            "heads": [names[a], names[b]],
            "divergence": round(float(apart[a, b]), 5),
            "from_even": round(float(near[a, b]), 5),
        }
        for a, b in pairs
    ]
    return sorted(found, key=lambda pair: pair["divergence"] / pair["from_even"])


def divergences(
    recordings: Sequence[Recording],
) -> tuple[list[dict[str, Any]], Float[Tensor, " N"], Float[Tensor, "N N"]]:
    """Returns the heads, how far each is from even, and how far each pair is apart, in nats over queries and texts.

    Heads of sequences of different length, as of an encoder and a decoder, are never alike: their distance is ln 2.
    """
    names: list[dict[str, Any]] = [
        {"attention": n, "layer": a.layer, "side": a.side, "head": h}
        for n, a in enumerate(recordings[0].attentions)
        if a.kind == "self"
        for h in range(a.heads)
    ]
    N = len(names)
    even = torch.zeros(N)
    apart = torch.zeros(N, N)
    counted = 0
    sides = torch.tensor([recordings[0].attentions[x["attention"]].queries for x in names])
    for recording in recordings:
        for side in sides.unique().tolist():
            mine = (sides == side).nonzero()[:, 0]
            rows = torch.linspace(1, len(recording.sequences[side]) - 1, ROWS).long().unique()
            p, flat = _rows(recording, side, rows)
            even[mine] += _apart(p, flat)[:, 0]
            apart[mine[:, None], mine[None]] += _apart(p, p)
        counted += 1
    apart[sides[:, None] != sides[None]] = counted * torch.log(torch.tensor(2.0))
    return names, even / counted, apart / counted


def _rows(recording: Recording, side: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights [N,R,S] of all heads over one sequence, without their signs, and an even spread [1,R,S]."""
    found = []
    seen = torch.zeros(0)
    for attended in recording.attentions:
        if attended.kind == "self" and attended.queries == side:
            found.append(recording.head_weights(attended, range(attended.heads), rows).abs())
            seen = attended.rules.allowed(*recording.query_and_key_tokens(attended), rows).float()
    p = torch.cat(found)
    return p / p.sum(-1, keepdim=True).clamp(min=1e-30), (seen / seen.sum(-1, keepdim=True).clamp(min=1))[None]


def _apart(p: Float[Tensor, "N R S"], q: Float[Tensor, "M R S"]) -> Float[Tensor, "N M"]:
    """Returns the divergence of each of p from each of q, a mean over rows."""
    own_p = _entropy(p)
    own_q = _entropy(q)
    return torch.stack(
        [(_entropy((x[None] + q) / 2) - (h[None] + own_q) / 2).mean(-1) for x, h in zip(p, own_p, strict=True)]
    )


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-30).log()).sum(-1)
