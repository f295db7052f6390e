"""What says that attention is meant to be causal, where it has no parameter for it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import regard


class NormedOverTime(nn.Module):
    """Attention whose outputs are normed over all tokens, so that each reads them all."""

    def __init__(self, width=12):
        super().__init__()
        self.width = width
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.GroupNorm(3, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.norm(functional.scaled_dot_product_attention(q, k, v, is_causal=True).mT).mT


class SaysSo(NormedOverTime):
    """Attention."""

    def __init__(self):
        super().__init__()
        self.is_causal = True


class HasATriangle(NormedOverTime):
    """Attention."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 1, 32, 32).tril())


class HidesAboveATriangle(NormedOverTime):
    """Attention."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).triu(1))


class CausalBase(NormedOverTime):
    """Attention."""


class WithoutTheWord(CausalBase):
    """Attention."""


class WithADocstring(NormedOverTime):
    """Masked multi-head self-attention of a decoder."""


class NotCausal(NormedOverTime):
    """Self-attention, causal if asked for."""

    def __init__(self):
        super().__init__()
        self.causal = False


class NonCausalRetention(NormedOverTime):
    """Masked attention in both directions: padding is masked."""


class NonCausal(NormedOverTime):
    """Non-causal self-attention."""


@pytest.mark.parametrize("kind", [SaysSo, HasATriangle, HidesAboveATriangle, WithoutTheWord, WithADocstring])
def test_a_module_that_says_it_is_causal_is_held_to_it(kind):
    torch.manual_seed(0)
    (verdict,) = regard.check(kind(), only=["looks-ahead"], draws=6)
    assert verdict.status == "broken", str(verdict)


@pytest.mark.parametrize("kind", [NormedOverTime, NotCausal, NonCausal, NonCausalRetention])
def test_a_module_that_does_not_say_it_is_not(kind):
    torch.manual_seed(0)
    (verdict,) = regard.check(kind(), only=["looks-ahead"], draws=6)
    assert verdict.status == "does not apply", str(verdict)
