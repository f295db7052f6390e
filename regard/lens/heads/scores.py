"""What heads look at, measured: the share of attention on a set of keys, beside that which an even spread would give.

    score = mean over queries of Σ_{j ∈ set(i)} w(i, j),      baseline = mean of |set(i) ∩ seen(i)| / |seen(i)|

Queries that have nothing in the set, or see nothing, do not count. BlockSums are kept for blocks of queries, so that a
bootstrap can draw blocks again.
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
from regard.lens.trace.trace import Attended, Recording

BLOCK = 16  # queries that are drawn together
NEAR = 3  # positions that count as local

ABOUT = {
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
    "broad": "more keys, more evenly, than vectors of these lengths would by chance",
}
REPEATS = ("induction", "same word")  # what sequences that repeat themselves are looked at for


@dataclass
class BlockSums:
    """BlockSums over blocks of queries, [H, blocks] and [blocks], in pieces."""

    score: list[Tensor] = field(default_factory=list)
    baseline: list[Tensor] = field(default_factory=list)
    count: list[Tensor] = field(default_factory=list)

    def add(
        self,
        score: Float[Tensor, "H R"],
        baseline: Float[Tensor, "#H R"],
        counts: Bool[Tensor, " R"],
        size: int = BLOCK,
    ) -> None:
        """Adds the queries of a tile, in blocks of `size`."""
        rows = counts.nonzero()[:, 0]
        if not len(rows):
            return
        block = rows // size
        many = int(block[-1]) + 1
        sums = (x.expand(len(score), -1)[:, rows].double() for x in (score, baseline))
        score, baseline = (x.new_zeros(len(score), many).index_add_(1, block, x) for x in sums)
        count = torch.bincount(block, minlength=many).double()
        kept = count > 0
        self.score.append(score[:, kept])
        self.baseline.append(baseline[:, kept])
        self.count.append(count[kept])


def word_counts(sequences: Iterable[Tokens]) -> dict[str, int]:
    """Returns how often each word occurs."""
    return Counter(word for tokens in sequences for word in _words(tokens) if word)


def measure(recording: Recording, attended: Attended, common: dict[str, int], into: dict[str, BlockSums]) -> None:
    """Adds one text to the sums of one attention: all scores, or those alone that `into` has keys for."""
    queries, keys = recording.query_and_key_tokens(attended)
    sets = {name: make for name, make in _sets(queries, keys, common).items() if name in into}
    column = None
    if "broadcast" in into:
        column = _broadcast_columns(recording, attended)
    for rows, weights in recording.tiles(attended):
        seen = attended.rules.allowed(queries, keys, rows)
        counted = queries.not_padding[rows] & seen.any(1) & (weights.abs().sum(-1) > 0).any(0)
        most = seen.sum(1).clamp(min=1)
        for name, make in sets.items():
            chosen = make(rows) & seen
            share = torch.einsum("hrs,rs->hr", weights, chosen.float())
            into[name].add(share, (chosen.sum(1) / most)[None], counted & chosen.any(1) & (most > 1))
        if column is not None:
            _broadcast(into["broadcast"], weights, seen, rows, column, counted & (most > 1))
        if "broad" in into and isinstance(attended.formula, SoftmaxFormula):
            _broad(into["broad"], attended, weights, seen, rows, counted & (most > 1))


def _sets(queries: Tokens, keys: Tokens, common: dict[str, int]) -> dict[str, Callable[[Tensor], Bool[Tensor, "R S"]]]:
    """Returns for each score the keys that it is about, for some queries."""
    p = keys.position_tensor
    ids = _numbers(_words(keys))
    same_token = _numbers(keys.tokens if keys.ids is None else [str(i) for i in keys.ids])
    special = torch.tensor(keys.special, dtype=torch.bool)
    first = torch.zeros(len(keys), dtype=torch.bool)
    first[int(keys.not_padding.int().argmax())] = True
    words = _words(keys)
    mark = torch.tensor([_is_mark(t) and not s for t, s in zip(keys.tokens, keys.special, strict=True)])
    rare = torch.tensor([w in _rare(common) for w in words]) & ~special & ~mark
    inner = torch.tensor(keys.words)
    after = torch.cat([torch.tensor([-1]), same_token[:-1]])

    def offset(d: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: p[None] - p[rows][:, None] == d

    def columns(chosen: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda rows: chosen[None].expand(len(rows), -1)

    def elsewhere(rows: Tensor) -> Tensor:
        other = (inner[rows][:, None] != inner[None]) | (inner[None] < 0)
        other &= torch.arange(len(keys))[None] != rows[:, None]
        return (ids[rows][:, None] == ids[None]) & (ids[None] >= 0) & other & ~special[None]

    def induction(rows: Tensor) -> Tensor:
        there = torch.arange(len(keys))[None]
        return (same_token[rows][:, None] == after[None]) & (there < rows[:, None]) & ~special[None]

    return {
        "previous": offset(-1),
        "next": offset(1),
        "self": offset(0),
        "first": columns(first),
        "separator": columns(special & ~first),
        "punctuation": columns(mark),
        "same word": elsewhere,
        "rare word": columns(rare),
        "induction": induction,
        "local": lambda rows: (p[None] - p[rows][:, None]).abs() <= NEAR,
    }


def _broadcast_columns(recording: Recording, attended: Attended) -> tuple[Tensor, Tensor]:
    """Returns for each head the key that even queries look at most, and the one that odd queries do.

    Each half is then measured on the other's choice: a key chosen on the same queries would look good by chance.
    """
    S = len(recording.sequences[attended.keys])
    totals = torch.zeros(2, attended.heads, S)
    for rows, weights in recording.tiles(attended):
        for half in (0, 1):
            totals[half] += weights[:, rows % 2 == half].sum(1)
    return totals[0].argmax(-1), totals[1].argmax(-1)


def _broadcast(
    sums: BlockSums, weights: Tensor, seen: Tensor, rows: Tensor, column: tuple[Tensor, Tensor], counted: Tensor
) -> None:
    """Adds the share of the key that the other half of the queries looks at most."""
    even, odd = column
    chosen = torch.where((rows % 2 == 0)[None], odd[:, None], even[:, None])  # [H,R]: what the other half chose
    share = weights.gather(2, chosen[..., None])[..., 0]
    visible = seen[torch.arange(len(rows))[None], chosen]
    baseline = visible / seen.sum(1).clamp(min=1)
    # All queries of a text share its key, so they are one block.
    sums.add(share, baseline.float(), counted, size=len(rows))


def _broad(sums: BlockSums, attended: Attended, weights: Tensor, seen: Tensor, rows: Tensor, counted: Tensor) -> None:
    """Adds the entropy over ln of what is seen, beside that of scores drawn at random for vectors as long as these."""
    formula = attended.formula
    assert isinstance(formula, SoftmaxFormula) and attended.q is not None and attended.k is not None
    q = attended.q[:, rows].norm(dim=-1)
    k = (attended.k - attended.k.mean(1, keepdim=True)).norm(dim=-1)  # what all keys share cancels in a row
    k = k.repeat_interleave(attended.heads // attended.k.shape[0], 0)
    spread = abs(formula.scale) * q[:, :, None] * k[:, None, :] / math.sqrt(attended.q.shape[-1])
    draw = torch.Generator().manual_seed(int(rows[0]))
    chance = torch.randn(spread.shape, generator=draw) * spread
    chance = chance.masked_fill(~seen, float("-inf"))
    chance = chance.masked_fill(~seen.any(1)[:, None], 0).softmax(-1)
    most = seen.sum(1).clamp(min=2).log()
    sums.add(_entropy(weights) / most, _entropy(chance) / most, counted)


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


def _numbers(words: Sequence[str]) -> Tensor:
    """Returns a number for each word; equal words have equal numbers, and no word has −1."""
    known: dict[str, int] = {}
    return torch.tensor([-1 if not w else known.setdefault(w, len(known)) for w in words])


def _is_mark(token: str) -> bool:
    token = token.strip()
    return bool(token) and all(unicodedata.category(c)[0] in "PS" for c in token)


def _rare(common: dict[str, int]) -> set[str]:
    """Returns the words that occur once, where there are enough words to tell."""
    words = {w for w in common if any(c.isalpha() for c in w)}
    if sum(common[w] for w in words) < 50:
        return set()
    return {w for w in words if common[w] == 1}
