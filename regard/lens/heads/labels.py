"""What each head does: scores over several texts, with intervals, and a label only for what stands out.

A head gets the label of a score when the bootstrap interval of (score − baseline) lies above zero and the difference is
at least `EFFECT`; of several the largest, but a narrow one before a wide one that holds it, and anything before a
resting place. Otherwise it is "mixed".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import OptionError
from regard.lens.heads.scores import ABOUT, REPEATS, BlockSums, measure, word_counts
from regard.lens.trace.trace import Recording

EFFECT = 0.1  # the least difference that counts
DRAWS = 500  # of the bootstrap
LEAST = 5  # blocks of queries; fewer say nothing about spread
MIXED = "mixed"
# A score loses to others that explain half of it: a wide one to the narrow ones that it holds, and a resting place,
# where attention goes that has nothing to do, to whatever the head does besides.
_RESTS = ("first", "separator", "punctuation")
_WIDE = {
    "broad": tuple(name for name in ABOUT if name != "broad"),
    "broadcast": tuple(name for name in ABOUT if name not in ("broadcast", "broad")),
    "local": ("previous", "next", "self"),
}
_YIELDS = _WIDE | {
    "separator": tuple(name for name in ABOUT if name not in (*_RESTS, "broadcast", "broad")),
    "first": tuple(name for name in ABOUT if name not in (*_RESTS, "broadcast", "broad")),
}
_EXPLAINS = 0.5


@dataclass(frozen=True)
class Score:
    """A score and its baseline; `low` and `high` bound their difference."""

    score: float
    baseline: float
    low: float
    high: float
    blocks: int

    @property
    def effect(self) -> float:
        return self.score - self.baseline

    @property
    def stands_out(self) -> bool:
        return self.blocks >= LEAST and self.low > 0 and self.effect >= EFFECT

    def as_dict(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 5) for name in ("score", "baseline", "low", "high")}


@dataclass(frozen=True)
class HeadLabel:
    """What one head does."""

    attention: int
    layer: int
    side: str
    head: int
    label: str
    scores: dict[str, Score]

    @property
    def effect(self) -> float:
        """How far the label's score is above its baseline; of a mixed head that of its best."""
        if self.label in self.scores:
            return self.scores[self.label].effect
        return max((score.effect for score in self.scores.values()), default=0.0)

    @property
    def also(self) -> list[str]:
        """What else stands out, most first; nothing wide that something narrow explains."""
        good = significant_scores(self.scores, _WIDE)
        return sorted(good.keys() - {self.label}, key=lambda name: -good[name].effect)

    def as_dict(self) -> dict[str, Any]:
        """Returns the label as `Recording.labels` and `regard heads --json` have it."""
        own = self.scores.get(self.label)
        return {
            "attention": self.attention,
            "layer": self.layer,
            "side": self.side,
            "head": self.head,
            "label": self.label,
            "effect": round(self.effect, 5),
            "low": None if own is None else round(own.low, 5),
            "high": None if own is None else round(own.high, 5),
            "also": self.also,
            "scores": {name: score.as_dict() for name, score in self.scores.items()},
        }


def label_heads(recordings: Sequence[Recording], repeats: Sequence[Recording] = (), seed: int = 0) -> list[HeadLabel]:
    """Returns the labels of all heads of self-attention, from recordings of one model over several texts.

    `repeats`: recordings of sequences that repeat themselves, which are looked at for repetition alone.
    """
    if not recordings:
        raise OptionError("labels need at least one text")
    common = word_counts(tokens for r in recordings for tokens in r.sequences)
    labels = []
    for number, attended in enumerate(recordings[0].attentions):
        if attended.kind != "self":
            continue
        sums = {name: BlockSums() for name in ABOUT}
        for recording in recordings:
            measure(recording, recording.attentions[number], common, sums)
        repetition = {name: sums[name] for name in REPEATS}
        for recording in repeats:
            measure(recording, recording.attentions[number], common, repetition)
        scored = {name: _score_heads(s, attended.heads, seed) for name, s in sums.items()}
        for head in range(attended.heads):
            scores = {name: per_head[head] for name, per_head in scored.items() if per_head}
            labels.append(HeadLabel(number, attended.layer, attended.side, head, choose_label(scores), scores))
    return labels


def choose_label(scores: dict[str, Score]) -> str:
    """Returns the label that the scores of one head earn."""
    good = significant_scores(scores, _YIELDS)
    return max(good, key=lambda name: good[name].effect, default=MIXED)


def significant_scores(scores: dict[str, Score], yields: Mapping[str, Sequence[str]]) -> dict[str, Score]:
    """Returns the scores that stand out, without those that yield to another."""
    good = {name: score for name, score in scores.items() if score.stands_out}
    for name, others in yields.items():
        mine = good.get(name)
        if mine and any(n in good and good[n].effect >= _EXPLAINS * mine.effect for n in others):
            del good[name]
    return good


def _score_heads(sums: BlockSums, heads: int, seed: int) -> list[Score]:
    """Returns the scores of all heads, with intervals from drawing blocks of queries again."""
    if not sums.count:
        return []
    count = torch.cat(sums.count)
    score = torch.cat(sums.score, 1)
    baseline = torch.cat(sums.baseline, 1)
    low, high = _interval(score - baseline, count, seed)
    total = count.sum()
    means = (score.sum(1) / total).tolist()
    even = (baseline.sum(1) / total).tolist()
    return [Score(means[h], even[h], float(low[h]), float(high[h]), len(count)) for h in range(heads)]


def _interval(
    effect: Float[Tensor, "H N"], count: Float[Tensor, " N"], seed: int
) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
    """Returns the bounds of 95% of the means when blocks are drawn with replacement."""
    draw = torch.Generator().manual_seed(seed)
    N = len(count)
    times = torch.zeros(DRAWS, N, dtype=torch.float64)
    picks = torch.randint(0, N, (DRAWS, N), generator=draw)
    times.scatter_add_(1, picks, torch.ones_like(picks, dtype=torch.float64))
    means = (effect @ times.T) / (times @ count).clamp(min=1)[None]
    bounds = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    return bounds[0], bounds[1]
