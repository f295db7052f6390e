"""Labelling heads: scores over several texts with bootstrap intervals, and a label for what stands out.

A head qualifies for the label of a score if the bootstrap interval of (score − baseline) lies above zero and the
difference (the effect) is at least `EFFECT`; at least `MIN_BLOCKS` blocks of queries are required. If several scores
qualify, the largest effect wins, except that a score is dropped if another qualifying score takes precedence over it
and has an effect at least half as large. A specific score takes precedence over a general one that includes it
(previous over local), and scores of ordinary tokens take precedence over "first" and "separator", which are attention
sinks. A head that qualifies for none is "mixed".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import OptionError
from regard.lens.heads.scores import REPEATED_SCORES, SCORE_DESCRIPTIONS, BlockSums, measure, word_counts
from regard.lens.trace.trace import Recording

EFFECT = 0.1  # smallest difference (score − baseline) that counts
DRAWS = 500  # number of bootstrap samples
MIN_BLOCKS = 5  # smallest number of blocks of queries for a bootstrap interval
MIXED = "mixed"
_SINKS = ("first", "separator", "punctuation")
_GENERAL = {
    "broad": tuple(name for name in SCORE_DESCRIPTIONS if name != "broad"),
    "broadcast": tuple(name for name in SCORE_DESCRIPTIONS if name not in ("broadcast", "broad")),
    "local": ("previous", "next", "self"),
}
# For each score, the scores that take precedence over it. A specific score takes precedence over a general one that
# includes it. Scores of ordinary tokens take precedence over "first" and "separator". Punctuation is an attention sink,
# too, so it does not take precedence over these two; but no score takes precedence over punctuation.
_PRECEDED_BY = _GENERAL | {
    "separator": tuple(name for name in SCORE_DESCRIPTIONS if name not in (*_SINKS, "broadcast", "broad")),
    "first": tuple(name for name in SCORE_DESCRIPTIONS if name not in (*_SINKS, "broadcast", "broad")),
}
_EXPLAINS = 0.5  # fraction of a score's effect that another must have to replace it


@dataclass(frozen=True)
class Score:
    """A score and its baseline; `low` and `high` are the bounds of the bootstrap interval of their difference."""

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
        return self.blocks >= MIN_BLOCKS and self.low > 0 and self.effect >= EFFECT

    def as_dict(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 5) for name in ("score", "baseline", "low", "high")}


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
        """The label's score minus its baseline; for a "mixed" head the largest such difference of any score."""
        if self.label in self.scores:
            return self.scores[self.label].effect
        return max((score.effect for score in self.scores.values()), default=0.0)

    @property
    def also(self) -> list[str]:
        """Other scores that stand out, largest effect first.

        A general one (broad, broadcast, local) is left out if a more specific one has at least half its effect.
        """
        good = significant_scores(self.scores, _GENERAL)
        return sorted(good.keys() - {self.label}, key=lambda name: -good[name].effect)

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
            "low": None if own is None else round(own.low, 5),
            "high": None if own is None else round(own.high, 5),
            "also": self.also,
            "scores": {name: score.as_dict() for name, score in self.scores.items()},
        }


def label_heads(recordings: Sequence[Recording], repeats: Sequence[Recording] = (), seed: int = 0) -> list[HeadLabel]:
    """Returns the labels of all self-attention heads, from recordings of several texts with one model.

    `repeats`: recordings of repeated random sequences, which count only for the scores in REPEATED_SCORES.
    """
    if not recordings:
        raise OptionError("labels need at least one text")
    word_frequency = word_counts(tokens for r in recordings for tokens in r.sequences)
    labels = []
    for number, attended in enumerate(recordings[0].attentions):
        if attended.kind != "self":
            continue
        sums = {name: BlockSums() for name in SCORE_DESCRIPTIONS}
        for recording in recordings:
            measure(recording, recording.attentions[number], word_frequency, sums)
        repetition = {name: sums[name] for name in REPEATED_SCORES}
        for recording in repeats:
            measure(recording, recording.attentions[number], word_frequency, repetition)
        scored = {name: _score_heads(s, attended.heads, seed) for name, s in sums.items()}
        for head in range(attended.heads):
            scores = {name: per_head[head] for name, per_head in scored.items() if per_head}
            labels.append(HeadLabel(number, attended.layer, attended.side, head, choose_label(scores), scores))
    return labels


def choose_label(scores: dict[str, Score]) -> str:
    """Returns the label of one head, chosen by its scores."""
    good = significant_scores(scores, _PRECEDED_BY)
    return max(good, key=lambda name: good[name].effect, default=MIXED)


def significant_scores(scores: dict[str, Score], preceded_by: Mapping[str, Sequence[str]]) -> dict[str, Score]:
    """Returns the scores that stand out, by name, without those that another score explains.

    A score is dropped if one of the scores in preceded_by[name] stands out, too, was not dropped before it, and has
    an effect at least half as large.
    """
    good = {name: score for name, score in scores.items() if score.stands_out}
    for name, others in preceded_by.items():
        mine = good.get(name)
        if mine and any(n in good and good[n].effect >= _EXPLAINS * mine.effect for n in others):
            del good[name]
    return good


def _score_heads(sums: BlockSums, heads: int, seed: int) -> list[Score]:
    """Returns the scores of all heads, with intervals from a bootstrap over blocks of queries."""
    if not sums.count:
        return []
    count = torch.cat(sums.count)
    score = torch.cat(sums.score, 1)
    baseline = torch.cat(sums.baseline, 1)
    low, high = _interval(score - baseline, count, seed)
    total = count.sum()
    means = (score.sum(1) / total).tolist()
    baselines = (baseline.sum(1) / total).tolist()
    return [Score(means[h], baselines[h], float(low[h]), float(high[h]), len(count)) for h in range(heads)]


def _interval(
    effect: Float[Tensor, "H N"], count: Float[Tensor, " N"], seed: int
) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
    """Returns the 2.5% and 97.5% quantiles of the mean effect when blocks are drawn with replacement."""
    draw = torch.Generator().manual_seed(seed)
    N = len(count)
    times = torch.zeros(DRAWS, N, dtype=torch.float64)
    picks = torch.randint(0, N, (DRAWS, N), generator=draw)
    times.scatter_add_(1, picks, torch.ones_like(picks, dtype=torch.float64))
    means = (effect @ times.T) / (times @ count).clamp(min=1)[None]
    bounds = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    return bounds[0], bounds[1]
