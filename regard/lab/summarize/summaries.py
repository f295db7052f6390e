"""Summaries of articles by a model, by beam search or sampled, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from regard.data.notices import FACTS, Judgement, judge, parse_notice
from regard.data.pairs import Pair, normalize_spaces
from regard.data.rouge import bootstrap, copied_share, mean_words, rouge
from regard.errors import OptionError
from regard.generate import Choice, Settings, generate
from regard.lab.summarize.results import FactCounts, MeanInterval, SummaryScore
from regard.models import Model, Seq2Seq

PART = 128  # articles at a time
GRAMS = (1, 2, 3)
REFERENCE = "reference"


class Summaries(NamedTuple):
    """What a model writes about one article, best first, each in one line; `cut` tokens of it were not read."""

    choices: tuple[Choice, ...]
    cut: int

    @property
    def text(self) -> str:
        """The first of them; nothing where there was nothing to read."""
        if not self.choices:
            return ""
        return self.choices[0].text or ""


def writer(model: Model[Any], name: str) -> Seq2Seq:
    """Returns the model; raises OptionError if it is no encoder-decoder or has no tokenizer."""
    if not isinstance(model, Seq2Seq):
        raise OptionError(
            f"{name} is a {type(model).__name__}, which does not summarise; expected an encoder-decoder, as "
            "`regard run summarize` and `regard train summarize` make"
        )
    if model.tokenizer is None:
        raise OptionError(f"{name} has no tokenizer.json, so it cannot read text")
    return model


def summaries(model: Seq2Seq, articles: Sequence[str], settings: Settings) -> list[Summaries]:
    """Returns the summaries of each article, in order.

    Of a long article the model reads as many tokens as it was trained on; an empty one has no summaries.
    """
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(normalize_spaces(article)) for article in articles]
    most = model.config.encoder.length
    room = model.limit
    if room is None:
        room = model.config.decoder.length
    settings = settings.but(max_tokens=min(settings.max_tokens, room))
    order = sorted((n for n, own in enumerate(ids) if own), key=lambda n: len(ids[n]))  # alike: little padding
    found: dict[int, Summaries] = {}
    for start in range(0, len(order), PART):
        part = order[start : start + PART]
        written = generate(model, [ids[n][:most] for n in part], settings)
        for n, result in zip(part, written, strict=True):
            lines = tuple(replace(c, text=normalize_spaces(c.text or "")) for c in result.choices[: settings.n])
            found[n] = Summaries(lines, max(0, len(ids[n]) - most))
    return [found.get(n, Summaries((), 0)) for n in range(len(articles))]


def score_summaries(pairs: Sequence[Pair], texts: Mapping[str, Sequence[str]]) -> dict[str, SummaryScore]:
    """Returns the scores of summaries by writer: ROUGE with intervals, its difference from the first writer's
    (paired, article by article), how much is copied, and how long they are. The references come last, without ROUGE."""
    references = [pair.summary or "" for pair in pairs]
    articles = [pair.article for pair in pairs]
    values = {name: rouge(said, references) for name, said in texts.items()}
    first = next(iter(values.values()))
    scores = {}
    for name, said in [*texts.items(), (REFERENCE, references)]:
        estimates = None
        above = None
        if name in values:
            estimates = {key: _mean_interval(x) for key, x in values[name].items()}
            above = {
                key: _mean_interval([a - b for a, b in zip(x, first[key], strict=True)])
                for key, x in values[name].items()
            }
        copied = {str(n): copied_share(said, articles, n) for n in GRAMS}
        scores[name] = SummaryScore(len(pairs), mean_words(said), copied, estimates, above)
    return scores


def _mean_interval(values: Sequence[float]) -> MeanInterval:
    mean, low, high = bootstrap(values)
    return mean, low, high


def count_facts(pairs: Sequence[Pair], texts: Mapping[str, Sequence[str]]) -> dict[str, FactCounts]:
    """Returns by model how many facts of generated pairs are right, confused, invented and missing; nothing for pairs
    whose facts are not known."""
    if any(pair.truth is None or set(pair.truth) != set(FACTS) for pair in pairs):
        return {}
    return {name: _count_facts(pairs, said) for name, said in texts.items()}


def _count_facts(pairs: Sequence[Pair], said: Sequence[str]) -> FactCounts:
    counts = dict.fromkeys(Judgement._fields, 0)
    odd = perfect = untold = claimed = 0
    wrong = []
    for pair, text in zip(pairs, said, strict=True):
        assert pair.truth is not None
        verdict = judge(text, pair.article, pair.truth)
        if pair.truth["place"] is None:
            untold += 1
            claimed += bool(verdict is not None and (parse_notice(text) or {}).get("place"))
        if verdict is None:
            odd += 1
            continue
        counts = {key: counts[key] + getattr(verdict, key) for key in counts}
        perfect += text == pair.summary
        if verdict.confused or verdict.invented:
            wrong.append([pair.article, pair.summary or "", text])
    return FactCounts(
        **counts,
        n=len(pairs),
        facts=sum(value is not None for pair in pairs for value in (pair.truth or {}).values()),
        perfect=perfect,
        odd=odd,
        untold=untold,
        claimed=claimed,
        wrong=wrong[:5],
    )
