"""Attention with deliberate mistakes, each to be reported by the law that it breaks, by `regard check --plugin`."""

import math
from typing import NamedTuple

import torch
from torch import nn

from regard.kernels import kernel
from regard.mechanisms import Elu, Pairwise, Softmax, fork, mix, scores
from regard.mechanisms.linear import Linear
from regard.shapes import Mask


class RawScores(Pairwise):
    """Forgets to normalise."""

    def weights(self, q, k, mask=Mask()):
        allowed = mask.allowed(q.shape[2], k.shape[2], q.device)
        raw = scores(q, k, mask).exp()
        return raw if allowed is None else raw.masked_fill(~allowed, 0)


class ValuesScaled(Softmax):
    """The parallel face is not weights @ v."""

    def forward(self, q, k, v, mask=Mask()):
        return 1.001 * super().forward(q, k, v, mask)


class TiledHeads(Softmax):
    """Repeats key/value heads as a b c a b c instead of a a b b c c."""

    def forward(self, q, k, v, mask=Mask()):
        times = q.shape[1] // k.shape[1]
        return super().forward(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), mask)


class HalfState(Elu):
    """Keeps its sums in bfloat16."""

    def extend(self, q, k, v, state, visible=None):
        out, state = super().extend(q, k, v, state, visible)
        if hasattr(state, "sums"):
            state = state._replace(sums=state.sums.bfloat16().to(state.sums.dtype))
        return out, state


class StepWithoutScale(Softmax):
    """Forgets 1/√K in a decoding step."""

    def extend(self, q, k, v, state, visible=None):
        return super().extend(q * math.sqrt(q.shape[-1]), k, v, state, visible)


class Epsilon(Elu):
    """Adds an epsilon to the denominator."""

    def _divide(self, sums, total, seen):
        return sums / (total + 1e-6)


class OnlyTheLastWrite(Elu):
    """A second write replaces the first."""

    def write(self, state, k, v, visible=None):
        if hasattr(state, "sums"):
            state = state._replace(sums=torch.zeros_like(state.sums))
        return super().write(state, k, v, visible)


class MinusBillion(Softmax):
    """Masks with −1e9: a row with nothing to see becomes an average."""

    def weights(self, q, k, mask=Mask()):
        allowed = mask.allowed(q.shape[2], k.shape[2], q.device)
        raw = scores(q, k, mask) / math.sqrt(q.shape[-1])
        return (raw if allowed is None else raw.masked_fill(~allowed, -1e9)).softmax(-1)


class NanLeak(Softmax):
    """Multiplies hidden values by a weight of zero, and 0·NaN is NaN."""

    def forward(self, q, k, v, mask=Mask()):
        return mix(self.weights(q, k, mask), v).to(v.dtype)


class ForgetsPadding(Softmax):
    """Ignores which keys are visible, in all its faces."""

    def weights(self, q, k, mask=Mask()):
        return super().weights(q, k, mask.but(visible=None) if mask.rows is None else mask)


class BoastfulCost(Softmax):
    """Declares the cost of multi-query attention over a cache as O(bhn)."""

    def cost(self, size, face="parallel"):
        from dataclasses import replace

        return replace(super().cost(size, face), matmul=2 * size.B * size.H * size.T * size.S)


class KernelForgetsPadding(Softmax):
    """A kernel that drops the mask of visible keys."""


@kernel(KernelForgetsPadding, "forward", name="fast", when=lambda *_: None)
def _forgets(mechanism, q, k, v, mask):
    return mix(mechanism.weights(q, k, mask.but(visible=None)), v)


class KernelLeavesRows(Softmax):
    """A kernel that writes all rows of its output but the last."""


@kernel(KernelLeavesRows, "forward", name="fast", when=lambda *_: None)
def _leaves(mechanism, q, k, v, mask):
    whole = mix(mechanism.weights(q, k, mask), mask.zero_hidden(v))
    out = torch.empty_like(whole)
    rows = torch.arange(whole.shape[2] - 1)
    return out.index_copy(2, rows, whole[:, :, :-1])


class WrongBackward(Softmax):
    """The output is right and the gradient is not."""

    def forward(self, q, k, v, mask=Mask()):
        out = super().forward(q, k, v, mask)
        return 2 * out - out.detach()


class NoGradientForKeys(Linear):
    """Cuts the keys off from learning."""

    def features(self, x):
        return nn.functional.softplus(x), None

    def feature_count(self, K):
        return K

    def _map_keys(self, k, v, visible):
        return super()._map_keys(k.detach(), v, visible)


