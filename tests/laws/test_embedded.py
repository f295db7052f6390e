"""What is called with token ids, has a width only in its parameters, or fails in float16 alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import regard


class LanguageModel(nn.Module):
    """ids [B,T] -> logits [B,T,V] and a loss; `ahead` more tokens are seen than there should be."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, 12)
        self.places = nn.Embedding(64, 12)
        self.qkv = nn.Linear(12, 36)
        self.head = nn.Linear(12, 50, bias=False)
        self.tokens.weight = self.head.weight
        self.ahead = ahead
        self.block_size = 64

    def forward(self, idx, targets=None):
        B, T = idx.shape
        x = self.tokens(idx) + self.places(torch.arange(T))
        q, k, v = (y.view(B, T, 3, 4).transpose(1, 2) for y in self.qkv(x).split(12, 2))
        seen = torch.ones(T, T, dtype=torch.bool).tril(self.ahead)
        x = x + functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(B, T, 12)
        return self.head(x), None


def test_a_model_over_ids_is_asked_by_the_vectors_of_its_tokens():
    laws = ["looks-ahead", "batch", "pure", "gradients"]
    right = regard.check(LanguageModel(), causal=True, only=laws, draws=6)
    assert [v.status for v in right] == ["holds"] * len(laws), str(right)
    (wrong,) = regard.check(LanguageModel(ahead=1), causal=True, only=laws, draws=6).broken
    assert wrong.law == "looks-ahead"


def test_the_model_is_as_it_was_afterwards():
    model = LanguageModel()
    ids = torch.randint(50, (2, 7))
    before = model(ids)[0]
    regard.check(model, causal=True, only=["pure"], draws=3)
    assert model(ids)[0].equal(before) and not model.tokens._forward_hooks


class Einsums(nn.Module):
    """Self-attention whose width is told by the sizes of its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w_in = nn.Parameter(torch.randn(3, 15, 3, 5) / 4)
        self.w_out = nn.Parameter(torch.randn(3, 5, 15) / 4)

    def forward(self, x):
        q, k, v = torch.einsum("btd,zdhe->zbhte", x, self.w_in)
        scores = q @ k.mT / 5**0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("bhte,hed->btd", scores.softmax(-1) @ v, self.w_out)


def test_a_width_is_found_among_the_sizes_of_parameters():
    verdicts = regard.check(Einsums(), only=["looks-ahead", "batch"], draws=6)
    assert [v.status for v in verdicts] == ["holds"] * 2, str(verdicts)


def multiplied_mask(q, k, v, causal=True):
    """In float16 −1e9 is −∞, and 0 times that is NaN."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype).triu(1 + k.shape[2] - q.shape[2])
    scores = q @ k.mT / q.shape[3] ** 0.5
    if causal:
        scores = scores + hidden * torch.tensor(-1e9, dtype=q.dtype)
    return scores.softmax(3) @ v


def filled_mask(q, k, v, causal=True):
    hidden = torch.ones(q.shape[2], k.shape[2]).triu(1 + k.shape[2] - q.shape[2]) > 0
    scores = q @ k.mT / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    return scores.softmax(3) @ v


def test_what_is_nan_in_float16_alone_is_found():
    (wrong,) = regard.check(multiplied_mask, only=["precision"], draws=6).broken
    assert "float16" in wrong.detail
    assert regard.check(filled_mask, only=["precision"], draws=6).ok
