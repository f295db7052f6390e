"""What words alone say about a text, in no order: the baseline that a model of sentences has to beat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regard.data.sentences import Sentence

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\w\s]")


class BagOfWords:
    """Logistic regression on which words occur: p(positive) = σ(b + Σ_w w_word), each word of a text counted once.

    `grams`: 1 for single words, 2 for pairs of neighbours too. The weights minimise the mean loss + λ‖w‖²; λ is the one
    of `PENALTIES` that is right most often on dev.
    """

    def __init__(self, train: Sequence[Sentence], dev: Sequence[Sentence], grams: int = 1) -> None:
        self.grams = grams
        self.places = {gram: n for n, gram in enumerate(sorted({g for s in train for g in self._grams(s.text)}))}
        labels = torch.tensor([float(s.label) for s in train], dtype=torch.float64)
        rows, judged = self._rows([s.text for s in train]), self._rows([s.text for s in dev])
        wanted = torch.tensor([s.label for s in dev])
        fits = [_fitted(rows, labels, len(self.places), penalty) for penalty in PENALTIES]
        right = [int(((judged.sums(w) + b > 0) == wanted).sum()) for w, b in fits]
        best = max(range(len(fits)), key=right.__getitem__)
        self.penalty, (self.weights, self.offset) = PENALTIES[best], fits[best]

    def predict(self, texts: Sequence[str]) -> list[int]:
        """The label of each text; words that were not in train say nothing."""
        return [int(x > 0) for x in (self._rows(texts).sums(self.weights) + self.offset).tolist()]

    def _grams(self, text: str) -> set[str]:
        words = _WORD.findall(text.lower())
        return {" ".join(words[n : n + k]) for k in range(1, self.grams + 1) for n in range(len(words) - k + 1)}

    def _rows(self, texts: Sequence[str]) -> _Rows:
        found = [sorted(self.places[g] for g in self._grams(text) if g in self.places) for text in texts]
        row = torch.tensor([n for n, own in enumerate(found) for _ in own], dtype=torch.long)
        return _Rows(row, torch.tensor([place for own in found for place in own], dtype=torch.long), len(texts))


class _Rows(NamedTuple):
    """Which word stands in which row."""

    row: Tensor
    place: Tensor
    n: int

    def sums(self, weights: Tensor) -> Tensor:
        """The sum of the weights of each row's words."""
        return torch.zeros(self.n, dtype=weights.dtype).index_add(0, self.row, weights[self.place])


def _fitted(rows: _Rows, labels: Tensor, words: int, penalty: float) -> tuple[Tensor, Tensor]:
    weights = torch.zeros(words, dtype=labels.dtype, requires_grad=True)
    offset = torch.zeros((), dtype=labels.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([weights, offset], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        made = functional.binary_cross_entropy_with_logits(rows.sums(weights) + offset, labels)
        made = made + penalty * weights.square().sum()
        made.backward()
        return made

    solver.step(loss)
    return weights.detach(), offset.detach()
