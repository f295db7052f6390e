"""One head against two, when the length of a key varies.

Keys are orthonormal, but key a comes as ε·k_a with ε ~ N(1, variance). To average the values of a and b, one head asks
β(k_a + k_b): its weights on the two are σ(β(ε − 1)) and the rest, so that a small change of ε tips all of it to one
side. Two heads ask βk_a and βk_b and average what they read: each is sure of its own key as long as ε > 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.seeds import generator
from regard.lab.base import LabConfig, Results, Say, lab, normal
from regard.lab.two_heads.page import two_heads_page

_PICTURED = 400  # draws of which the page shows every one


@dataclass(frozen=True, kw_only=True)
class TwoHeads(LabConfig):
    """`keys` orthonormal keys, of which one has a length of that `variance`; queries of lengths `betas`."""

    place: ClassVar[str] = "two-heads"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "keys": (3, 1024),
        "variance": (0, 100),
        "betas": (1e-3, 1000),
        "draws": (2, 1_000_000),
    }

    keys: int = 7
    variance: float = 0.5
    betas: tuple[float, ...] = (10.0, 20.0, 30.0, 40.0, 50.0)
    draws: int = 20_000


@lab("two-heads", TwoHeads, two_heads_page)
def measure(config: TwoHeads, say: Say) -> Results:
    """One head against two, when the length of a key varies."""
    lengths = 1 + config.variance**0.5 * normal(generator(config.seed, "lengths"), config.draws)
    rows: list[dict[str, Any]] = []
    for beta in config.betas:
        one, two = weights(lengths, config.keys, beta)
        for heads, w in ((1, one), (2, two)):
            rows += [
                {"beta": beta, "heads": heads, "key": key, "mean": float(w[:, n].mean()), "std": float(w[:, n].std())}
                for n, key in enumerate("ab")
            ]
    one, two = weights(lengths[:_PICTURED], config.keys, config.betas[0])
    drawn = {"beta": config.betas[0], "lengths": lengths[:_PICTURED].tolist()}
    return {"rows": rows, "drawn": drawn | {"one": one[:, 0].tolist(), "two": two[:, 0].tolist()}}


def weights(lengths: Tensor, keys: int, beta: float) -> tuple[Tensor, Tensor]:
    """The weights [draws, keys] of one head that asks for the first two keys, and the mean of two that ask for one."""
    lengthened = torch.eye(keys, dtype=lengths.dtype).repeat(len(lengths), 1, 1)
    lengthened[:, 0, 0] = lengths
    ask_a, ask_b = beta * torch.eye(keys, dtype=lengths.dtype)[:2]
    one, a, b = ((lengthened @ q).softmax(-1) for q in (ask_a + ask_b, ask_a, ask_b))
    return one, (a + b) / 2
