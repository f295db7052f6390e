"""A bag of words, which ignores their order: the baseline that a sentence classifier has to beat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
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
        self.vocabulary = {gram: n for n, gram in enumerate(sorted({g for s in train for g in self._ngrams(s.text)}))}
        labels = torch.tensor([float(s.label) for s in train], dtype=torch.float64)
        train_rows = self._sparse_rows([s.text for s in train])
        dev_rows = self._sparse_rows([s.text for s in dev])
        dev_labels = torch.tensor([s.label for s in dev])
        fits = [_fit(train_rows, labels, len(self.vocabulary), penalty) for penalty in PENALTIES]
        right = [int(((dev_rows.sum_weights(w) + b > 0) == dev_labels).sum()) for w, b in fits]
        best = max(range(len(fits)), key=right.__getitem__)
        self.penalty = PENALTIES[best]
        self.weights, self.offset = fits[best]

    def predict(self, texts: Sequence[str]) -> list[int]:
        """Returns the label of each text; words that do not occur in train are ignored."""
        logits = self._sparse_rows(texts).sum_weights(self.weights) + self.offset
        return [int(x > 0) for x in logits.tolist()]

    def _ngrams(self, text: str) -> set[str]:
        words = _WORD.findall(text.lower())
        return {" ".join(words[n : n + k]) for k in range(1, self.grams + 1) for n in range(len(words) - k + 1)}

    def _sparse_rows(self, texts: Sequence[str]) -> _SparseRows:
        """Returns the matrix of which known words and pairs occur in which text, a row for each text."""
        known = [sorted(self.vocabulary[g] for g in self._ngrams(text) if g in self.vocabulary) for text in texts]
        rows = torch.tensor([n for n, columns in enumerate(known) for _ in columns], dtype=torch.long)
        columns = torch.tensor([column for columns in known for column in columns], dtype=torch.long)
        return _SparseRows(rows, columns, len(texts))


class _SparseRows(NamedTuple):
    """A matrix of n rows that is 1 at (rows[i], columns[i]) and 0 elsewhere: which word occurs in which text."""

    rows: Int[Tensor, " ones"]
    columns: Int[Tensor, " ones"]
    n: int

    def sum_weights(self, weights: Float[Tensor, " words"]) -> Float[Tensor, " n"]:
        """Returns the product with a vector: the sum of the weights of each text's words."""
        return torch.zeros(self.n, dtype=weights.dtype).index_add(0, self.rows, weights[self.columns])


def _fit(
    rows: _SparseRows, labels: Float[Tensor, " n"], words: int, penalty: float
) -> tuple[Float[Tensor, " words"], Float[Tensor, ""]]:
    """Returns the weights and the offset that minimise the penalised loss."""
    # The loss is convex, so that a start at zero reaches the one minimum.
    weights = torch.zeros(words, dtype=labels.dtype, requires_grad=True)
    offset = torch.zeros((), dtype=labels.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([weights, offset], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(rows.sum_weights(weights) + offset, labels)
        loss = loss + penalty * weights.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return weights.detach(), offset.detach()
