"""Scores of heads. Most scores are the attention mass on a set of keys, compared with that of uniform attention.

    score = mean over queries of Σ_{j ∈ set(i)} w(i, j),      baseline = mean of |set(i) ∩ allowed(i)| / |allowed(i)|
    effect = (score − baseline) / (1 − baseline)

An effect is 0 for uniform attention and 1 if all mass is on the set, however long the text is. A query does not count
if it is padding, sees fewer than two keys, has only weights of 0 in all heads, or (except for "broadcast") may see no
key of its set. Weights of a memory (gated and delta attention) are signed and sum to anything: of them |w| / Σ|w|
counts. The score "broad" is an entropy instead (`_add_broad`), and its effect is the plain difference. Sums are
stored per text, for a bootstrap over texts.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.lens.trace.formulas import SoftmaxFormula
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import RecordedAttention, Recording
from regard.lens.trace.weighing import as_shares

NEAR = 3  # largest distance that counts as local
# A text with fewer different tokens is not measured. A decoder may write one token over and over, and then any liking
# for its start token looks like a habit.
MIN_DIFFERENT = 5

SCORE_DESCRIPTIONS = {
    "previous": "the token before",
    "next": "the token after",
    "self": "the token itself",
    "first": "the first token, such as [CLS]",
    "separator": "special tokens other than the first, such as [SEP]",
    "punctuation": "punctuation",
    "same word": "the same word elsewhere",
    "rare word": "words that are rare in the texts",
    "induction": "what followed an earlier occurrence of the token",
    "local": f"tokens at most {NEAR} away",
    "broadcast": "one token that all others look at",
    "broad": "many keys, more evenly than random scores of the same scale",
}
REPEATED_SCORES = ("induction", "same word")  # scores that are measured on repeated random sequences
# Scores that are measured on these alone: in a text what followed last time is often what the words say anyway.
ONLY_REPEATED = ("induction",)


@dataclass
class TextSums:
    """Sums of scores, baselines and rooms [H] over the queries of a text, and numbers of queries: one entry per text.

    The room of a query is the largest difference that its score can have from its baseline.
    """

    score: list[Tensor] = field(default_factory=list)
    baseline: list[Tensor] = field(default_factory=list)
    room: list[Tensor] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def begin_text(self) -> None:
        """Starts the sums of another text."""
        for sums in (self.score, self.baseline, self.room):
            sums.append(torch.zeros((), dtype=torch.double))
        self.count.append(0)

    def add(
        self,
        score: Float[Tensor, "H R"],
        baseline: Float[Tensor, "#H R"],
        counted: Bool[Tensor, " R"],
        room: Float[Tensor, "#H R"] | None = None,
    ) -> None:
        """Adds the `counted` queries of a chunk to the sums of the last text; the room is 1 − baseline unless given."""
        if room is None:
            room = 1 - baseline
        for sums, x in ((self.score, score), (self.baseline, baseline), (self.room, room)):
            sums[-1] = sums[-1] + x.expand(len(score), -1)[:, counted].double().sum(1)
        self.count[-1] += int(counted.sum())


def word_counts(sequences: Iterable[Tokens]) -> dict[str, int]:
    """Returns how many tokens belong to each word: a word of three tokens counts three for each occurrence."""
    return Counter(word for tokens in sequences for word in _words(tokens) if word)


def measure(
    recording: Recording, attended: RecordedAttention, word_frequency: dict[str, int], into: dict[str, TextSums]
) -> None:
    """Adds one text to the sums of one attention module, for the scores that `into` names.

    A text with fewer than `MIN_DIFFERENT` different tokens is left out.
    """
    queries, keys = recording.query_and_key_tokens(attended)
    if len(set(keys.tokens if keys.ids is None else keys.ids)) < MIN_DIFFERENT:
        return
    sets = {name: make for name, make in _key_sets(keys, word_frequency).items() if name in into}
    for sums in into.values():
        sums.begin_text()
    column = None
    if "broadcast" in into:
        column = _broadcast_columns(recording, attended)
    for rows, signed in recording.chunks(attended):
        weights = as_shares(attended, signed)
        allowed = attended.rules.allowed(queries, keys, rows)
        counted = queries.not_padding[rows] & allowed.any(1) & (weights.abs().sum(-1) > 0).any(0)
        visible_keys = allowed.sum(1).clamp(min=1)
        for name, make in sets.items():
            chosen = make(rows) & allowed
            share = torch.einsum("hrs,rs->hr", weights, chosen.float())
            into[name].add(share, (chosen.sum(1) / visible_keys)[None], counted & chosen.any(1) & (visible_keys > 1))
        if column is not None:
            _add_broadcast(into["broadcast"], weights, allowed, rows, column, counted & (visible_keys > 1))
        if "broad" in into and isinstance(attended.formula, SoftmaxFormula):
            _add_broad(into["broad"], attended, weights, allowed, rows, counted & (visible_keys > 1))


def _key_sets(keys: Tokens, word_frequency: dict[str, int]) -> dict[str, Callable[[Tensor], Bool[Tensor, "R S"]]]:
    """Returns, for each score that is the mass on a set of keys, a function from query rows to that set [R,S].

    Queries and keys are the same tokens: the scores are those of self-attention.
    """
    p = keys.position_tensor
    words = _words(keys)
    word_ids = _number_words(words)
    token_ids = _number_words(keys.tokens if keys.ids is None else [str(i) for i in keys.ids])
    special = torch.tensor(keys.special, dtype=torch.bool)
    first = torch.zeros(len(keys), dtype=torch.bool)
    first[int(keys.not_padding.int().argmax())] = True
    punctuation = torch.tensor([_is_punctuation(t) and not s for t, s in zip(keys.tokens, keys.special, strict=True)])
    rare = torch.tensor([w in _rare(word_frequency) for w in words]) & ~special & ~punctuation
    # The index of this occurrence of a word: two occurrences of a word have different indices, but equal `word_ids`.
    word_index = torch.tensor(keys.words)
    previous_token = torch.cat([torch.tensor([-1]), token_ids[:-1]])

    def offset(d: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: p[None] - p[rows][:, None] == d

    def columns(chosen: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda rows: chosen[None].expand(len(rows), -1)

    def elsewhere(rows: Tensor) -> Tensor:
        other = (word_index[rows][:, None] != word_index[None]) | (word_index[None] < 0)
        other &= torch.arange(len(keys))[None] != rows[:, None]
        return (word_ids[rows][:, None] == word_ids[None]) & (word_ids[None] >= 0) & other & ~special[None]

    def induction(rows: Tensor) -> Tensor:
        there = torch.arange(len(keys))[None]
        return (token_ids[rows][:, None] == previous_token[None]) & (there < rows[:, None]) & ~special[None]

    return {
        "previous": offset(-1),
        "next": offset(1),
        "self": offset(0),
        "first": columns(first),
        "separator": columns(special & ~first),
        "punctuation": columns(punctuation),
        "same word": elsewhere,
        "rare word": columns(rare),
        "induction": induction,
        "local": lambda rows: (p[None] - p[rows][:, None]).abs() <= NEAR,
    }


def _broadcast_columns(recording: Recording, attended: RecordedAttention) -> tuple[Tensor, Tensor]:
    """Returns for each head the key with the largest total weight from even-numbered queries, and that from odd ones.

    Each half is then scored on the key of the other half, since a key chosen on the same queries would score too high.
    """
    S = len(recording.sequences[attended.keys])
    totals = torch.zeros(2, attended.heads, S)
    for rows, signed in recording.chunks(attended):
        weights = as_shares(attended, signed)
        for half in (0, 1):
            totals[half] += weights[:, rows % 2 == half].sum(1)
    return totals[0].argmax(-1), totals[1].argmax(-1)


def _add_broadcast(
    sums: TextSums, weights: Tensor, allowed: Tensor, rows: Tensor, column: tuple[Tensor, Tensor], counted: Tensor
) -> None:
    """Adds the weight on the key that the other half of the queries attends to most."""
    even, odd = column
    chosen = torch.where((rows % 2 == 0)[None], odd[:, None], even[:, None])  # [H,R]: what the other half chose
    share = weights.gather(2, chosen[..., None])[..., 0]
    visible = allowed[torch.arange(len(rows))[None], chosen]
    baseline = visible / allowed.sum(1).clamp(min=1)
    sums.add(share, baseline.float(), counted)


def _add_broad(
    sums: TextSums, attended: RecordedAttention, weights: Tensor, allowed: Tensor, rows: Tensor, counted: Tensor
) -> None:
    """Adds the entropy divided by ln(number of visible keys); the baseline is that of random Gaussian scores.

    The standard deviation of a random score is that of scale·q·k for vectors in random directions with the norms of
    this q and this k; the mean key is subtracted from k first.
    """
    formula = attended.formula
    assert isinstance(formula, SoftmaxFormula) and attended.q is not None and attended.k is not None
    q = attended.q[:, rows].norm(dim=-1)
    # The mean key shifts all scores of a row alike, which softmax ignores.
    k = (attended.k - attended.k.mean(1, keepdim=True)).norm(dim=-1)
    k = k.repeat_interleave(attended.heads // attended.k.shape[0], 0)
    spread = abs(formula.scale) * q[:, :, None] * k[:, None, :] / math.sqrt(attended.q.shape[-1])
    draw = torch.Generator().manual_seed(int(rows[0]))
    chance = torch.randn(spread.shape, generator=draw) * spread
    chance = chance.masked_fill(~allowed, float("-inf"))
    chance = chance.masked_fill(~allowed.any(1)[:, None], 0).softmax(-1)
    max_entropy = allowed.sum(1).clamp(min=2).log()
    # Random scores of short vectors are nearly even, so a share of what is left to evenness would be mostly noise.
    sums.add(_entropy(weights) / max_entropy, _entropy(chance) / max_entropy, counted, torch.ones(1, len(rows)))


def _entropy(weights: Tensor) -> Tensor:
    share = weights.clamp(min=0)
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-30)
    return -(share * share.clamp(min=1e-30).log()).sum(-1)


def _words(tokens: Tokens) -> list[str]:
    """Returns the word that each token belongs to, in lower case; "" for none. Without a text, the token itself."""
    if not tokens.text:
        return [t if not s else "" for t, s in zip(tokens.tokens, tokens.special, strict=True)]
    parts: dict[int, tuple[int, int]] = {}
    for word, a, b in zip(tokens.words, tokens.starts, tokens.ends, strict=True):
        if word >= 0:
            low, high = parts.get(word, (a, b))
            parts[word] = (min(low, a), max(high, b))
    return ["" if w < 0 else tokens.text[slice(*parts[w])].strip().lower() for w in tokens.words]


def _number_words(words: Sequence[str]) -> Tensor:
    """Returns an id for each word: equal words get equal ids, and the empty word gets −1."""
    known: dict[str, int] = {}
    return torch.tensor([-1 if not w else known.setdefault(w, len(known)) for w in words])


def _is_punctuation(token: str) -> bool:
    token = token.strip()
    return bool(token) and all(unicodedata.category(c)[0] in "PS" for c in token)


def _rare(word_frequency: dict[str, int]) -> set[str]:
    """Returns the words with a letter whose count in `word_counts` is 1: they occur once in all texts, as one token.

    Returns no word if words with a letter have fewer than 50 tokens in all.
    """
    words = {w for w in word_frequency if any(c.isalpha() for c in w)}
    if sum(word_frequency[w] for w in words) < 50:
        return set()
    return {w for w in words if word_frequency[w] == 1}
