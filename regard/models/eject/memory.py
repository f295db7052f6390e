"""The parts of gated and delta attention whose source ejected files contain; see plain.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.models.eject.plain import visible_keys


def compare_decayed(x: Tensor, k: Tensor, c: Tensor, seen: Tensor) -> Tensor:
    """Returns x_i·k_j e^{c_i − c_j} for pairs that are `seen` [T,T], else 0: [B,G,R,T,T] of R heads x a key head."""
    # The difference comes before the exponential, which would overflow.
    decay = (c - c.mT).masked_fill(~seen, float("-inf")).exp().to(k.dtype)
    return (x.flatten(2, 3) @ k.mT).unflatten(2, x.shape[2:4]) * decay[:, :, None]


def compare_channels(x: Tensor, k: Tensor, c: Tensor, seen: Tensor) -> Tensor:
    """Returns Σ_k x_ik k_jk e^{c_ik − c_jk} for pairs that are `seen` [T,T], else 0: [B,G,R,T,T]."""
    # A block of 16 rows from r on meets all earlier keys in one product, of factors e^{c_i − c_r} and e^{c_r − c_j}.
    T = x.shape[3]
    blocks = []
    for start in range(0, T, 16):
        stop = min(start + 16, T)
        rows, here = x[:, :, :, start:stop], c[:, :, start:stop]
        toward = rows * (here - here[:, :, :1]).exp().to(k.dtype)[:, :, None]
        since = k[:, :, :start] * (here[:, :, :1] - c[:, :, :start]).exp().to(k.dtype)
        before = (toward.flatten(2, 3) @ since.mT).unflatten(2, rows.shape[2:4])
        causal = seen.new_ones(stop - start, stop - start).tril()[..., None]
        decay = (here[:, :, :, None] - here[:, :, None]).masked_fill(~causal, float("-inf")).exp().to(k.dtype)
        within = (rows[:, :, :, :, None] * (k[:, :, None, start:stop] * decay)[:, :, None]).sum(-1)
        blocks.append(torch.cat([before, F.pad(within, (0, T - stop))], -1))
    return torch.cat(blocks, 3).masked_fill(~seen, 0)


def fixed_decay(v: Tensor) -> Tensor:
    """Returns a = log(1 − 2^{−5−h}) of each head h of v [B,G,T,V], the same for all tokens: [1,G,1,1]."""
    heads = torch.arange(v.shape[1], dtype=torch.float64, device=v.device)
    return torch.log1p(-torch.exp2(-5 - heads))[None, :, None, None]


class Memory(nn.Module):
    """A memory S [K,V] for each value head: S ← eᵃS + b k vᵀ, and scale · Sᵀq is read. With `erases`, v − Sᵀk is
    written.

    Tokens are taken in chunks of 64: they read the memory from before the chunk, and pairs within it are compared.
    """

    def __init__(self, compare: Any, erases: bool, scale: float, decay: Any) -> None:
        super().__init__()
        self.compare = compare
        self.erases = erases
        self.scale = scale
        self.decay = decay  # gives a if it does not depend on the tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
        B, G, T, V = v.shape
        dtype = torch.promote_types(v.dtype, torch.float32)
        q, k = (x.to(dtype) if x.shape[1] >= G else x.to(dtype).repeat_interleave(G // x.shape[1], 1) for x in (q, k))
        a = rules["a"] if self.decay is None else self.decay(v).expand(B, G, T, 1)
        b = rules["b"].to(dtype) if "b" in rules else v.new_ones(B, G, T, 1, dtype=dtype)
        memory = torch.zeros(B, G, k.shape[3], V, dtype=dtype, device=v.device)
        outs = []
        for q_part, k_part, new, a_part, b_part in zip(*(x.split(64, 2) for x in (q, k, v, a, b)), strict=True):
            queries = q_part.unflatten(1, (G, -1))
            c = a_part.double().clamp(min=-800).cumsum(2)
            reading = c.exp().to(dtype)  # what is left of the memory where each token reads it
            keeping = (c[:, :, -1:] - c).exp().to(dtype)  # what is left of each token after the chunk
            seen = visible_keys(k_part.shape[2], v.device, None)
            if self.erases:
                new = b_part * (new.to(dtype) - (k_part * reading) @ memory)
                erased = b_part * self.compare(k_part[:, :, None], k_part, c, seen.tril(-1))[:, :, 0]
                new = torch.linalg.solve_triangular(erased, new, upper=False, unitriangular=True)
            else:
                new = b_part * new.to(dtype)
            past = (queries * reading[:, :, None]).flatten(2, 3) @ memory
            pairs = self.compare(queries, k_part, c, seen).flatten(2, 3)
            outs.append(((past + pairs @ new) * self.scale).view(*q_part.shape[:3], V).to(v.dtype))
            memory = reading[:, :, -1:].mT * memory + (k_part * keeping).mT @ new
        return torch.cat(outs, 2)


class Decay(nn.Module):
    """a = −Δ e^rate with the step Δ = softplus(x + bias)"""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads * width))
        self.rate = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        step = F.softplus(x + self.bias.to(x.dtype).view(x.shape[2:]))
        return {"a": (-step * self.rate.to(x.dtype).exp()[:, None]).transpose(1, 2)}


class StepDecay(nn.Module):
    """a = −Δ e^rate and b = Δ = softplus(x + bias), between bounds: with a longer step, more is written"""

    def __init__(self, heads: int, least: float, most: float | None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))
        self.rate = nn.Parameter(torch.zeros(heads))
        self.bounds = (least, most)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        step = F.softplus(x + self.bias.to(x.dtype).view(x.shape[2:])).clamp(*self.bounds)
        return {"a": (-step * self.rate.to(x.dtype).exp()[:, None]).transpose(1, 2), "b": step.transpose(1, 2)}


class LogSigmoid(nn.Module):
    """a = logsigmoid(x + bias)/16"""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads * width))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": (F.logsigmoid(x + self.bias.to(x.dtype).view(x.shape[2:])) / 16).transpose(1, 2)}


class Gates(nn.Module):
    """Computes a [B,G,T,1 or K] by a decay, and b = most · σ(·) [B,G,T,1], from `sizes` projected numbers for each"""

    def __init__(self, width: int, heads: int, sizes: list[int], decay: nn.Module | None, most: float) -> None:
        super().__init__()
        self.heads = heads
        self.sizes = sizes
        self.project = nn.Linear(width, sum(sizes), bias=False)
        self.decay = decay
        self.most = most

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.project(x)
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).split_with_sizes(self.sizes, -1)
        made = {} if self.decay is None else self.decay(a.unflatten(-1, (self.heads, -1)))
        if self.sizes[1]:
            made["b"] = self.most * torch.sigmoid(b).transpose(1, 2)[..., None]
        return made
