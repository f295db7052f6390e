"""Heads and linguistic structure: how often a head attends to the right word (syntax) or mention (coreference).

A head's prediction for a word is the other word with the largest weight. The weight from a word is the mean over its
tokens, and the weight onto a word the sum over its tokens. For coreference, the weight onto a mention is the mean over
its tokens, and only earlier mentions are candidates. For each relation the best head is compared with the best fixed
distance; for coreference with the nearest earlier mention, the one before it, or the first, whichever is right most
often. The confidence interval is corrected for picking the best head.
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
from regard.lens.trace.weighing import as_shares

MIN_PAIRS = 10  # smallest number of pairs for which a result is reported
MAX_DISTANCE = 6  # the largest fixed distance that is tried
# Which of the earlier mentions a baseline for coreference chooses.
RULES = {"nearest": -1, "nearest but one": -2, "first": 0}
UNSCORED = ("punct",)  # to what punctuation is attached is a convention; it is not evaluated elsewhere either
Record = Callable[[str], Recording]


def evaluate_syntax(
    record: Record, sentences: Iterable[Parsed], rare: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """Returns for each dependency relation and direction the attention head that is right most often.

    Relations with fewer than MIN_PAIRS pairs are left out; `rare` is filled with how many pairs each of them has. The
    baseline always predicts the word at one fixed distance, the best one.
    """
    hits: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[int]] = defaultdict(list)
    head_ids: list[dict[str, Any]] = []
    for sentence in sentences:
        recording = record(sentence.text)
        head_ids, weights, allowed = _word_weights(recording, sentence.words)
        for word, (governor, relation) in enumerate(zip(sentence.governors, sentence.relations, strict=True)):
            if governor < 0 or relation in UNSCORED:
                continue
            for a, b, direction in ((word, governor, "to head"), (governor, word, "to dependent")):
                if allowed[a, b]:
                    hits[relation, direction].append(_most_attended(weights[:, a], allowed[a], a) == b)
                    gaps[relation, direction].append(b - a)
    found = []
    for key, rows in sorted(hits.items()):
        if len(rows) >= MIN_PAIRS:
            distances = torch.tensor(gaps[key])
            offsets = [d for d in range(-MAX_DISTANCE, MAX_DISTANCE + 1) if d]
            best = max(offsets, key=lambda d: int((distances == d).sum()))
            row = _best(head_ids, torch.stack(rows, 1), distances == best)
            found.append({"relation": key[0], "direction": key[1], "distance": best, **row})
        elif rare is not None:
            rare[" ".join(key)] = len(rows)
    return found


def is_resolvable(text: Mentions, mention: int) -> bool:
    """Returns whether a mention has something to find and something to get wrong.

    Of the mentions before it, that do not overlap it, one is in its cluster and one is not.
    """
    before = [n for n in range(mention) if text.spans[n][1] <= text.spans[mention][0]]
    return len({text.clusters[n] == text.clusters[mention] for n in before}) == 2


def evaluate_coreference(record: Record, texts: Iterable[Mentions]) -> dict[str, Any] | None:
    """Returns the head that most often attends to a coreferent earlier mention.

    The baseline always chooses the mention at one place among those before, the best of RULES. Returns None if there
    are fewer than MIN_PAIRS mentions to resolve.
    """
    hits = []
    by_rule: dict[str, list[bool]] = {rule: [] for rule in RULES}
    head_ids: list[dict[str, Any]] = []
    for text in texts:
        recording = record(text.text)
        head_ids, weights, allowed = _word_weights(recording, text.spans, mean=True)
        for m, cluster in enumerate(text.clusters):
            before = [n for n in range(m) if text.spans[n][1] <= text.spans[m][0] and bool(allowed[m, n])]
            right = torch.tensor([text.clusters[n] == cluster for n in before], dtype=torch.bool)
            if len(before) < 2 or not bool(right.any()) or bool(right.all()):
                continue  # nothing to find, or nothing to get wrong
            hits.append(right[weights[:, m][:, before].argmax(-1)])
            for rule, place in RULES.items():
                by_rule[rule].append(bool(right[place]))
    if len(hits) < MIN_PAIRS:
        return None
    rule = max(RULES, key=lambda name: sum(by_rule[name]))
    return {"rule": rule, **_best(head_ids, torch.stack(hits, 1), torch.tensor(by_rule[rule]))}


def _word_weights(
    recording: Recording, spans: Sequence[Span], mean: bool = False
) -> tuple[list[dict[str, Any]], Float[Tensor, "N W W"], Bool[Tensor, "W W"]]:
    """Returns a list that identifies the N self-attention heads of sequence 0, their weights between words, and a mask.

    The mask says which word may attend to which in at least one attention module. The weight onto a word is the sum
    over its tokens, or with `mean` their mean.
    """
    tokens = recording.sequences[0]
    of_word = _word_token_overlap(tokens, spans)
    size = of_word.sum(1, keepdim=True).clamp(min=1)
    onto = of_word
    if mean:
        onto = of_word / size
    head_ids: list[dict[str, Any]] = []
    totals = []
    allowed = torch.zeros(len(spans), len(spans), dtype=torch.bool)
    for number, attended in enumerate(recording.attentions):
        if attended.kind != "self" or attended.queries != 0:
            continue
        total = torch.zeros(attended.heads, len(spans), len(spans))
        for rows, signed in recording.chunks(attended):
            weights = as_shares(attended, signed)
            total += (of_word[:, rows] / size) @ weights @ onto.T
            mask = attended.rules.allowed(*recording.query_and_key_tokens(attended), rows).float()
            allowed |= (of_word[:, rows] @ mask @ of_word.T) > 0
        totals.append(total)
        head_ids += [
            {"attention": number, "layer": attended.layer, "side": attended.side, "head": h}
            for h in range(attended.heads)
        ]
    has_tokens = of_word.sum(1) > 0
    return head_ids, torch.cat(totals), allowed & has_tokens[None] & has_tokens[:, None]


def _word_token_overlap(tokens: Tokens, spans: Sequence[Span]) -> Float[Tensor, "W T"]:
    """Returns 1 where a token and a word overlap in a character, else 0."""
    starts = torch.tensor(tokens.starts)
    ends = torch.tensor(tokens.ends)
    low, high = (torch.tensor([s[n] for s in spans])[:, None] for n in (0, 1))
    return ((starts[None] < high) & (ends[None] > low) & (starts[None] >= 0)).float()


def _most_attended(weights: Float[Tensor, "N W"], allowed: Bool[Tensor, " W"], word: int) -> Tensor:
    """Returns for each head the word with the largest weight among the allowed words other than `word`."""
    others = allowed.clone()
    others[word] = False
    return weights.masked_fill(~others, -1).argmax(-1)


def _best(head_ids: list[dict[str, Any]], hits: Bool[Tensor, "N P"], baseline: Bool[Tensor, " P"]) -> dict[str, Any]:
    """Returns the most accurate head, and a paired confidence interval of its accuracy minus the baseline's."""
    right = hits.double().mean(1)
    n = int(right.argmax())
    difference = hits[n].double() - baseline.double()
    P = len(difference)
    error = float(difference.std() / P**0.5) if P > 1 else float("inf")
    # Bonferroni: the best of all heads was picked.
    z = NormalDist().inv_cdf(1 - 0.025 / len(head_ids))
    effect = float(difference.mean())
    return {
        **head_ids[n],
        "pairs": P,
        "score": round(float(right[n]), 5),
        "baseline": round(float(baseline.double().mean()), 5),
        "low": round(effect - z * error, 5),
        "high": round(effect + z * error, 5),
        "stands_out": effect - z * error > 0 and effect >= EFFECT,
    }
