"""What attention does to values and positions, and the ways of calling it that say where sequences or images are."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import Heads, scores, see

import regard


def statuses(thing, *only, draws=8, **options):
    """Returns the status of each law that was asked."""
    return {v.law: v.status for v in regard.check(thing, only=only, draws=draws, **options)}


class ValuesByAView(Heads):
    """Self-attention in both directions; v alone is split without a transpose."""

    parts = "v"

    def cut(self, x):
        return x.reshape(x.shape[0], self.n_head, x.shape[1], -1)

    def forward(self, x):
        made = zip("qkv", self.c_attn(x).chunk(3, -1), strict=True)
        q, k, v = (self.cut(part) if name in self.parts else self.split(part) for name, part in made)
        return self.c_proj(self.merge(scores(q, k, causal=False).softmax(-1) @ v))


class KeysByAView(ValuesByAView):
    parts = "k"


class SplitRightly(ValuesByAView):
    parts = ""


class GatedValues(SplitRightly):
    """A gate on the output, of which values know nothing."""

    def merge(self, x):
        return super().merge(x) * torch.sigmoid(super().merge(x).mean(1, keepdim=True))


class ConvolvedValues(SplitRightly):
    """Its values are convolved over three tokens, of which the first ones have no neighbours."""

    def __init__(self):
        super().__init__()
        self.near = nn.Conv1d(6, 6, 3, padding=1, groups=6)

    def split(self, x):
        heads = super().split(x)
        return self.near(heads.flatten(0, 1).mT).mT.reshape(heads.shape)


def test_values_alone_that_are_split_by_a_view_are_found():
    torch.manual_seed(0)
    assert statuses(ValuesByAView(), "averages", "heads") == {"averages": "broken", "heads": "broken"}
    (verdict,) = regard.check(KeysByAView(), only=["heads"], draws=8)
    assert verdict.status == "broken" and "by a view in keys alone" in verdict.detail


@pytest.mark.parametrize("kind", [SplitRightly, GatedValues, ConvolvedValues])
def test_what_is_split_with_a_transpose_is_not_accused(kind):
    torch.manual_seed(0)
    assert "broken" not in statuses(kind(), "averages", "heads", "positions").values()


def turn(x, base=10_000.0):
    """Returns x turned by its positions, halves against halves."""
    a, b = x.chunk(2, -1)
    steps = base ** (-torch.arange(a.shape[-1], dtype=x.dtype) / a.shape[-1])
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * steps
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def rotary(q, k, v, causal=True):
    return scores(turn(q), turn(k), causal).softmax(-1) @ v


def rotary_values(q, k, v, causal=True):
    return rotary(q, k, turn(v), causal)


def rotary_queries(q, k, v, causal=True):
    return scores(turn(q), k, causal).softmax(-1) @ v


def alibi(q, k, v, causal=True):
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1, dtype=q.dtype) / H)
    distance = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    return (scores(q, k, causal) - slopes[:, None, None] * distance).softmax(-1) @ v


def test_positions_are_noted_where_they_are_right_and_named_where_they_are_wrong():
    for thing in (rotary, alibi):
        found = statuses(thing, "queries", "averages", "positions", like="softmax")
        assert found["same"] == "noted" and "broken" not in found.values(), found
    for thing, words in ((rotary_values, "on v, too"), (rotary_queries, "on q and not on k")):
        (verdict,) = regard.check(thing, only=["positions"], draws=8)
        assert verdict.status == "broken" and words in verdict.detail, str(verdict)


def features(x):
    return functional.elu(x) + 1


def with_an_epsilon(q, k, v, causal=True, epsilon=1e-6):
    similar = features(q) @ features(k).mT
    if causal:
        similar = similar * see(*similar.shape[-2:])
    return similar @ v / (similar.sum(-1, keepdim=True) + epsilon)


def with_a_large_epsilon(q, k, v, causal=True):
    return with_an_epsilon(q, k, v, causal, 0.1)


def test_an_epsilon_under_a_fraction_is_named_and_no_fault_while_it_is_small():
    (verdict,) = regard.check(with_an_epsilon, like="elu", only=["same"], draws=8)
    assert verdict.status == "noted" and "1e-06 added to each row's sum" in verdict.detail, str(verdict)
    (verdict,) = regard.check(with_a_large_epsilon, like="elu", only=["same"], draws=8)
    assert verdict.status == "broken" and "0.1 added to each row's sum" in verdict.detail, str(verdict)


def capped(q, k, v, causal=True, softcap=20.0):
    raw = scores(q, k, causal=False)
    raw = softcap * torch.tanh(raw / softcap)
    return (raw.masked_fill(~see(*raw.shape[-2:]), -torch.inf) if causal else raw).softmax(-1) @ v


def capped_without_division(q, k, v, causal=True, softcap=20.0):
    raw = softcap * torch.tanh(scores(q, k, causal=False))
    return (raw.masked_fill(~see(*raw.shape[-2:]), -torch.inf) if causal else raw).softmax(-1) @ v


def test_a_softcap_that_is_declared_is_compared_with():
    verdicts = regard.check(capped, like="softmax", draws=4)
    assert verdicts.ok and verdicts[-1].status == "holds", str(verdicts)
    assert "caps its scores at 20" in str(verdicts)
    assert statuses(capped_without_division, "same", like="softmax")["same"] == "broken"


def in_a_window(q, k, v, causal=True, window=4):
    T, S = q.shape[2], k.shape[2]
    distance = torch.arange(T)[:, None] + S - T - torch.arange(S)
    return scores(q, k, causal).masked_fill(distance.abs() >= window, -torch.inf).softmax(-1) @ v


def in_an_undeclared_window(q, k, v, causal=True):
    return in_a_window(q, k, v, causal)


def test_a_window_that_is_declared_is_noted():
    (verdict,) = regard.check(in_a_window, like="softmax", only=["same"], draws=8)
    assert verdict.status == "noted" and "in a window of 4 tokens" in verdict.detail, str(verdict)
    (verdict,) = regard.check(in_an_undeclared_window, like="softmax", only=["same"], draws=8)
    assert verdict.status == "broken", str(verdict)


def attend_each(q, k, v, starts_q, starts_k, causal):
    """Returns attention within each of the sequences [ΣT,H,K] that begin at `starts`."""
    outs = []
    for n in range(len(starts_q) - 1):
        mine, theirs = (slice(int(starts[n]), int(starts[n + 1])) for starts in (starts_q, starts_k))
        heads = (x.transpose(0, 1) for x in (q[mine], k[theirs], v[theirs]))
        raw_q, raw_k, values = heads
        outs.append((scores(raw_q, raw_k, causal).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    return attend_each(q, k, v, cu_seqlens_q, cu_seqlens_k, causal)


def may_be_packed(q, k, v, cu_seqlens=None, causal=False):
    starts = [0, len(q)] if cu_seqlens is None else cu_seqlens
    return attend_each(q, k, v, starts, starts, causal)


def of_equal_lengths(q, k, v, cu_seqlens, max_seqlen, causal=False):
    """Takes all sequences to be as long as the first."""
    starts = [min(n * int(cu_seqlens[1]), len(q)) for n in range(len(cu_seqlens))]
    starts[-1] = len(q)
    return attend_each(q, k, v, starts, starts, causal)


def over_all_sequences(q, k, v, cu_seqlens, max_seqlen, causal=False):
    return attend_each(q, k, v, [0, len(q)], [0, len(k)], causal)


class OverPackedTokens(Heads):
    def forward(self, hidden_states, cu_seqlens):
        made = (x.unflatten(-1, (self.n_head, -1)) for x in self.c_attn(hidden_states).chunk(3, -1))
        return self.c_proj(attend_each(*made, cu_seqlens, cu_seqlens, causal=False).flatten(1))


def test_packed_sequences_give_what_each_gives_alone():
    laws = ["batch", "heads", "queries", "attends", "same"]
    for thing in (varlen, may_be_packed):
        found = statuses(thing, *laws, like="softmax")
        assert {found[law] for law in ("batch", "heads", "attends", "same")} == {"holds"}, found
        assert found["queries"] in ("holds", "does not apply")
    assert statuses(OverPackedTokens(), "batch", "attends", "averages")["batch"] == "holds"
    for thing in (of_equal_lengths, over_all_sequences):
        assert statuses(thing, "batch") == {"batch": "broken"}


class OfImages(nn.Module):
    """Attention over the places of an image, as in a U-Net."""

    def __init__(self, channels=16):
        super().__init__()
        self.norm, self.out = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 1)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)

    def normalise(self, raw):
        return raw.softmax(-1)

    def forward(self, x):
        B, C, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)
        weights = self.normalise(q.mT @ k / math.sqrt(C))
        return x + self.out((v @ weights.mT).reshape(B, C, h, w))


class OfImagesOverTheBatch(OfImages):
    def normalise(self, raw):
        return raw.softmax(0)


def test_images_are_asked():
    torch.manual_seed(0)
    verdicts = regard.check(OfImages(), draws=4)
    assert verdicts.ok and not verdicts.problems and "images" in str(verdicts), str(verdicts)
    assert {"batch", "gradients", "heads", "attends"} <= {v.law for v in verdicts.having("holds")}
    assert statuses(OfImagesOverTheBatch(), "batch") == {"batch": "broken"}


def hides_ones(q, k, v, mask=None):
    raw = scores(q, k, causal=False)
    if mask is not None:
        raw = raw.masked_fill(mask.bool(), -1e9)
    return raw.softmax(-1) @ v


def says_hidden(q, k, v, mask=None):
    """Attention. mask: bool [B,1,T,S], True where a key is hidden."""
    return hides_ones(q, k, v, mask)


def says_visible(q, k, v, mask=None):
    """Attention.

    mask: [B,1,T,S], 1 for keys to keep and 0 for padding.
    """
    return hides_ones(q, k, v, mask)


def test_a_docstring_that_says_what_a_mask_means_is_believed():
    assert statuses(says_hidden, "hidden", draws=4) == {"hidden": "holds"}
    assert statuses(says_visible, "hidden", draws=4) == {"hidden": "broken"}
    assert statuses(hides_ones, "hidden", draws=4) == {"hidden": "holds"}
