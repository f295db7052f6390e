"""Distillation of attention: each converted layer is trained to have the outputs of the same layer of the original.

The original reads a batch. The input x_l of its attention in layer l is the input of the converted attention, too, and
the loss is the mean over converted layers of the relative squared error of what attention adds to the residual stream,
after the output projection:
    ‖A'_l(x_l) − A_l(x_l)‖² / ‖A_l(x_l)‖²
Layers are thus trained independently: none has the errors of another, and no gradient passes between them. Projections
of queries and keys are trained, and the mechanism's own parameters; if heads were pooled, so that no head can be what
it was, also those of values and of the output; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.config import ConfigError, Section
from regard.convert.surgery import attention_layers, changed_layers
from regard.data.batch import IGNORE, Batch
from regard.data.tokenizers import Tokenizer
from regard.errors import did_you_mean, quote
from regard.models import GPT, Encoder, Model, load
from regard.nn import Attention, Rotation
from regard.nn.capture import forward_hooks
from regard.train.tasks.base import TASKS, Task, task
from regard.train.tasks.lm import LanguageModel, evaluation_windows
from regard.train.tasks.questions import Questions

NAME = "distil"  # of the task, in recipes
UNREACHED_STEP = 1 << 20  # beyond any training: a task without dev data is measured on the batch of this step
MAX_ROWS = 64  # rows that errors are measured on
MAX_TOKENS = 1 << 13  # tokens of them
TINY = 1e-30  # keeps the relative error of an output that is zero finite


@dataclass(frozen=True, kw_only=True)
class DistilData(Section):
    """The original model (`teacher`, a run or model folder), and the `task` whose `data` is read."""

    place = "data"

    teacher: str = ""
    task: str = "lm"
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS or self.task == NAME:
            known = set(TASKS) - {NAME}
            hint = did_you_mean(self.task, known)
            raise ConfigError(f"data.task = {quote(self.task)}: no such task to distil on.{hint}")


@task(NAME)
class Distil(Task):
    """A task with the batches of another task, whose loss is the error of converted attention."""

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
        self.tokenizer = self.inner.tokenizer
        self.rows = self.inner.rows
        self.length = self.inner.length
        self.period = self.inner.period
        self.teacher = load(config.teacher, device).requires_grad_(False)
        self.probe = held_out_batches(self.inner)

    def batch(self, step: int, size: int) -> Batch:
        return self.inner.batch(step, size)

    def prepare(self, model: Model[Any]) -> None:
        """Freezes all parameters but those that are trained in converted layers."""
        model.requires_grad_(False)
        for n in changed_layers(self.teacher, model):
            attention = attention_layers(model)[n]
            for part in (attention.mechanism, attention.query_norm, attention.key_norm):
                if part is not None:
                    part.requires_grad_(True)
            pooled = attention.size.G != attention_layers(self.teacher)[n].size.G
            attention.out.requires_grad_(pooled)
            widths = attention.widths
            if not pooled:
                widths = widths[:-1]  # the values are last in the fused projection, and stay unchanged
            for parameter in attention.project.parameters():
                parameter.requires_grad_(True)
                parameter.register_hook(_keep_gradient_of(sum(widths)))

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Returns the mean relative squared error of converted layers, times the number of targets, as for other
        losses."""
        return layer_errors(self.teacher, model, batch).mean() * self.targets(batch)

    def targets(self, batch: Batch) -> Tensor:
        return scored_positions(batch).sum()

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the error on held-out text (see `mean_error`), and a GPT's ordinary loss there."""
        metrics = {"error": mean_error(self.teacher, model, self.probe)}
        if not isinstance(model, Encoder):
            metrics["loss"] = probe_loss(self.inner, model, self.probe)
        return metrics


class AttentionActivations(NamedTuple):
    """The activations of one attention layer: its input, the outputs of heads, and the output after the projection."""

    x: Float[Tensor, "B T D"]
    rotation: Rotation | None
    heads: Float[Tensor, "B H T V"]
    out: Float[Tensor, "B T D"]


@torch.no_grad()
def capture_activations(model: Model[Any], batch: Batch) -> list[AttentionActivations]:
    """Runs a model over a batch and returns the activations of each attention layer."""
    activations: list[AttentionActivations] = []
    assert isinstance(model, GPT | Encoder)
    with _capture_heads(attention_layers(model)) as heads:

        def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
            # The heads of this layer have just been merged, so they are the last in the list.
            activations.append(AttentionActivations(inputs[0], named.get("rotation"), heads.pop(), out))

        with forward_hooks(attention_layers(model), hook, with_kwargs=True):
            if isinstance(model, Encoder):
                model.vectors(batch.x, batch.visible)
            else:
                # Without the logits, which are not needed.
                model.stack(model.embedding(batch.x), batch.visible)
    return activations


