"""How good summaries are: ROUGE with bootstrap intervals, how much is copied, and the first words as a baseline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from regard.data.files import DataError

MEASURES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean over articles and its 95% interval."""

    mean: float
    low: float
    high: float


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Returns F1 of ROUGE-1, ROUGE-2 and ROUGE-L of each prediction, with stemming, by the `rouge-score` library."""
    if len(predictions) != len(references):
        raise DataError(f"{len(predictions)} summaries for {len(references)} references; expected as many, in order")
    from rouge_score import rouge_scorer  # it imports nltk, which takes a second

    scorer = rouge_scorer.RougeScorer(list(MEASURES), use_stemmer=True)
    rows = [scorer.score(r, p) for p, r in zip(predictions, references, strict=True)]
    return {name: [float(row[name].fmeasure) for row in rows] for name in MEASURES}


def bootstrap(values: Sequence[float], seed: int = 0, times: int = RESAMPLES) -> Estimate:
    """Returns the mean and its 95% interval: the 2.5% and 97.5% points of the means of samples drawn with replacement.

    The same seed draws the same articles; for the interval of a difference, pass the differences as `values`.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        raise DataError("no values: expected at least one to estimate a mean")
    generator = np.random.Generator(np.random.Philox(seed))  # its numbers are the same on every machine
    n = len(sample)
    means = np.array([sample[generator.integers(n, size=n)].mean() for _ in range(times)])
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(sample.mean()), float(low), float(high))


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case; numbers are words too."""
    return re.findall(r"\w+", text.lower())


def count_copied(summary: str, article: str, n: int) -> tuple[int, int]:
    """Returns how many of a summary's n-grams of words also occur in the article, and how many n-grams it has."""
    in_summary = _count_ngrams(words(summary), n)
    in_article = _count_ngrams(words(article), n)
    return sum(count for gram, count in in_summary.items() if gram in in_article), sum(in_summary.values())


def copied_share(summaries: Sequence[str], articles: Sequence[str], n: int) -> float | None:
    """Returns the share of all summaries' n-grams that also occur in their articles; None if there are no n-grams."""
    counts = [count_copied(s, a, n) for s, a in zip(summaries, articles, strict=True)]
    total = sum(all_grams for _, all_grams in counts)
    if not total:
        return None
    return sum(copied for copied, _ in counts) / total


def lead(article: str, k: int) -> str:
    """Returns the first k words of an article, as they stand: the lead-k baseline."""
    return " ".join(article.split()[:k])


def mean_words(texts: Iterable[str]) -> float:
    """Returns the mean number of words of texts, divided at white space; 0 without texts."""
    counts = [len(text.split()) for text in texts]
    return sum(counts) / max(len(counts), 1)


def _count_ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
