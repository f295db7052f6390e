"""Can attention that selects one key learn which? Softmax can, argmax cannot, straight-through can.

The task is a lookup: a row holds some of many symbols, each with a random label, and asks for the label of one of them.
q and k are learned tables of the symbols, so that the model has to learn where to look; the labels have learned tables
too. Argmax passes no gradient to q and k, since its choice does not move with them: only the reading of labels learns.
Straight-through chooses like argmax and learns like softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.config import ConfigError
from regard.data.seeds import derive, generator
from regard.lab.argmax.page import argmax_page
from regard.lab.base import LabConfig, Results, Say, lab, normal, quartiles
from regard.mechanisms import mechanism

WAYS: dict[str, dict[str, str]] = {
    "softmax": {"name": "softmax"},
    "argmax": {"name": "argmax"},
    "straight-through": {"name": "argmax", "gradient": "straight_through"},
}


@dataclass(frozen=True, kw_only=True)
class Selecting(LabConfig):
    """Rows of `tokens` of `symbols` symbols with `labels` labels; `runs` trainings with seeds of their own each way."""

    place: ClassVar[str] = "argmax"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "symbols": (2, 4096),
        "tokens": (2, 4096),
        "labels": (2, 4096),
        "size": (1, 1024),
        "steps": (1, 1_000_000),
        "batch": (1, 65_536),
        "runs": (1, 1000),
        "lr": (1e-6, 10),
        "every": (1, 1_000_000),
    }

    symbols: int = 32
    tokens: int = 8
    labels: int = 8
    size: int = 16
    steps: int = 400
    batch: int = 64
    runs: int = 7
    lr: float = 0.01
    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens > self.symbols:
            raise ConfigError(f"argmax.tokens = {self.tokens}: expected at most argmax.symbols, {self.symbols}")


class Lookup(nn.Module):
    """logits = attention(q[asked], k[symbols], v[labels]) · W; every table is learned."""

    def __init__(self, config: Selecting, way: str, seed: int) -> None:
        super().__init__()
        draw = generator(seed, "tables")

        def learned(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(normal(draw, rows, columns).float())

        self.q, self.k = learned(config.symbols, config.size), learned(config.symbols, config.size)
        self.v, self.read = learned(config.labels, config.size), learned(config.labels, config.size)
        self.attend = mechanism(**WAYS[way])

    def forward(self, asked: Tensor, symbols: Tensor, labels: Tensor) -> Tensor:
        """Scores of the labels [B, labels] for asked [B], symbols and labels [B, tokens]."""
        q, k, v = self.q[asked][:, None, None], self.k[symbols][:, None], self.v[labels][:, None]
        out: Tensor = self.attend(q, k, v)[:, 0, 0] @ self.read.mT
        return out


def rows(config: Selecting, n: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """asked, symbols, labels and the answers of n rows; the symbols of a row are all different."""
    symbols = torch.rand(n, config.symbols, generator=draw).argsort(-1)[:, : config.tokens]
    labels = torch.randint(config.labels, (n, config.tokens), generator=draw)
    place = torch.randint(config.tokens, (n, 1), generator=draw)
    return symbols.gather(1, place)[:, 0], symbols, labels, labels.gather(1, place)[:, 0]


def train(config: Selecting, way: str, seed: int) -> dict[str, Any]:
    """One training: accuracy on rows never seen and the norms of dq and dk on the way, and what came out."""
    model, draw = Lookup(config, way, seed), generator(seed, "rows")
    test = rows(config, 1024, generator(seed, "test"))
    adam = torch.optim.Adam(model.parameters(), lr=config.lr)
    curve = []
    for step in range(config.steps + 1):
        *asked, answers = rows(config, config.batch, draw)
        loss = functional.cross_entropy(model(*asked), answers)
        adam.zero_grad()
        loss.backward()
        if step % config.every == 0 or step == config.steps:
            norms = {f"d{name}": _norm(getattr(model, name).grad) for name in "qk"}
            curve.append({"step": step, "accuracy": accuracy(model, test), "loss": float(loss.detach()), **norms})
        adam.step()
    model.attend = mechanism("argmax")
    return {"curve": curve, "read_by_argmax": accuracy(model, test), "finds": _finds(model, test)}


def accuracy(model: Lookup, test: tuple[Tensor, ...]) -> float:
    """The share of answers that are right."""
    with torch.no_grad():
        *asked, answers = test
        return float((model(*asked).argmax(-1) == answers).double().mean())


def _finds(model: Lookup, test: tuple[Tensor, ...]) -> float:
    """The share of rows in which the key with the largest score is the one that is asked for."""
    asked, symbols, _, _ = test
    with torch.no_grad():
        best = torch.einsum("bk,btk->bt", model.q[asked], model.k[symbols]).argmax(-1, keepdim=True)
    return float((symbols.gather(1, best)[:, 0] == asked).double().mean())


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.norm())


@lab("argmax", Selecting, argmax_page)
def measure(config: Selecting, say: Say) -> Results:
    """Learning where to look: softmax learns it, argmax cannot, straight-through can."""
    ways = []
    for way in WAYS:
        say(f"{config.runs} trainings with {way}")
        trained = [train(config, way, derive(config.seed, "run", n)) for n in range(config.runs)]
        curves = [one["curve"] for one in trained]
        ways.append(
            {
                "name": way,
                "curve": [
                    {"step": points[0]["step"]}
                    | {key: quartiles([p[key] for p in points]) for key in ("accuracy", "loss", "dq", "dk")}
                    for points in zip(*curves, strict=True)
                ],
                "final": [curve[-1]["accuracy"] for curve in curves],
                "read_by_argmax": [one["read_by_argmax"] for one in trained],
                "finds": [one["finds"] for one in trained],
            }
        )
    return {"chance": 1 / config.labels, "ways": ways}
