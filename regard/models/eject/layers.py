"""The layers around attention whose source ejected files contain; see plain.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Learned(nn.Module):
    """A learned vector for each position, added to the embeddings"""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width)

    def added(self, T: int, x: Tensor) -> Tensor | None:
        return self.table(torch.arange(T, device=x.device)[None])

    def rotation(self, T: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return None


class Sinusoidal(nn.Module):
    """Sines and cosines of each position, added to the embeddings"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def added(self, T: int, x: Tensor) -> Tensor | None:
        d = self.width + self.width % 2
        omega = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = torch.arange(T, dtype=torch.float64)[:, None] * omega
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None, :, : self.width].to(x.device, x.dtype)

    def rotation(self, T: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return None


class Rotary(nn.Module):
    """Rotary positions: pairs of numbers of each query and key are turned by angles proportional to its position"""

    def __init__(self, omega: list[float]) -> None:
        super().__init__()
        self.omega = omega  # the angle by which each pair turns from one position to the next

    def added(self, T: int, x: Tensor) -> Tensor | None:
        return None

    def rotation(self, T: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        omega = torch.tensor(self.omega, dtype=torch.float64).repeat(2)
        angles = torch.arange(T, dtype=torch.float64)[:, None] * omega
        return angles.cos()[None, None].to(x.device, x.dtype), angles.sin()[None, None].to(x.device, x.dtype)


class NoPositions(nn.Module):
    """No positions are added and nothing is turned; ALiBi changes the scores alone"""

    def added(self, T: int, x: Tensor) -> Tensor | None:
        return None

    def rotation(self, T: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return None


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Returns queries or keys [B,N,T,K] with the pairs (xᵢ, x_{i+K/2}) turned."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_part(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Returns queries or keys [B,N,T,K] with only the first numbers turned."""
    width = rotation[0].shape[-1]
    return torch.cat([rotate(x[..., :width], rotation), x[..., width:]], -1)


class UnitLength(nn.Module):
    """x/√(sum of squares + ε): queries and keys of length 1"""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def reweight(heads: Tensor) -> Tensor:
    """Returns heads [B,H,T,V] weighed by the norm of their outputs at each position."""
    norms: Tensor = heads.norm(dim=-1, keepdim=True)
    mean = norms.mean(1, keepdim=True)
    return heads * (norms / mean.masked_fill(mean == 0, 1))


def reweight_sequence(heads: Tensor) -> Tensor:
    """Returns heads [B,H,T,V] weighed by the norm of their outputs over the whole sequence, so it looks ahead."""
    norms: Tensor = heads.norm(dim=(2, 3), keepdim=True)
    return heads * norms


class Attention(nn.Module):
    """Attention: project, rotate, attend, merge the heads, project."""

    def __init__(
        self,
        width: int,
        widths: list[tuple[int, int]],  # number and width of heads of those of q, k and v that are needed
        mechanism: nn.Module,
        norms: list[nn.Module],  # of queries and keys, or none
        bias: bool,
        out_bias: bool,
        merge: Callable[[Tensor], Tensor] | None,
        heads: int,
        turn: Callable[..., Tensor] | None,  # how rotary positions turn queries and keys
        gates: nn.Module | None = None,  # computes decays and write strengths, for a mechanism with a memory
    ) -> None:
        super().__init__()
        self.turn = turn
        self.gates = gates
        self.widths = widths
        self.mechanism = mechanism
        self.merge = merge
        self.project = nn.Linear(width, sum(n * w for n, w in widths), bias=bias)
        self.out = nn.Linear(heads * widths[-1][1], width, bias=out_bias)
        if norms:
            self.query_norm, self.key_norm = norms
        self.normed = bool(norms)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, rules: dict[str, Any]) -> Tensor:
        B, T, _ = x.shape
        parts = self.project(x).split_with_sizes([n * w for n, w in self.widths], -1)
        split = [part.view(B, T, n, w).transpose(1, 2) for part, (n, w) in zip(parts, self.widths, strict=True)]
        *placed, v = split
        if self.normed:
            placed = [self.query_norm(placed[0]), self.key_norm(placed[1])]
        if self.turn is not None and rotation is not None:
            placed = [self.turn(part, rotation) for part in placed]
        q, k = [*placed, None, None][:2]
        if self.gates is not None:
            rules = rules | self.gates(x)
        out = self.mechanism(q, k, v, rules)
        if self.merge is not None:
            out = self.merge(out)
        return self.out(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """f(x A + a) B + b"""

    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.into = nn.Linear(width, hidden, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.into(x)))


class SwiGLU(nn.Module):
    """(silu(x A) ∘ x C) B"""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.into = nn.Linear(width, 2 * hidden, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, -1)
        return self.out(F.silu(gate) * value)


class Block(nn.Module):
    """Attention and an MLP, each added to its input, with norms before them: x + f(norm(x))"""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, rules: dict[str, Any]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, rules)
        return x + self.mlp(self.mlp_norm(x))


class NormAfterBlock(nn.Module):
    """Attention and an MLP, each added to its input, with norms after them: norm(x + f(x))"""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, rules: dict[str, Any]) -> Tensor:
        x = self.attention_norm(x + self.attention(x, rotation, rules))
        return self.mlp_norm(x + self.mlp(x))


class AttentionBlock(nn.Module):
    """Attention without an MLP, added to its input; the norm before it, x + f(norm(x)), or after, norm(x + f(x))"""

    def __init__(self, attention: nn.Module, norm: nn.Module, before: bool) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = norm
        self.before = before

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, rules: dict[str, Any]) -> Tensor:
        if self.before:
            return x + self.attention(self.attention_norm(x), rotation, rules)
        return self.attention_norm(x + self.attention(x, rotation, rules))


class Stack(nn.Module):
    """All blocks, with positions before them and norms around them"""

    def __init__(
        self, blocks: list[nn.Module], positions: nn.Module, rules: dict[str, Any], norms: list[nn.Module | None]
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.positions = positions
        self.rules = rules
        self.embedding_norm, self.final_norm = norms

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        added = self.positions.added(T, x)
        if added is not None:
            x = x + added
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        rotation = self.positions.rotation(T, x)
        for block in self.blocks:
            x = block(x, rotation, self.rules)
        return x if self.final_norm is None else self.final_norm(x)


class GPT(nn.Module):
    """Logits of the next token at each place: model(tokens [B,T]) → [B,T,vocabulary]"""

    def __init__(self, vocabulary: int, width: int, stack: nn.Module, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self.stack = stack

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stack(self.embedding(tokens))
        return F.linear(x, (self.head or self.embedding).weight)

    @torch.no_grad()
    def generate(self, tokens: Tensor, n: int, limit: int | None, temperature: float = 1.0) -> Tensor:
        """Returns the tokens [B,T] with n more, drawn one after another; each reads at most the last `limit`."""
        for _ in range(n):
            logits = self(tokens if limit is None else tokens[:, -limit:])[:, -1]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens = torch.cat([tokens, new], 1)
        return tokens


def alibi_slopes(heads: int) -> Tensor:
    """Returns for each head how fast scores fall with the distance: 2^(−8/H), 2^(−16/H), …"""
    below = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / below * torch.arange(1, below + 1, dtype=torch.float64))
    between = 2.0 ** (-4 / below * (2 * torch.arange(heads - below, dtype=torch.float64) + 1))
    return torch.cat([slopes, between]).float()
