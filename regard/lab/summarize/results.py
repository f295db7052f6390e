"""What the experiment "summarize" finds out, as it is written to results.json and read from it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.lab.results import OutcomeTable

MeanInterval = tuple[float, float, float]  # a mean, and the ends of its 95% interval


@dataclass(frozen=True)
class PairsSummary:
    """The pairs: counts by split, mean words, and how many articles and summaries were cut after `source` and `target`
    tokens. `k` is the mean number of words of a summary, `examples` are [article, summary]."""

    generated: bool
    pairs: dict[str, int]
    words: dict[str, float]
    k: int
    vocabulary: int
    source: int
    target: int
    cut: tuple[int, int]
    examples: list[list[str]]


@dataclass(frozen=True)
class SummarizerTraining:
    """One training. `base`: whether its mechanism is the one that performers are compared with; `features` is then
    None. `dev` holds loss, perplexity and token_accuracy of the best checkpoint."""

    name: str
    run: str
    base: bool
    mechanism: str
    features: int | None
    rate: float
    parameters: int
    steps: int
    seconds: float
    best_step: int | None
    dev: dict[str, float]
    curve: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def kind(self) -> str:
        """The mechanism, for a performer with its number of features."""
        if self.base:
            return self.mechanism
        return f"performer {self.features}"

    @property
    def loss(self) -> float:
        """The dev loss a token at the best checkpoint."""
        return self.dev["loss"]


@dataclass(frozen=True)
class SummaryScore:
    """The scores of the summaries of one writer (a model, a baseline or the references) on a split.

    `copied` is the share of their n-grams that stand in the article, by n. `rouge` is by measure, and `above` how far
    it is above the first words of the article, paired article by article; both are None for the references.
    """

    n: int
    words: float
    copied: dict[str, float | None]
    rouge: dict[str, MeanInterval] | None
    above: dict[str, MeanInterval] | None

    def on(self, measure: str) -> MeanInterval:
        """Returns the ROUGE of summaries that are no references."""
        assert self.rouge is not None
        return self.rouge[measure]


@dataclass(frozen=True)
class FactCounts:
    """How many facts of generated articles the summaries of one model state: right, confused with another in the
    article, invented, or left out (`missing`).

    `perfect` summaries are the reference word for word, `odd` ones have another form. Of `untold` articles, which do
    not say where somebody was born, `claimed` summaries say it. `wrong` are [article, reference, summary].
    """

    right: int
    confused: int
    invented: int
    missing: int
    n: int
    facts: int
    perfect: int
    odd: int
    untold: int
    claimed: int
    wrong: list[list[str]]


@dataclass(frozen=True)
class WrittenSummaries:
    """Summaries of one article by one model, each with its score: by beam search, and drawn."""

    beams: list[tuple[str, float]]
    samples: list[tuple[str, float]]


@dataclass(frozen=True)
class SummaryExample:
    """One article with its reference, its first words, and what each model writes."""

    article: str
    reference: str | None
    lead: str
    by: dict[str, WrittenSummaries]


@dataclass(frozen=True)
class PairMasks:
    """The masks of an encoder-decoder for one pair, by name, as rows of 0 and 1; `source` and `target` say which of the
    tokens are no padding."""

    matrices: dict[str, list[list[int]]]
    source: list[int]
    target: list[int]


@dataclass(frozen=True)
class CrossHead:
    """The weights [written tokens, words read] of one head of the decoder over the article."""

    layer: int
    head: int
    weights: list[list[float]]


@dataclass(frozen=True)
class CrossAttention:
    """Where the decoder looks in an article while it writes its own summary."""

    read: list[str]
    written: list[str]
    heads: list[CrossHead]
    article: str
    summary: str


@dataclass(frozen=True)
class SummarizeResults:
    """All results. `best` are the names of the best base model and the best performer, `baseline` that of the first
    words of an article. `scores` are by split and writer, `facts` by model, empty unless pairs were generated."""

    run: str
    seed: int
    data: PairsSummary
    compare: dict[str, Any]
    models: list[SummarizerTraining]
    best: list[str]
    baseline: str
    scores: dict[str, dict[str, SummaryScore]]
    facts: dict[str, FactCounts]
    model: dict[str, str]
    examples: list[SummaryExample]
    masks: PairMasks
    attention: CrossAttention
    outcome: OutcomeTable | None = None
