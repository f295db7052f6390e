"""The settings of a race."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from regard.config import ConfigError, Section
from regard.devices import resolve_device, resolve_dtype
from regard.errors import did_you_mean
from regard.shapes import Size

Pass = Literal["forward", "training", "decode"]
PASSES: tuple[Pass, ...] = ("forward", "training", "decode")
# Short lengths and few repeats: half a minute for all mechanisms.
QUICK: dict[str, Any] = {"tokens": (128, 512, 2048), "seconds": 0.05, "patience": 0.5, "draws": 1}


@dataclass(frozen=True, kw_only=True)
class Race(Section):
    """The sizes of a race, and the time that it may take.

    There are `batch` sequences, or as many as make `total` tokens. `seconds` are spent on each point of each entrant,
    and no run is begun that is expected to take longer than `patience`. `draws` is the number of random cases for each
    law; with 0 laws are not checked.
    """

    place: ClassVar[str] = "bench"

    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    passes: tuple[str, ...] = PASSES
    batch: int = 1
    total: int = 0
    heads: int = 8
    groups: int = 8
    width: int = 64
    features: int = 256
    causal: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    seconds: float = 0.3
    patience: float = 2.0
    draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ConfigError(f"bench.tokens = {list(self.tokens)}: expected positive numbers in rising order")
        for name in self.passes:
            if name not in PASSES:
                raise ConfigError(f"bench.passes: no '{name}'.{did_you_mean(name, PASSES)}")
        if self.draws < 0:
            raise ConfigError(f"bench.draws = {self.draws}: expected 0 or more")
        for field in ("batch", "features", "seconds", "patience"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"bench.{field} = {getattr(self, field)}: expected more than zero")
        if self.heads % self.groups:
            raise ConfigError(f"bench.groups = {self.groups}: expected a divisor of {self.heads} heads")
        resolve_dtype(self.dtype)
        resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch has it."""
        dtype: torch.dtype = getattr(torch, resolve_dtype(self.dtype))
        return dtype

    def size(self, N: int, passing: str) -> Size:
        """Returns the sizes of one point; in decoding, one more token attends to itself and to N before it."""
        B = max(self.batch, self.total // N)
        K = self.width
        T = S = N
        if passing == "decode":
            T = 1
            S = N + 1
        device = torch.device(self.device)
        return Size(B, T, S, self.heads, self.groups, K, K, self.causal, self.torch_dtype, device)
