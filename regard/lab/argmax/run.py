"""Can attention that selects one key learn which? Softmax can, argmax cannot, straight-through can.

The task is a lookup: a row holds some of many symbols, each with a random label, and asks for the label of one of them.
q and k are learned tables of the symbols, so that the model has to learn where to look; the labels have learned tables
too. Argmax passes no gradient to q and k, since its choice does not move with them: only the reading of labels learns.
Straight-through chooses like argmax and learns like softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.data.seeds import derive, generator
from regard.lab.argmax.page import argmax_page
from regard.lab.argmax.results import ArgmaxResults, CurveRow, Selecting, WayResults
from regard.lab.base import Say, lab, normal, quartiles
from regard.lab.results import OutcomeTable
from regard.mechanisms import mechanism

# The ways to attend that are compared, as options of `mechanism`.
WAYS: dict[str, dict[str, str]] = {
    "softmax": {"name": "softmax"},
    "argmax": {"name": "argmax"},
    "straight-through": {"name": "argmax", "gradient": "straight_through"},
}


class TrainingPoint(NamedTuple):
    """One training at one step."""

    step: int
    accuracy: float
    loss: float
    dq: float
    dk: float


class LookupTraining(NamedTuple):
    """One training: its learning curve, and its final measures as in `WayResults`."""

    curve: list[TrainingPoint]
    read_by_argmax: float
    finds: float


class Lookup(nn.Module):
    """logits = attention(q[asked], k[symbols], v[labels]) · W; every table is learned."""

    def __init__(self, config: Selecting, way: str, seed: int) -> None:
        super().__init__()
        draw = generator(seed, "tables")

        def random_table(rows: int) -> nn.Parameter:
            return nn.Parameter(normal(draw, rows, config.size).float())

        self.q = random_table(config.symbols)
        self.k = random_table(config.symbols)
        self.v = random_table(config.labels)
        self.read = random_table(config.labels)
        self.attend = mechanism(**WAYS[way])

    def forward(self, asked: Tensor, symbols: Tensor, labels: Tensor) -> Tensor:
        """Returns the scores of the labels [B, labels] for asked [B], symbols and labels [B, tokens]."""
        q = self.q[asked][:, None, None]  # [B,1,1,K]: one head, one query
        k = self.k[symbols][:, None]
        v = self.v[labels][:, None]
        out: Tensor = self.attend(q, k, v)[:, 0, 0] @ self.read.mT
        return out


def draw_rows(config: Selecting, n: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns asked, symbols, labels and the answers of n rows; the symbols of a row are all different."""
    # The first of a random order of all symbols: drawn without replacement, for all rows at once.
    symbols = torch.rand(n, config.symbols, generator=draw).argsort(-1)[:, : config.tokens]
    labels = torch.randint(config.labels, (n, config.tokens), generator=draw)
    place = torch.randint(config.tokens, (n, 1), generator=draw)
    return symbols.gather(1, place)[:, 0], symbols, labels, labels.gather(1, place)[:, 0]


def train(config: Selecting, way: str, seed: int) -> LookupTraining:
    """Trains one model; returns its results, and on the way the test accuracy, the loss, and the norms of dq and dk."""
    model = Lookup(config, way, seed)
    draw = generator(seed, "rows")
    test = draw_rows(config, 1024, generator(seed, "test"))
    adam = torch.optim.Adam(model.parameters(), lr=config.lr)
    curve = []
    for step in range(config.steps + 1):
        *inputs, answers = draw_rows(config, config.batch, draw)
        loss = functional.cross_entropy(model(*inputs), answers)
        adam.zero_grad()
        loss.backward()
        if step % config.every == 0 or step == config.steps:
            norms = (_norm(model.q.grad), _norm(model.k.grad))
            curve.append(TrainingPoint(step, accuracy(model, test), float(loss.detach()), *norms))
        adam.step()
    # The tables stay as they were trained; only the reading changes.
    model.attend = mechanism("argmax")
    return LookupTraining(curve, accuracy(model, test), _share_found(model, test))


def accuracy(model: Lookup, test: tuple[Tensor, ...]) -> float:
    """Returns the share of answers that are right."""
    with torch.no_grad():
        *inputs, answers = test
        return float((model(*inputs).argmax(-1) == answers).double().mean())


def _share_found(model: Lookup, test: tuple[Tensor, ...]) -> float:
    """Returns the share of rows in which the key with the largest score is the one that is asked for."""
    asked, symbols, _, _ = test
    with torch.no_grad():
        best = torch.einsum("bk,btk->bt", model.q[asked], model.k[symbols]).argmax(-1, keepdim=True)
    return float((symbols.gather(1, best)[:, 0] == asked).double().mean())


def _norm(gradient: Tensor | None) -> float:
    """Returns the norm of a gradient; 0 if it is None, as with argmax."""
    if gradient is None:
        return 0.0
    return float(gradient.norm())


@lab("argmax", Selecting, argmax_page)
def measure(config: Selecting, say: Say) -> ArgmaxResults:
    """Learning where to look: softmax learns it, argmax cannot, straight-through can."""
    ways: list[WayResults] = []
    for way in WAYS:
        trainings = []
        for n in range(config.runs):
            say(f"{len(ways) * config.runs + n + 1} of {len(WAYS) * config.runs}: a training with {way}")
            trainings.append(train(config, way, derive(config.seed, "run", n)))
        ways.append(
            WayResults(
                name=way,
                curve=_summarize_curves(trainings),
                final=[training.curve[-1].accuracy for training in trainings],
                read_by_argmax=[training.read_by_argmax for training in trainings],
                finds=[training.finds for training in trainings],
            )
        )
    return ArgmaxResults(config, chance=1 / config.labels, ways=ways, outcome=_outcome(config, ways))


def _outcome(config: Selecting, ways: list[WayResults]) -> OutcomeTable:
    """Returns the table that a terminal shows: medians over trainings, beside guessing."""
    lines = []
    for way in ways:
        shown = [quartiles(numbers) for numbers in (way.final, way.finds, way.read_by_argmax)]
        lines.append([way.name, *(f"{middle:.1%}" for _, middle, _ in shown)])
    lines.append(["guessing", f"{1 / config.labels:.1%}", f"{1 / config.tokens:.1%}", "–"])
    return OutcomeTable(["attention", "right answers", "looks at the asked", "read by argmax"], lines)


def _summarize_curves(trainings: list[LookupTraining]) -> list[CurveRow]:
    """Returns quartiles over trainings at each step."""
    rows = []
    for points in zip(*(training.curve for training in trainings), strict=True):
        rows.append(
            CurveRow(
                step=points[0].step,
                accuracy=quartiles([point.accuracy for point in points]),
                loss=quartiles([point.loss for point in points]),
                dq=quartiles([point.dq for point in points]),
                dk=quartiles([point.dk for point in points]),
            )
        )
    return rows
