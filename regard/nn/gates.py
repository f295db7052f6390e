"""Decays a ≤ 0 and write strengths b, which a layer computes from its input for mechanisms with a memory.

softplus     a = −softplus(x A + bias) · e^α        α one number a head; Mamba-2, gated DeltaNet
logsigmoid   a = logsigmoid(x A + bias) / 16        gated linear attention (GLA)
constant     a = log(1 − 2^{−5−h})                  as in `retention`, the same for every token
step         a = −Δ · e^α,  b = Δ = softplus(x A + bias)      Mamba-2: a longer step forgets and writes more
b            b = range · σ(x B)                     from 0 to the mechanism's `range`, unless b = Δ

They are computed in float32 or better: sums of many decays are needed, for which half precision has too few digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import OptionError
from regard.mechanisms import Mechanism
from regard.nn.projection import Projection
from regard.registry import Registry
from regard.shapes import upcast_half


class Decay(nn.Module):
    """The rule "softplus" for a [B,T,G,W] from x A: W = 1, or K for one decay a key channel; base of the other
    rules."""

    learns: ClassVar[bool] = True
    writes: ClassVar[bool] = False  # whether the step is the write strength b, too

    def __init__(self, G: int, W: int) -> None:
        super().__init__()
        # Steps from 0.001 to 0.1 times rates from 1 to 16: heads begin with memories of one to a thousand tokens.
        steps = torch.empty(G * W).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
        self.rate = nn.Parameter(torch.empty(G).uniform_(1, 16).log())

    def forward(self, x: Float[Tensor, "B T G W"]) -> Float[Tensor, "B T G W"]:
        return -self.step(x) * self.rate.to(x.dtype).exp()[:, None]

    def step(self, x: Float[Tensor, "B T G W"]) -> Float[Tensor, "B T G W"]:
        """Returns Δ, how long a token lasts; the rates e^α multiply it."""
        return functional.softplus(x + self.bias.to(x.dtype).view(x.shape[2:]))


class StepDecay(Decay):
    """The rule "step" of Mamba-2: the step Δ, kept between `least` and `most`, is the write strength b, too."""

    writes = True

    def __init__(self, G: int, W: int, least: float = 0.0, most: float | None = None) -> None:
        super().__init__(G, W)
        if least < 0 or (most is not None and most <= least):
            raise OptionError(f"least = {least}, most = {most}: expected 0 <= least < most for the steps of a decay")
        self.least = least
        self.most = most

    def step(self, x: Float[Tensor, "B T G W"]) -> Float[Tensor, "B T G W"]:
        return super().step(x).clamp(self.least, self.most)


class LogSigmoid(Decay):
    """Decays that begin near 1: e^a is the sixteenth root of a sigmoid."""

    def __init__(self, G: int, W: int) -> None:
        nn.Module.__init__(self)
        self.bias = nn.Parameter(torch.zeros(G * W))

    def forward(self, x: Float[Tensor, "B T G W"]) -> Float[Tensor, "B T G W"]:
        return functional.logsigmoid(x + self.bias.to(x.dtype).view(x.shape[2:])) / 16


class Constant(Decay):
    """Decays that are the same for every token, and are not learned."""

    learns = False

    def __init__(self, G: int, W: int) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Float[Tensor, "B T G W"]) -> Float[Tensor, "B T G W"]:
        heads = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
        return torch.log1p(-torch.exp2(-5 - heads)).to(x.dtype)[:, None].expand(x.shape)


DECAYS: Registry[Callable[..., Decay]] = Registry("decay")
DECAYS.update({"softplus": Decay, "logsigmoid": LogSigmoid, "constant": Constant, "step": StepDecay})
_NEVER_POSITIVE = (Decay, LogSigmoid, Constant, StepDecay)


class Gates(nn.Module):
    """Computes those of a and b that a mechanism takes, for G heads with keys of width K, from x [B,T,D]."""

    def __init__(
        self,
        D: int,
        G: int,
        K: int,
        mechanism: Mechanism,
        decay: str = "softplus",
        decay_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.heads = G
        self.width = K if getattr(mechanism, "channels", False) else 1
        self.range = float(getattr(mechanism, "range", 1.0))
        self.decay: Decay | None = None
        if "a" in mechanism.needs:
            self.decay = DECAYS.build(decay, {"G": G, "W": self.width}, **(decay_options or {}))
            if self.decay.writes and (self.width > 1 or "b" in mechanism.needs):
                raise OptionError(
                    f"decay '{decay}' says how strongly a token is written, one number a head, which {mechanism.name} "
                    "with these options does not take from a decay: use 'gated', or another decay"
                )
        learned = G * self.width if self.decay is not None and self.decay.learns else 0
        self.sizes = [learned, G if "b" in mechanism.needs else 0]
        self.project: Projection | None = None
        if any(self.sizes):
            self.project = Projection(D, sum(self.sizes), bias=False)

    @property
    def keeps_ranges(self) -> bool:
        """Returns whether a ≤ 0 and b is in its range by construction, which is not known of decays of others."""
        return self.decay is None or type(self.decay) in _NEVER_POSITIVE

    def forward(self, x: Float[Tensor, "B T D"]) -> dict[str, Tensor]:
        """Returns a [B,G,T] or [B,G,T,K] and b [B,G,T], those that the mechanism takes, by name."""
        B, T, _ = x.shape
        a, b = x[..., :0], x[..., :0]
        if self.project is not None:
            a, b = upcast_half(self.project(x)).split_with_sizes(self.sizes, -1)
        gates = {}
        if self.decay is not None:
            shape = (B, T, self.heads, self.width)
            made = a.view(shape) if self.decay.learns else upcast_half(x).new_empty(shape)
            a = self.decay(made)
            gates["a"] = a.transpose(1, 2).squeeze(3) if self.width == 1 else a.transpose(1, 2)
            if self.decay.writes:
                gates["b"] = self.decay.step(made).transpose(1, 2).squeeze(3)
        if self.sizes[1]:
            gates["b"] = self.range * torch.sigmoid(b).transpose(1, 2)
        return gates
