"""Attention with positions of its own: padding moves its tokens, which is no fault; what else padding does is."""

import pytest
import torch
from torch import nn

import regard


class RelativeBias(nn.Module):
    """Self-attention with a learned number for each distance, and a mask of keys, as in T5."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distances = nn.Parameter(torch.randn(heads, 9, generator=torch.Generator().manual_seed(0)))

    def hide(self, scores, mask):
        return scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        scores = q @ k.mT + self.distances[:, (places - places[:, None]).clamp(-4, 4) + 4]
        if mask is not None:
            scores = self.hide(scores, mask)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SeesPadding(RelativeBias):
    """The same, with hidden scores of zero."""

    def hide(self, scores, mask):
        return scores * mask[:, None, None, :].to(scores)


def test_padding_between_tokens_moves_them_and_is_only_noted():
    (verdict,) = regard.check(RelativeBias(), only=["batch"])
    assert verdict.status == "noted" and "positions" in verdict.detail, str(verdict)


@pytest.mark.parametrize("law", ["batch", "hidden"])
def test_a_mask_that_hides_too_little_is_found_all_the_same(law):
    (verdict,) = regard.check(SeesPadding(), only=[law])
    assert verdict.status == "broken", str(verdict)