def layer_errors(teacher: Model[Any], model: Model[Any], batch: Batch) -> Float[Tensor, " L"]:
    """Returns ‖A'(x) − A(x)‖² / ‖A(x)‖² of each converted layer, for the input x of the original's layer."""
    originals = capture_activations(teacher, batch)
    scored = scored_positions(batch)
    errors = []
    for n in changed_layers(teacher, model):
        attention = attention_layers(model)[n].eval()  # without dropout, as a deterministic function is learned
        out = attention(originals[n].x, batch.visible, rotation=originals[n].rotation)
        errors.append(_relative_squared_error(out, originals[n].out, scored))
    return torch.stack(errors)


@torch.no_grad()
def mean_error(teacher: Model[Any], model: Model[Any], parts: Sequence[Batch]) -> float:
    """Returns the root of the mean of `layer_errors` over layers and parts."""
    return float(torch.stack([layer_errors(teacher, model, part).mean() for part in parts]).mean().sqrt())


@torch.no_grad()
def head_errors(teacher: Model[Any], model: Model[Any], parts: Sequence[Batch]) -> dict[int, list[float]]:
    """Returns ‖a'_h − a_h‖ / ‖a_h‖ of each head, by the number of its converted layer.

    a_h is what a head adds to the residual stream through its part of the output projection, for the input x of the
    original's layer.
    """
    changed = changed_layers(teacher, model)
    # For each layer [2,H]: squared norms of the difference and of the original.
    sums = {n: torch.zeros(2, attention_layers(model)[n].size.H, dtype=torch.float64) for n in changed}
    for batch in parts:
        originals = capture_activations(teacher, batch)
        scored = scored_positions(batch)
        for n in changed:
            attention = attention_layers(model)[n].eval()
            with _capture_heads([attention]) as heads:
                attention(originals[n].x, batch.visible, rotation=originals[n].rotation)
            found = _head_contributions(attention, heads.pop())
            wanted = _head_contributions(attention_layers(teacher)[n], originals[n].heads)
            for h, (a, b) in enumerate(zip(found, wanted, strict=True)):
                norms = [(x.double() * scored[..., None]).square().sum() for x in (a - b, b)]
                sums[n][:, h] += torch.stack(norms).cpu()
    return {n: (wrong / whole.clamp(min=TINY)).sqrt().tolist() for n, (wrong, whole) in sums.items()}


@torch.no_grad()
def probe_loss(inner: Task, model: Model[Any], parts: Sequence[Batch]) -> float:
    """Returns the mean loss of a model over the targets of held-out text."""
    # A task's loss is a sum over targets, so parts of different sizes weigh by their targets.
    losses = [(float(inner.loss(model, part)), float(inner.targets(part))) for part in parts]
    return sum(loss for loss, _ in losses) / sum(weight for _, weight in losses)


def held_out_batches(inner: Task) -> list[Batch]:
    """Returns batches of a task's dev data; if it has none, those of steps that no training reaches."""
    if isinstance(inner, LanguageModel):
        return [part.to(inner.device) for part in evaluation_windows(inner.dev.tokens, inner.length, MAX_TOKENS)]
    if isinstance(inner, Questions) and inner.dev is not None:
        return [inner.dev.rows(0, MAX_ROWS)]
    size = -(-MAX_ROWS // inner.period)  # rounded up
    return [inner.batch(UNREACHED_STEP * inner.period + n, size) for n in range(inner.period)]


def scored_positions(batch: Batch) -> Bool[Tensor, "B T"]:
    """Returns which places count: the visible ones up to the last target of a row; padding follows it."""
    scored = (batch.y != IGNORE).long().flip(1).cumsum(1).flip(1) > 0
    if batch.visible is None:
        return scored
    return scored & batch.visible


def _relative_squared_error(found: Tensor, wanted: Tensor, scored: Tensor) -> Tensor:
    """Returns ‖found − wanted‖² / ‖wanted‖² over the places that count."""
    # Multiplied instead of selected, so that shapes are fixed and a step can be one CUDA graph.
    found = found.float() * scored[..., None]
    wanted = wanted.float() * scored[..., None]
    return (found - wanted).square().sum() / wanted.square().sum().clamp(min=TINY)


def _keep_gradient_of(rows: int) -> Callable[[Tensor], Tensor]:
    """Returns a hook that sets the gradient of all but the first rows to zero."""

    def hook(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept[rows:] = 0
        return kept

    return hook


def _head_contributions(attention: Attention, heads: Float[Tensor, "B H T V"]) -> Iterator[Float[Tensor, "B T D"]]:
    """Yields what each head alone adds to the residual stream: the layer's output with all other heads set to zero."""
    for h in range(heads.shape[1]):
        alone = torch.zeros_like(heads)
        alone[:, h] = heads[:, h]
        yield attention.merge(alone, None) @ attention.out.weight.mT


@contextmanager
def _capture_heads(attentions: Sequence[Attention]) -> Iterator[list[Tensor]]:
    """Yields a list that fills with the outputs of heads [B,H,T,V], one tensor a layer, before they are merged."""
    heads: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], merged: Tensor) -> None:
        heads.append(inputs[0])

    with forward_hooks((attention.merge for attention in attentions), hook):
        yield heads
