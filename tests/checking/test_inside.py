"""A module is compared with a mechanism on the queries, keys and values that its own layers make."""

import math

import pytest
import torch
from torch import nn

import regard


class ListOfLayers(nn.Module):
    """Multi-head attention of query, key and value whose layers have numbers for names."""

    def __init__(self, width=12, h=3):
        super().__init__()
        self.width, self.h = width, h
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def divisor(self, q):
        return math.sqrt(q.shape[-1])

    def attend(self, *projected):
        q, k, v = (x.unflatten(-1, (self.h, -1)).transpose(1, 2) for x in projected)
        return (q @ k.mT / self.divisor(q)).softmax(-1) @ v

    def forward(self, query, key, value):
        made = [linear(x) for linear, x in zip(self.linears, (query, key, value), strict=False)]
        return self.linears[-1](self.attend(*made).transpose(1, 2).flatten(2))


class ListOverItself(ListOfLayers):
    """Self-attention whose first layer makes the values."""

    def forward(self, x):
        v, q, k = (linear(x) for linear in self.linears[:3])
        return self.linears[-1](self.attend(q, k, v).transpose(1, 2).flatten(2))


class ListOverAContext(ListOfLayers):
    def forward(self, x, context):
        return super().forward(x, context, context)


class OfTheModelsWidth(ListOfLayers):
    def divisor(self, q):
        return math.sqrt(self.width)


class OneNarrowHead(nn.Module):
    """A head narrower than its tokens, divided by the root of their width."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(12, 4) for _ in range(3))

    def forward(self, x):
        return (self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])).softmax(-1) @ self.value(x)


@pytest.mark.parametrize("kind", [ListOfLayers, ListOverItself, ListOverAContext])
def test_layers_without_names_are_told_by_what_they_are_given(kind):
    torch.manual_seed(0)
    (verdict,) = regard.check(kind(), like="softmax", only=["same"], draws=4)
    assert verdict.status == "holds", str(verdict)


def test_a_slip_between_layers_without_names_is_named():
    torch.manual_seed(0)
    (verdict,) = regard.check(OfTheModelsWidth(), like="softmax", only=["same"], draws=4)
    assert verdict.status == "broken" and "the width of all heads" in verdict.detail, str(verdict)
    (verdict,) = regard.check(OneNarrowHead(), like="softmax", only=["same"], draws=4)
    assert verdict.status == "broken" and "the root of the tokens' width" in verdict.detail, str(verdict)


def test_parts_of_the_keys_that_are_merged_without_their_sums_are_told():
    def merged_by_maxima(q, k, v):
        outs, tops = [], []
        for keys, values in zip(k.tensor_split(2, 2), v.tensor_split(2, 2), strict=True):
            if keys.shape[2]:
                scores = q @ keys.mT / math.sqrt(q.shape[-1])
                outs.append(scores.softmax(-1) @ values)
                tops.append(scores.amax(-1, keepdim=True))
        return (torch.stack(tops).softmax(0) * torch.stack(outs)).sum(0)

    (verdict,) = regard.check(merged_by_maxima, like="softmax", only=["same"], draws=4)
    assert verdict.status == "broken" and "how are parts merged?" in verdict.detail, str(verdict)


def test_outputs_that_are_not_finite_are_told():
    def zero_times_infinity(q, k, v, causal=True):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            scores = scores + (1 - torch.ones_like(scores).tril()) * -math.inf
        return scores.softmax(-1) @ v

    (verdict,) = regard.check(zero_times_infinity, like="softmax", only=["same"], draws=4)
    assert verdict.status == "broken" and "NaN" in verdict.detail, str(verdict)