class SharedState(Softmax):
    """Writes into slots of its own that all states share."""

    def extend(self, q, k, v, state, visible=None):
        kept = getattr(self, "kept", None)
        if kept is not None and kept.v.shape == state.v.shape and kept.used == state.used:
            state = fork(kept)
        out, state = super().extend(q, k, v, state, visible)
        self.kept = state._replace(v=torch.zeros_like(state.v))
        return out, state


class DetachedState(Softmax):
    """Cuts the gradient between one chunk and the next."""

    def extend(self, q, k, v, state, visible=None):
        state = state._replace(k=state.k.detach(), v=state.v.detach())
        return super().extend(q, k, v, state, visible)


class ChunkState(NamedTuple):
    """A state whose batch stands second, where nobody who reorders rows looks for it."""

    k: torch.Tensor
    v: torch.Tensor


class BatchSecond(Softmax):
    """Keeps its keys as [G,B,S,K]."""

    def empty(self, size, rules=Mask()):
        return ChunkState(torch.zeros(size.G, size.B, 0, size.K), torch.zeros(size.G, size.B, 0, size.V))

    def extend(self, q, k, v, state, visible=None):
        keys = torch.cat([state.k.to(k), k.transpose(0, 1)], 2)
        values = torch.cat([state.v.to(v), v.transpose(0, 1)], 2)
        out = self.forward(q, keys.transpose(0, 1), values.transpose(0, 1), Mask(causal=True))
        return out, ChunkState(keys, values)


def attention(q, k, v, causal=True):
    """Right, for comparison."""
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        raw = raw.masked_fill(torch.ones_like(raw, dtype=torch.bool).triu(1), float("-inf"))
    return raw.softmax(-1) @ v


def sees_next(q, k, v, causal=True):
    """Off by one: each query sees one key too many."""
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        raw = raw.masked_fill(torch.ones_like(raw, dtype=torch.bool).triu(2), float("-inf"))
    return raw.softmax(-1) @ v


def whole_sequence_maximum(q, k, v, causal=True):
    """Positive features stabilised by a maximum over the sequence, without any epsilon: leaks only by underflow."""
    width = q.shape[-1]
    w = torch.randn(32, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(q)

    def exponents(x):
        x = x * width**-0.25
        return x @ w.mT - x.square().sum(-1, keepdim=True) / 2

    a, b = exponents(q), exponents(k)
    similar = torch.exp(a - a.amax(-1, keepdim=True)) @ torch.exp(b - b.amax((-1, -2), keepdim=True)).mT
    similar = similar.tril() if causal else similar
    total = similar.sum(-1, keepdim=True)
    return similar @ v / total.masked_fill(total == 0, 1)


def batch_statistics(q, k, v, causal=True):
    """Scales its keys by their size over the batch."""
    return attention(q, k / (1 + k.square().mean((0, 2), keepdim=True)), v, causal)


def ignores_padding(q, k, v, causal=True, visible=None):
    """Takes a mask and drops it."""
    return attention(q, k, v, causal)


def depends_on_row(q, k, v, causal=True):
    """Treats each sequence of the batch differently."""
    return attention(q * (1 + torch.arange(q.shape[0]).to(q)[:, None, None, None]), k, v, causal)


def tiles(q, k, v, causal=True):
    """Tiled heads in a bare function."""
    times = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), causal)


def wrong_gradient(q, k, v, causal=True):
    """Stops half of the gradient."""
    out = attention(q, k, v, causal)
    return (out + out.detach()) / 2


def wrong_shape(q, k, v, causal=True):
    """Returns a single number a token."""
    return attention(q, k, v, causal).sum(-1, keepdim=True)


def minus_ten_thousand(q, k, v, causal=True, visible=None):
    """Hides keys by −10,000 in a bare function."""
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        raw = raw.masked_fill(torch.ones_like(raw, dtype=torch.bool).triu(1), float("-inf"))
    if visible is not None:
        raw = raw.masked_fill(~visible[:, None, None], -1e4)
    return raw.softmax(-1) @ v


def keys_tiled(q, k, v, causal=True):
    """Key heads in the order a b a b, value heads as they should be."""
    times = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, times, 1, 1), v.repeat_interleave(times, 1), causal)


def queries_reversed(q, k, v, causal=True):
    """Query heads in reverse order."""
    times = q.shape[1] // k.shape[1]
    return attention(q.flip(1), k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), causal)


def lets_nan_through(q, k, v, causal=True, visible=None):
    """Hides keys by a weight of zero only."""
    raw = (q @ k.mT).exp()
    raw = raw.tril() if causal else raw
    if visible is not None:
        raw = raw * visible[:, None, None]
    return raw @ v / raw.sum(-1, keepdim=True).clamp(min=1e-300)


