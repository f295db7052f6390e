"""Which heads follow syntax, and which pronouns: how often a head looks at the right word, beside simple guesses.

A head looks from a word at the other word that gets most of its weight; the weight from a word is the mean over its
tokens, the weight on a word the sum over its tokens. For each relation the best head is compared with the best fixed
distance; for coreference with the nearest mention before. The interval allows for having picked the best of all heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.lens.heads.annotations import Mentions, Parsed, Span
from regard.lens.heads.labels import EFFECT
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Recording

LEAST = 10  # pairs of a relation; fewer say nothing
FAR = 6  # the largest fixed distance that is tried
Record = Callable[[str], Recording]


def follow_syntax(record: Record, sentences: Iterable[Parsed]) -> list[dict[str, Any]]:
    """Returns for each relation and direction the best head, beside the best fixed distance."""
    hits: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[int]] = defaultdict(list)
    names: list[dict[str, Any]] = []
    for sentence in sentences:
        recording = record(sentence.text)
        names, weights, known = _word_weights(recording, sentence.words)
        for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
            if head < 0:
                continue
            for a, b, direction in ((word, head, "to head"), (head, word, "to dependent")):
                if known[a, b]:
                    hits[relation, direction].append(_most_attended(weights[:, a], known[a], a) == b)
                    gaps[relation, direction].append(b - a)
    found = []
    for key, rows in sorted(hits.items()):
        if len(rows) >= LEAST:
            far = torch.tensor(gaps[key])
            offsets = [d for d in range(-FAR, FAR + 1) if d]
            best = max(offsets, key=lambda d: int((far == d).sum()))
            row = _best(names, torch.stack(rows, 1), far == best)
            found.append({"relation": key[0], "direction": key[1], "distance": best, **row})
    return found


def follow_mentions(record: Record, texts: Iterable[Mentions]) -> dict[str, Any] | None:
    """Returns the head that best finds an earlier mention of the same thing, beside the nearest; None: too few."""
    hits = []
    nearest = []
    names: list[dict[str, Any]] = []
    for text in texts:
        recording = record(text.text)
        names, weights, known = _word_weights(recording, text.spans, mean=True)
        for m, cluster in enumerate(text.clusters):
            before = [n for n in range(m) if text.spans[n][1] <= text.spans[m][0] and bool(known[m, n])]
            right = torch.tensor([text.clusters[n] == cluster for n in before], dtype=torch.bool)
            if len(before) < 2 or not bool(right.any()) or bool(right.all()):
                continue  # nothing to find, or nothing to get wrong
            hits.append(right[weights[:, m][:, before].argmax(-1)])
            nearest.append(bool(right[-1]))
    if len(hits) < LEAST:
        return None
    return _best(names, torch.stack(hits, 1), torch.tensor(nearest))


def _word_weights(
    recording: Recording, spans: Sequence[Span], mean: bool = False
) -> tuple[list[dict[str, Any]], Float[Tensor, "N W W"], Bool[Tensor, "W W"]]:
    """Returns the heads that read the text, their weights between words, and which words may see which.

    The weight onto a word is the sum over its tokens, or their mean.
    """
    tokens = recording.sequences[0]
    of_word = _tokens_of(tokens, spans)
    size = of_word.sum(1, keepdim=True).clamp(min=1)
    onto = of_word
    if mean:
        onto = of_word / size
    names: list[dict[str, Any]] = []
    totals = []
    seen = torch.zeros(len(spans), len(spans), dtype=torch.bool)
    for number, attended in enumerate(recording.attentions):
        if attended.kind != "self" or attended.queries != 0:
            continue
        total = torch.zeros(attended.heads, len(spans), len(spans))
        for rows, weights in recording.tiles(attended):
            total += (of_word[:, rows] / size) @ weights @ onto.T
            allowed = attended.rules.allowed(*recording.query_and_key_tokens(attended), rows).float()
            seen |= (of_word[:, rows] @ allowed @ of_word.T) > 0
        totals.append(total)
        names += [
            {"attention": number, "layer": attended.layer, "side": attended.side, "head": h}
            for h in range(attended.heads)
        ]
    has_tokens = of_word.sum(1) > 0
    return names, torch.cat(totals), seen & has_tokens[None] & has_tokens[:, None]


def _tokens_of(tokens: Tokens, spans: Sequence[Span]) -> Float[Tensor, "W T"]:
    """Returns 1 where a token shares a character with a word."""
    starts = torch.tensor(tokens.starts)
    ends = torch.tensor(tokens.ends)
    low, high = (torch.tensor([s[n] for s in spans])[:, None] for n in (0, 1))
    return ((starts[None] < high) & (ends[None] > low) & (starts[None] >= 0)).float()


def _most_attended(weights: Float[Tensor, "N W"], known: Bool[Tensor, " W"], word: int) -> Tensor:
    """Returns the other word that each head looks at most."""
    others = known.clone()
    others[word] = False
    return weights.masked_fill(~others, -1).argmax(-1)


def _best(names: list[dict[str, Any]], hits: Bool[Tensor, "N P"], baseline: Bool[Tensor, " P"]) -> dict[str, Any]:
    """Returns the head that is right most often, and a paired interval of how much more than the baseline it is."""
    right = hits.double().mean(1)
    n = int(right.argmax())
    difference = hits[n].double() - baseline.double()
    P = len(difference)
    error = float(difference.std() / P**0.5) if P > 1 else float("inf")
    # Bonferroni: the best of all heads was picked.
    z = NormalDist().inv_cdf(1 - 0.025 / len(names))
    effect = float(difference.mean())
    return {
        **names[n],
        "pairs": P,
        "score": round(float(right[n]), 5),
        "baseline": round(float(baseline.double().mean()), 5),
        "low": round(effect - z * error, 5),
        "high": round(effect + z * error, 5),
        "stands_out": effect - z * error > 0 and effect >= EFFECT,
    }
