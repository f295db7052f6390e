"""The parts whose source ejected files contain: plain PyTorch that can be read and run without regard.

Each class or function is copied into the file of a model that needs it, and computes what regard's plain path computes,
in the same order, so that the two agree to the bit. Parameters have the names under which a model is saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def visible_keys(T: int, device: torch.device, window: int | None) -> Tensor:
    """Returns which keys each query may see [T,T]: itself and those before it, the last `window` if there is one."""
    t = torch.arange(T, device=device)
    seen = t[None, :] <= t[:, None]
    if window is not None:
        seen = seen & (t[:, None] - t[None, :] < window)
    return seen


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Returns weights [B,H,T,T] @ values [B,G,T,V], where each of the G value heads serves H/G heads."""
    B, H, T, S = weights.shape
    G, V = v.shape[1], v.shape[3]
    return (weights.reshape(B, G, H // G * T, S) @ v).view(v.shape[0], H, T, V)


def compare(q: Tensor, k: Tensor) -> Tensor:
    """Returns q·k for every pair [B,H,T,T], where each of the G key heads serves H/G query heads."""
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    return (q.reshape(B, G, H // G * T, K) @ k.mT).view(B, H, T, S)


def visible_scores(scores: Tensor, rules: dict[str, Any]) -> Tensor:
    """Returns scores [B,H,T,T] with ALiBi's bias, and −inf where a query may not see a key."""
    T = scores.shape[2]
    if rules["slopes"] is not None:  # ALiBi
        t = torch.arange(T, device=scores.device)
        distance = (t[None, :, None] - t[None, None, :]).abs()[:, None]
        scores = scores - rules["slopes"].to(scores.dtype)[None, :, None, None] * distance
    return scores.masked_fill(~visible_keys(T, scores.device, rules["window"]), float("-inf"))


class Softmax(nn.Module):
    """softmax(q·k/√K) v"""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        return mix(visible_scores(compare(q * scale, k), rules).softmax(-1), v)


class Argmax(nn.Module):
    """The value of the key with the largest q·k; softmax's gradient where it was trained straight through."""

    def __init__(self, straight_through: bool = False) -> None:
        super().__init__()
        self.straight_through = straight_through

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
        scores = visible_scores(compare(q, k) / math.sqrt(q.shape[-1]), rules)
        best = scores.detach().argmax(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter_(-1, best, 1.0)
        if self.straight_through:
            soft = scores.softmax(-1)
            weights = weights + (soft - soft.detach())
        return mix(weights, v)


class Gaussian(nn.Module):
    """Weights in proportion to exp(−‖q − k‖²/2σ²), σ = K^¼ unless given"""

    def __init__(self, sigma: float | None = None) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
        variance = math.sqrt(q.shape[-1]) if self.sigma is None else self.sigma**2
        lengths = k.square().sum(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = compare(q / variance, k) - lengths[:, :, None] / (2 * variance)
        return mix(visible_scores(scores, rules).softmax(-1), v)


class Similarity(nn.Module):
    """Weights in proportion to sim(q, k) = 1/(1 + ‖q − k‖²/√K)"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
        T, K = q.shape[2:]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        weights = 1 / (1 + (q[:, :, :, None] - k[:, :, None]).square().sum(-1) / math.sqrt(K))
        weights = weights.masked_fill(~visible_keys(T, q.device, rules["window"]), 0)
        return mix(weights / weights.sum(-1, keepdim=True), v)


class Synthesizer(nn.Module):
    """softmax(ReLU(q) B + b) v: each token scores positions without looking at the other tokens"""

    def __init__(self, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(heads, length, width))
        self.offset = nn.Parameter(torch.zeros(heads, length))

    def forward(self, q: Tensor, k: None, v: Tensor, rules: dict[str, Any]) -> Tensor:
        q = torch.cat([q.relu(), torch.ones_like(q[..., :1])], -1)
        keys = torch.cat([self.keys, self.offset[..., None]], -1)[None, :, : v.shape[2]]
        scores = q @ keys.expand(q.shape[0], -1, -1, -1).mT
        return mix(visible_scores(scores, rules).softmax(-1), v)


class RandomSynthesizer(nn.Module):
    """softmax(R) v: R is learned or fixed, and may be a product of two factors"""

    def __init__(self, heads: int, length: int, rank: int | None = None) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(heads, length, rank or length))
        self.right = nn.Parameter(torch.zeros(heads, length, rank)) if rank else None

    def forward(self, q: None, k: None, v: Tensor, rules: dict[str, Any]) -> Tensor:
        T = v.shape[2]
        scores = self.left[None, :, :T]
        scores = scores[..., :T] if self.right is None else scores @ self.right[None, :, :T].mT
        return mix(visible_scores(scores, rules).softmax(-1).expand(v.shape[0], -1, -1, -1), v)


class Linear(nn.Module):
    """Attention by features φ(q)·φ(k): sums over keys stand for all pairs but those within a chunk of 128 tokens.

    `features` returns ψ and c with φ(x) = eᶜψ, c None for 0. Sums are kept relative to e to the largest c so far.
    """

    precise = torch.float32  # sums are at least this precise

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
        B, H, T, _ = q.shape
        G, V = v.shape[1], v.shape[3]
        dtype = torch.promote_types(v.dtype, self.precise)
        if rules["window"] is not None and rules["window"] < T:
            chunk = T  # sums cannot forget, so all pairs are computed
        else:
            chunk = 128
        sums = peak = None
        outs = []
        chunks = zip(q.split(chunk, 2), k.split(chunk, 2), v.split(chunk, 2), strict=True)
        for q_part, k_part, v_part in chunks:
            C = q_part.shape[2]
            queries = self.features(q_part.to(dtype))[0]
            queries = queries.reshape(B, G, H // G, C, -1)
            psi, c = self.features(k_part.to(dtype))
            values = torch.cat([v_part.to(dtype), v_part.new_ones(B, G, C, 1, dtype=dtype)], -1)
            if sums is None:
                sums = psi.new_zeros(B, G, psi.shape[-1], V + 1)
                peak = psi.new_full((B, G), float("-inf"))
            seen = visible_keys(C, q.device, rules["window"])
            pairs = (queries.flatten(2, 3) @ psi.mT).unflatten(2, (H // G, C))
            if c is None:
                pairs = pairs.masked_fill(~seen, 0)
                past = queries
                kept = sums
            else:
                scale = torch.where(seen, c[:, :, None, :], float("-inf"))
                peaks = torch.maximum(scale.detach().amax(-1), peak[..., None])
                pairs = pairs * torch.exp(scale - peaks[..., None])[:, :, None]
                past = queries * torch.exp(peak[..., None] - peaks).clamp(max=1)[:, :, None, :, None]
                new_peak = torch.maximum(peak, c.detach().amax(-1))
                kept = sums * torch.exp(peak - new_peak)[..., None, None]
                psi = psi * torch.exp(c - new_peak[..., None])[..., None]
                peak = new_peak
            total = (pairs.flatten(2, 3) @ values + past.flatten(2, 3) @ sums).view(B, H, C, V + 1)
            sums = kept + psi.mT @ values
            zero = total[..., -1:].abs() < torch.finfo(dtype).tiny / torch.finfo(dtype).eps
            out = (total[..., :-1] / total[..., -1:].masked_fill(zero, 1)).masked_fill(zero, 0)
            outs.append(out.to(v.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


class Elu(Linear):
    """φ(x) = elu(x) + 1"""

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        c = x.detach().amax(-1).clamp(max=0)
        return x.relu() + torch.exp(x.clamp(max=0) - c[..., None]), c


class Softplus(Linear):
    """φ(x) = log(1 + eˣ)"""

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.softplus(x), None


class Polynomial(Linear):
    """(q·k + offset)ᵈ by its exact features: the products of d of the numbers √offset, x_1, …, x_K"""

    precise = torch.float64

    def __init__(self, degree: int, offset: float) -> None:
        super().__init__()
        self.degree = degree
        self.offset = offset

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.offset > 0:
            x = torch.cat([torch.full_like(x[..., :1], math.sqrt(self.offset)), x], -1)
        factors = [torch.arange(x.shape[-1], device=x.device)]
        equal = repeats = torch.ones_like(factors[0])
        for _ in range(self.degree - 1):
            choices = x.shape[-1] - factors[-1]
            parent = torch.repeat_interleave(choices)
            last = factors[-1][parent]
            new = last + torch.arange(len(parent), device=x.device) - (choices.cumsum(0) - choices)[parent]
            equal = torch.where(new == last, equal[parent] + 1, 1)
            repeats = repeats[parent] * equal
            factors = [*(places[parent] for places in factors), new]
        psi = (math.factorial(self.degree) // repeats).to(x.dtype).sqrt()
        for chosen in factors:
            psi = psi * x[..., chosen]
        return psi, None


class Performer(Linear):
    """exp(q·k/√K) estimated by positive random features of the directions w"""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(features, width))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x * x.shape[-1] ** -0.25
        b = x @ self.w.to(x).mT - x.square().sum(-1, keepdim=True) / 2
        peak = b.detach().amax(-1, keepdim=True)
        return torch.exp(b - peak), peak[..., 0] - math.log(len(self.w)) / 2


class Fourier(Linear):
    """exp(q·k/√K) estimated by random Fourier features of the directions w"""

    precise = torch.float64

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(features, width))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x * x.shape[-1] ** -0.25
        projected = x @ self.w.to(x).mT
        return torch.cat([projected.sin(), projected.cos()], -1) / math.sqrt(len(self.w)), x.square().sum(-1) / 2
