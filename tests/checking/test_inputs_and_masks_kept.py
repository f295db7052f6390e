"""Modules that do not read one of their inputs, or keep a mask from one call to the next."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import regard


class ThreeInputs(nn.Module):
    """Attention over query, key and value [B,T,D]; `reads` says which input makes the keys and which the values."""

    def __init__(self, reads: tuple[int, int] = (1, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w_q, self.w_k, self.w_v = (nn.Linear(12, 12) for _ in range(3))
        self.reads = reads

    def forward(self, query, key, value):
        given = (query, key, value)
        made = (self.w_q(query), self.w_k(given[self.reads[0]]), self.w_v(given[self.reads[1]]))
        q, k, v = (x.unflatten(2, (3, 4)).transpose(1, 2) for x in made)
        weights = (q @ k.mT / 2).softmax(3)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_an_input_that_is_not_read_is_told():
    assert regard.check(ThreeInputs(), only=["attends"], draws=6).ok
    for reads, words in {(2, 2): "no change of the keys", (1, 1): "no change of the values"}.items():
        (wrong,) = regard.check(ThreeInputs(reads), only=["attends"], draws=6).broken
        assert words in wrong.detail


def mean_so_far(query, key, value):
    """A baseline that needs neither queries nor keys."""
    count = torch.arange(1, value.shape[2] + 1, dtype=value.dtype)
    return value.cumsum(2) / count[:, None]


def test_a_mean_that_asks_nothing_is_not_accused():
    assert regard.check(mean_so_far, only=["attends"], draws=6).ok


class KeptMask(nn.Module):
    """Causal self-attention with a mask of tokens [B,T]; `edits`: it is written into the triangle that is kept."""

    def __init__(self, edits: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(12, 36)
        self.edits = edits
        self.kept = torch.empty(0)

    def forward(self, x, mask=None):
        """mask: True for tokens that exist"""
        B, T, _ = x.shape
        if self.kept.shape[:2] != (B, T):
            self.kept = torch.ones(B, T, T, dtype=torch.bool).tril()
        seen = self.kept if self.edits else self.kept.clone()
        if mask is not None:
            seen &= mask[:, None]
        q, k, v = self.qkv(x).unflatten(2, (9, 4)).transpose(1, 2).split(3, 1)
        scores = (q @ k.mT).masked_fill(~seen[:, None], torch.finfo(q.dtype).min)
        return (functional.softmax(scores, 3) @ v).transpose(1, 2).flatten(2)


def test_a_mask_that_outlives_its_call_is_found():
    assert regard.check(KeptMask(edits=False), only=["pure"], draws=6).ok
    (wrong,) = regard.check(KeptMask(edits=True), only=["pure"], draws=6).broken
    assert "after a call with one" in wrong.detail
