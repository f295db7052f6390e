"""Distillation of attention: each converted layer is taught to give what the same layer of the original gave.

The original reads a batch. What went into the attention of layer l, x_l, goes into the converted attention of that
layer too, and the loss is the mean over converted layers of the relative squared error of what attention adds to the
stream, after the output projection:
    ‖A'_l(x_l) − A_l(x_l)‖² / ‖A_l(x_l)‖²
Layers are thus taught side by side: none suffers from the errors of another, and no gradient passes between them.
Queries and keys are learned, and what the mechanism brings; where heads were pooled, and no head can be what it was,
values and the output projection too; nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.config import ConfigError, Section
from regard.convert.surgery import changed_layers, layers_of
from regard.data.batch import IGNORE, Batch
from regard.data.tokenizers import Tokenizer
from regard.models import GPT, Encoder, Model, load
from regard.nn import Attention, Rotation
from regard.nn.capture import forward_hooks
from regard.train.tasks.base import TASKS, Task, task
from regard.train.tasks.lm import LanguageModel, evaluation_windows
from regard.train.tasks.questions import Questions

PROBE = 1 << 20  # a step that no training reaches: its batch is what a task without dev data is measured on
ROWS = 64  # rows that errors are measured on
MOST = 1 << 13  # tokens of them


@dataclass(frozen=True, kw_only=True)
class DistilData(Section):
    """The original model (`teacher`, a run or model folder), and what is read: the `data` of another `task`."""

    place = "data"

    teacher: str = ""
    task: str = "lm"
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS or self.task == NAME:
            raise ConfigError(f"data.task = {self.task!r}: expected one of {', '.join(sorted(set(TASKS) - {NAME}))}")


NAME = "distil"


@task(NAME)
class Distil(Task):
    """The batches of another task; the loss is how far converted attention is from the original's."""

    Config = DistilData
    metric = "error"
    highest = False
    files = ("teacher",)

    def __init__(
        self, config: DistilData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        if not config.teacher:
            raise ConfigError("data.teacher is missing: the run or model folder to learn from")
        cls = TASKS[config.task]
        self.inner: Task = cls(cls.Config().but(**config.data), seed, device, folder, tokenizer)
        self.tokenizer, self.rows, self.length = self.inner.tokenizer, self.inner.rows, self.inner.length
        self.period = self.inner.period
        self.teacher = load(config.teacher, device).requires_grad_(False)
        self.probe = held_out(self.inner)

    def batch(self, step: int, size: int) -> Batch:
        return self.inner.batch(step, size)

    def prepare(self, model: Model[Any]) -> None:
        """Leaves only what is learned of converted layers to be learned."""
        model.requires_grad_(False)
        for n in changed_layers(self.teacher, model):
            attention, old = layers_of(model)[n], layers_of(self.teacher)[n]
            for part in (attention.mechanism, attention.query_norm, attention.key_norm):
                if part is not None:
                    part.requires_grad_(True)
            *scores, values = attention.widths
            pooled = attention.size.G != old.size.G
            attention.out.requires_grad_(pooled)
            learned = sum(scores) + (values if pooled else 0)
            for rows in attention.project.parameters():
                rows.requires_grad_(True)
                rows.register_hook(_only(learned))

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The mean relative squared error of converted layers, times the tokens, as a trainer weighs it."""
        found = layer_errors(self.teacher, model, batch)
        return found.mean() * self.targets(batch)

    def targets(self, batch: Batch) -> Tensor:
        return counted(batch).sum()

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """The root of the mean relative squared error on text that is not learned from, and the ordinary loss there."""
        measured = {} if isinstance(model, Encoder) else {"loss": probe_loss(self.inner, model, self.probe)}
        return {"error": mean_error(self.teacher, model, self.probe), **measured}


class Heard(NamedTuple):
    """What went into an attention layer, what each head made of it, and what came out after the output projection."""

    x: Float[Tensor, "B T D"]
    rotation: Rotation | None
    heads: Float[Tensor, "B H T V"]
    out: Float[Tensor, "B T D"]


@torch.no_grad()
def heard(model: Model[Any], batch: Batch) -> list[Heard]:
    """A pass over a batch, and what the attention of each layer did in it."""
    found: list[Heard] = []
    assert isinstance(model, GPT | Encoder)
    with _heads(layers_of(model)) as heads:

        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
            found.append(Heard(given[0], named.get("rotation"), heads.pop(), out))

        with forward_hooks(layers_of(model), note, with_kwargs=True):
            if isinstance(model, Encoder):
                model.vectors(batch.x, batch.visible)
            else:
                model.stack(model.embedding(batch.x), batch.visible)
    return found


def layer_errors(teacher: Model[Any], model: Model[Any], batch: Batch) -> Float[Tensor, " L"]:
    """‖A'(x) − A(x)‖² / ‖A(x)‖² of each converted layer, given what the original's layer was given."""
    said, seen = heard(teacher, batch), counted(batch)
    errors = []
    for n in changed_layers(teacher, model):
        attention = layers_of(model)[n].eval()  # without dropout: what is learned is a function
        out = attention(said[n].x, batch.visible, rotation=said[n].rotation)
        errors.append(_relative(out, said[n].out, seen))
    return torch.stack(errors)


@torch.no_grad()
def mean_error(teacher: Model[Any], model: Model[Any], parts: Sequence[Batch]) -> float:
    """The root of the mean of `layer_errors` over layers and parts."""
    return float(torch.stack([layer_errors(teacher, model, part).mean() for part in parts]).mean().sqrt())


@torch.no_grad()
def head_errors(teacher: Model[Any], model: Model[Any], parts: Sequence[Batch]) -> dict[int, list[float]]:
    """‖a'_h − a_h‖ / ‖a_h‖ of what each head of each converted layer adds to the stream, a_h, through its part of the
    output projection, given what the original's layer was given."""
    changed = changed_layers(teacher, model)
    sums = {n: torch.zeros(2, layers_of(model)[n].size.H, dtype=torch.float64) for n in changed}
    for batch in parts:
        said, seen = heard(teacher, batch), counted(batch)
        for n in changed:
            attention = layers_of(model)[n].eval()
            with _heads([attention]) as heads:
                attention(said[n].x, batch.visible, rotation=said[n].rotation)
            pairs = zip(_added(attention, heads.pop()), _added(layers_of(teacher)[n], said[n].heads), strict=True)
            for h, (found, wanted) in enumerate(pairs):
                wrong, whole = ((x.double() * seen[..., None]).square().sum() for x in (found - wanted, wanted))
                sums[n][:, h] += torch.stack([wrong, whole]).cpu()
    return {n: (wrong / whole.clamp(min=1e-30)).sqrt().tolist() for n, (wrong, whole) in sums.items()}


@torch.no_grad()
def probe_loss(inner: Task, model: Model[Any], parts: Sequence[Batch]) -> float:
    """The mean loss of a model on text that is not learned from."""
    losses = [(float(inner.loss(model, part)), float(inner.targets(part))) for part in parts]
    return sum(loss for loss, _ in losses) / sum(weight for _, weight in losses)


def held_out(inner: Task) -> list[Batch]:
    """Rows that a task does not learn from; where it has none, those of steps that no training reaches."""
    if isinstance(inner, LanguageModel):
        return [part.to(inner.device) for part in evaluation_windows(inner.dev.tokens, inner.length, MOST)]
    if isinstance(inner, Questions) and inner.dev is not None:
        return [inner.dev.rows(0, ROWS)]
    return [inner.batch(PROBE * inner.period + n, -(-ROWS // inner.period)) for n in range(inner.period)]


def counted(batch: Batch) -> Bool[Tensor, "B T"]:
    """The places up to the last target of a row: what comes after is padding."""
    seen = (batch.y != IGNORE).long().flip(1).cumsum(1).flip(1) > 0
    return seen if batch.visible is None else seen & batch.visible


def _relative(found: Tensor, wanted: Tensor, seen: Tensor) -> Tensor:
    """‖found − wanted‖² / ‖wanted‖² over the places that count; shapes do not depend on which these are, so that a step
    can be one CUDA graph."""
    found, wanted = (x.float() * seen[..., None] for x in (found, wanted))
    return (found - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30)


def _only(rows: int) -> Any:
    """A hook that leaves the gradient of the first rows alone."""

    def hook(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept[rows:] = 0
        return kept

    return hook


def _added(attention: Attention, heads: Float[Tensor, "B H T V"]) -> Iterator[Float[Tensor, "B T D"]]:
    """What each head alone adds to the stream."""
    for h in range(heads.shape[1]):
        alone = torch.zeros_like(heads)
        alone[:, h] = heads[:, h]
        yield attention.merge(alone, None) @ attention.out.weight.mT


@contextmanager
def _heads(attentions: Sequence[Attention]) -> Iterator[list[Tensor]]:
    """The outputs of heads, one tensor a layer, as each is about to be merged."""
    found: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...], merged: Tensor) -> None:
        found.append(given[0])

    with forward_hooks((attention.merge for attention in attentions), note):
        yield found
