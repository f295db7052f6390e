"""Labelling heads: scores over several texts with bootstrap intervals, and a label for what stands out.

A head qualifies for the label of a score if the bootstrap interval of its effect lies above zero and the effect is at
least `EFFECT`; at least `MIN_TEXTS` texts are required. If several scores qualify, the largest effect wins, except that
a score is dropped if another qualifying score takes precedence over it and has an effect at least half as large: a
specific score takes precedence over a general one that includes it (previous over local). A head that qualifies for
none is "mixed".

"first" and "separator" are attention sinks, where a head rests that has nothing to do. They are a second attribute
(`rests`) beside what the head does when it acts, and its label only if it does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import OptionError
from regard.lens.heads.scores import (
    ONLY_REPEATED,
    REPEATED_SCORES,
    SCORE_DESCRIPTIONS,
    TextSums,
    measure,
    word_counts,
)
from regard.lens.trace.trace import Recording

EFFECT = 0.1  # smallest effect that counts
DRAWS = 1000  # number of bootstrap samples
MIN_TEXTS = 5  # smallest number of texts for a label
MIXED = "mixed"
RESTS = ("first", "separator")
# For each general score, the scores that take precedence over it: those that it includes.
_GENERAL = {
    "broad": tuple(name for name in SCORE_DESCRIPTIONS if name != "broad"),
    "broadcast": tuple(name for name in SCORE_DESCRIPTIONS if name not in ("broadcast", "broad")),
    "local": ("previous", "next", "self"),
}
_EXPLAINS = 0.5  # fraction of a score's effect that another must have to replace it


@dataclass(frozen=True)
class Score:
    """A score, its baseline, and their difference as a share of the largest that is possible (the effect).

    `low` and `high` are the bounds of the bootstrap interval of the effect; None for fewer than two texts.
    """

    score: float
    baseline: float
    effect: float
    low: float | None
    high: float | None
    texts: int

    @property
    def stands_out(self) -> bool:
        """Whether there are enough texts, the interval lies above zero, and the effect is large enough."""
        return self.texts >= MIN_TEXTS and self.low is not None and self.low > 0 and self.effect >= EFFECT

    def as_dict(self) -> dict[str, float | None]:
        """Returns the score as a dict, a part of `HeadLabel.as_dict`."""
        return {name: _rounded(getattr(self, name)) for name in ("score", "baseline", "effect", "low", "high")}


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 5)


@dataclass(frozen=True)
class HeadLabel:
    """The label and the scores of one head; `attention` is an index into `Recording.attentions`."""

    attention: int
    layer: int
    side: str
    head: int
    label: str
    scores: dict[str, Score]

    @property
    def effect(self) -> float:
        """The effect of the label's score; for a "mixed" head the largest effect of any score."""
        if self.label in self.scores:
            return self.scores[self.label].effect
        return max((score.effect for score in self.scores.values()), default=0.0)

    @property
    def also(self) -> list[str]:
        """Other scores that stand out, largest effect first.

        A general one (broad, broadcast, local) is left out if a more specific one has at least half its effect.
        """
        good = significant_scores(self.scores)
        return sorted(good.keys() - {self.label}, key=lambda name: -good[name].effect)

    @property
    def rests(self) -> str | None:
        """Where the head rests, "first" or "separator", by the larger effect; None if neither stands out."""
        resting = [name for name in RESTS if name in self.scores and self.scores[name].stands_out]
        return max(resting, key=lambda name: self.scores[name].effect, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the label as a dict, the form of `Recording.labels` and of `regard heads --json`."""
        own = self.scores.get(self.label)
        return {
            "attention": self.attention,
            "layer": self.layer,
            "side": self.side,
            "head": self.head,
            "label": self.label,
            "effect": round(self.effect, 5),
            "low": None if own is None else _rounded(own.low),
            "high": None if own is None else _rounded(own.high),
            "also": self.also,
            "rests": None if self.rests is None else {"on": self.rests} | self.scores[self.rests].as_dict(),
            "scores": {name: score.as_dict() for name, score in self.scores.items()},
        }


def label_heads(recordings: Sequence[Recording], repeats: Sequence[Recording] = (), seed: int = 0) -> list[HeadLabel]:
    """Returns the labels of all self-attention heads, from recordings of several texts with one model.

    `repeats`: recordings of repeated random sequences, which count only for the scores in REPEATED_SCORES; those in
    ONLY_REPEATED are measured on nothing else.
    """
    if not recordings:
        raise OptionError("labels need at least one text")
    word_frequency = word_counts(tokens for r in recordings for tokens in r.sequences)
    labels = []
    for number, attended in enumerate(recordings[0].attentions):
        if attended.kind != "self":
            continue
        sums = {name: TextSums() for name in SCORE_DESCRIPTIONS}
        in_texts = {name: x for name, x in sums.items() if name not in ONLY_REPEATED}
        for recording in recordings:
            measure(recording, recording.attentions[number], word_frequency, in_texts)
        repetition = {name: sums[name] for name in REPEATED_SCORES}
        for recording in repeats:
            measure(recording, recording.attentions[number], word_frequency, repetition)
        scored = {name: _score_heads(s, attended.heads, seed) for name, s in sums.items()}
        for head in range(attended.heads):
            scores = {name: per_head[head] for name, per_head in scored.items() if per_head}
            labels.append(HeadLabel(number, attended.layer, attended.side, head, choose_label(scores), scores))
    return labels


def choose_label(scores: dict[str, Score]) -> str:
    """Returns the label of one head, chosen by its scores: what it does when it acts, or else where it rests."""
    good = significant_scores(scores)
    acts = [name for name in good if name not in RESTS]
    return max(acts or good, key=lambda name: good[name].effect, default=MIXED)


def significant_scores(scores: dict[str, Score]) -> dict[str, Score]:
    """Returns the scores that stand out, by name, without general ones that a specific one explains.

    A general score is dropped if one of the scores that take precedence over it stands out, too, was not dropped before
    it, and has an effect at least half as large.
    """
    good = {name: score for name, score in scores.items() if score.stands_out}
    for name, others in _GENERAL.items():
        mine = good.get(name)
        if mine and any(n in good and good[n].effect >= _EXPLAINS * mine.effect for n in others):
            del good[name]
    return good


def _score_heads(sums: TextSums, heads: int, seed: int) -> list[Score]:
    """Returns the scores of all heads, with intervals from a bootstrap over texts."""
    kept = [n for n, count in enumerate(sums.count) if count]
    if not kept:
        return []
    score, baseline, room = (torch.stack([x[n] for n in kept], 1) for x in (sums.score, sums.baseline, sums.room))
    count = sum(sums.count)
    difference = score - baseline
    effect = (difference.sum(1) / room.sum(1).clamp(min=1e-9)).tolist()
    low: list[float | None] = [None] * heads
    high = list(low)
    if len(kept) > 1:
        low, high = (x.tolist() for x in _interval(difference, room, seed))
    means = (score.sum(1) / count).tolist()
    baselines = (baseline.sum(1) / count).tolist()
    return [Score(means[h], baselines[h], effect[h], low[h], high[h], len(kept)) for h in range(heads)]


def _interval(
    difference: Float[Tensor, "H N"], room: Float[Tensor, "H N"], seed: int
) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
    """Returns the bounds of the 95% interval of the effect, Σ difference / Σ room: texts are drawn with replacement.

    A percentile interval of few texts is too narrow; its quantiles are moved outwards so that it is as wide as
    Student's (the expanded percentile interval; Hesterberg, 2015, doi:10.1080/00031305.2015.1089789).
    """
    draw = torch.Generator().manual_seed(seed)
    N = difference.shape[1]
    times = torch.zeros(DRAWS, N, dtype=torch.float64)
    picks = torch.randint(0, N, (DRAWS, N), generator=draw)
    times.scatter_add_(1, picks, torch.ones_like(picks, dtype=torch.float64))
    effects = (difference.double() @ times.T) / (room.double() @ times.T).clamp(min=1e-9)
    tail = NormalDist().cdf(-_student(N - 1) * math.sqrt(N / (N - 1)))
    bounds = effects.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=1)
    return bounds[0], bounds[1]


def _student(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t distribution, to .01 from 4 degrees of freedom on (Cornish–Fisher)."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