class Tokens(nn.Module):
    """Self-attention over x [B,T,D]; right if causal."""

    def __init__(self, causal=True):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.causal = nn.Linear(12, 36), causal

    def forward(self, x):
        q, k, v = (t[:, None] for t in self.project(x).chunk(3, -1))
        return attention(q, k, v, self.causal)[:, 0]


right_module = Tokens()
unmasked_causal_module = Tokens(causal=False)


def unscaled(q, k, v, causal=True):
    """Keeps every law of a bare function, and is no softmax attention."""
    return attention(q * math.sqrt(q.shape[-1]), k, v, causal)


def _right(q, k, v, causal):
    """Right for fewer queries than keys, too: the queries are the last of them."""
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        T, S = raw.shape[-2:]
        raw = raw.masked_fill(torch.ones(T, S, dtype=torch.bool).triu(1 + S - T), float("-inf"))
    return raw.softmax(-1) @ v


def right_for_fewer_queries(q, k, v, causal=True):
    """Right."""
    return _right(q, k, v, causal)


def unscaled_single_query(q, k, v, causal=True):
    """Forgets the scale where there is one query, as in a step of decoding."""
    if q.shape[2] == 1:
        q = q * math.sqrt(q.shape[-1])
    return _right(q, k, v, causal)


def scaled_by_length(q, k, v, causal=True):
    """Divides by the square root of the number of queries."""
    return _right(q * math.sqrt(q.shape[-1] / q.shape[2]), k, v, causal)


def off_by_one_for_fewer_queries(q, k, v, causal=True):
    """Hides one key too many where there are fewer queries than keys."""
    if not causal or q.shape[2] == k.shape[2]:
        return _right(q, k, v, causal)
    return _right(q, k[:, :, :-1], v[:, :, :-1], causal)


def reads_memory_as_contiguous(q, k, v, causal=True):
    """Takes the memory of its values for contiguous."""
    values = torch.as_strided(v, v.shape, torch.empty(v.shape).stride())
    return _right(q, k, values, causal)


def forgets_after_a_thousand(q, k, v, causal=True):
    """Sees the future from the 1,000th token on."""
    out = _right(q, k, v, causal)
    if q.shape[2] > 1000:
        out = torch.cat([out[:, :, :1000], _right(q[:, :, 1000:], k, v, False)], 2)
    return out


class _WrongUnderPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.5 * grad


def wrong_gradient_under_padding(q, k, v, causal=True, visible=None):
    """Right outputs, and gradients that are wrong only where keys are hidden."""
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        raw = raw.masked_fill(torch.ones_like(raw, dtype=torch.bool).triu(1), float("-inf"))
    if visible is not None:
        raw = _WrongUnderPadding.apply(raw.masked_fill(~visible[:, None, None], -1e9))
    return raw.softmax(-1) @ v


class KeepsKeys(nn.Module):
    """Keeps the keys of its first call, and uses them again wherever they fit."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, q, k, v, causal=True):
        if self.kept is None or self.kept.shape != k.shape or self.kept.dtype != k.dtype:
            self.kept = k.detach().clone()
        return nn.functional.scaled_dot_product_attention(q, self.kept, v, is_causal=causal)


keeps_keys = KeepsKeys()


class OverItsOwnHeads(nn.Module):
    """Forgets to transpose [B,T,H,d]: each token attends over its own heads."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 6)) for part in self.qkv(x).chunk(3, -1))
        return self.proj(((q @ k.mT / math.sqrt(6)).softmax(-1) @ v).flatten(2))


over_its_own_heads = OverItsOwnHeads()


def exp_without_maximum(q, k, v, causal=True):
    """Overflows where a score exceeds 88 in float32."""
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    if causal:
        weights = weights.tril(k.shape[2] - q.shape[2])
    return weights @ v / weights.sum(-1, keepdim=True)


def normalises_its_first_block(q, k, v, causal=True):
    """Linear attention whose sums of weights are of the last 64 keys, as if no block came before."""
    similar = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    if causal:
        similar = similar.tril(k.shape[2] - q.shape[2])
    return similar @ v / similar[..., k.shape[2] - 1 - (k.shape[2] - 1) % 64 :].sum(-1, keepdim=True)


def falls_towards_itself(q, k, v, causal=True):
    """ALiBi with its sign turned: weights grow with distance."""
    T, S = q.shape[2], k.shape[2]
    slopes = 2.0 ** (-8 * torch.arange(1, q.shape[1] + 1, dtype=q.dtype) / q.shape[1])
    distance = torch.arange(T)[:, None] + S - T - torch.arange(S)
    raw = q @ k.mT / math.sqrt(q.shape[-1]) + slopes[:, None, None] * distance.abs()
    return (raw.masked_fill(distance < 0, -torch.inf) if causal else raw).softmax(-1) @ v
