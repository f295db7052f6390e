"""The task `recall`: multi-query associative recall. A model is asked for the values of keys many tokens before.

    k₁ v₁ k₂ v₂ … k_P v_P   · · k₂ · · · k_P · k₁ · · ·          the labels at k₂, k_P, k₁ are v₂, v_P, v₁

Of one example of L tokens with P pairs, the keys are drawn without replacement from 1 … V/2 − 1 and the values from
V/2 … V − 1. Behind the pairs lie (L − 2P)/2 slots of two tokens. P different slots are drawn with probabilities in
proportion to i^(−0.99), i counting from 1, so that near ones are likelier; query j stands first in its slot. All other
places are zeros, or, harder, random tokens. Only the queries have a label.

A mechanism with a state of fixed size has to have stored all pairs when the questions begin; softmax keeps them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.seeds import generator
from regard.data.tokenizers import Tokenizer
from regard.errors import quote
from regard.models import GPT, Model
from regard.train.tasks.base import Task, task

EMPTY = ("zeros", "random")
POWER = -0.99  # the exponent in the probability of a slot, i^POWER
PART = 1 << 15  # tokens that are evaluated at a time
TEST_SEED = 0  # all trainings are measured on the same examples


class Sizes(NamedTuple):
    """A number of examples with a length in tokens and a number of pairs."""

    length: int
    pairs: int
    examples: int

    @property
    def name(self) -> str:
        """The name in metrics and tables: "length/pairs"."""
        return f"{self.length}/{self.pairs}"


@dataclass(frozen=True, kw_only=True)
class RecallData(Section):
    """Which examples to train on and to test on, as tables of `length`, `pairs` and `examples`; a batch has one size.

    Half of `vocabulary` are keys, half values. Places behind the pairs without a query hold `empty`: "zeros" or
    "random" tokens. The best checkpoint is chosen on `dev` examples of each size.
    """

    place = "data"

    vocabulary: int = 8192
    train: tuple[dict[str, int], ...] = ({"length": 64, "pairs": 4, "examples": 100_000},)
    test: tuple[dict[str, int], ...] = ({"length": 64, "pairs": 4, "examples": 1000},)
    dev: int = 128
    empty: str = "zeros"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.empty not in EMPTY:
            raise ConfigError(f"data.empty = {quote(self.empty)}: expected {' or '.join(EMPTY)}")
        if self.dev < 1:
            raise ConfigError(f"data.dev = {self.dev}: expected at least 1")
        for key in ("train", "test"):
            if not getattr(self, key):
                raise ConfigError(f"data.{key} = []: expected at least one table of length, pairs and examples")
            for table in getattr(self, key):
                _check_sizes(key, table, self.vocabulary)

    @property
    def train_sizes(self) -> list[Sizes]:
        """The sizes of the training examples."""
        return [Sizes(**table) for table in self.train]

    @property
    def test_sizes(self) -> list[Sizes]:
        """The sizes of the test examples."""
        return [Sizes(**table) for table in self.test]


def _check_sizes(key: str, table: Mapping[str, int], vocabulary: int) -> None:
    """Raises ConfigError if examples of these sizes cannot be made."""
    if set(table) != set(Sizes._fields):
        raise ConfigError(f"data.{key} = {quote(dict(table))}: expected tables of {', '.join(Sizes._fields)}")
    size = Sizes(**table)
    if size.length % 2 or not 1 <= size.pairs <= size.length // 4 or size.examples < 1:
        raise ConfigError(
            f"data.{key}: {size.pairs} pairs in {size.length} tokens, {size.examples} examples; expected an even "
            "length, at least four tokens a pair (the pair, and a slot for its query), and at least one example"
        )
    if size.pairs >= vocabulary // 2:
        raise ConfigError(f"data.vocabulary = {vocabulary}: {size.pairs} different keys need more than twice as many")


def make_examples(size: Sizes, count: int, vocabulary: int, empty: str, source: torch.Generator) -> Batch:
    """Returns `count` examples: tokens [count,L], and at the queries their labels [count,L]."""
    P = size.pairs
    half = vocabulary // 2
    device = source.device
    keys = 1 + _draw_distinct(count, half - 1, P, source)
    values = half + _draw_distinct(count, vocabulary - half, P, source)
    slots = (size.length - 2 * P) // 2
    likely = torch.arange(1, slots + 1, device=device, dtype=torch.float64) ** POWER
    drawn = torch.multinomial(likely.expand(count, -1), P, generator=source)
    x = torch.zeros(count, size.length, dtype=torch.long, device=device)
    if empty == "random":
        x = torch.randint(vocabulary, x.shape, generator=source, device=device)
    x[:, : 2 * P] = torch.stack([keys, values], 2).flatten(1)
    y = torch.full_like(x, IGNORE)
    places = 2 * P + 2 * drawn
    return Batch(x.scatter(1, places, keys), y.scatter(1, places, values))


def _draw_distinct(count: int, most: int, n: int, source: torch.Generator) -> Tensor:
    """Returns n different numbers from 0 to most − 1 in a random order, for each of `count` rows."""
    return torch.rand(count, most, generator=source, device=source.device).topk(n, 1).indices


@task("recall")
class Recall(Task):
    """Multi-query associative recall."""

    Config = RecallData
    metric = "accuracy"
    varies = True

    def __init__(
        self, config: RecallData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        self.config = config
        self.seed = seed
        self.device = device
        self.tokenizer = tokenizer  # type: ignore[assignment]  # there is no text, so a new model has none
        self.sizes = config.train_sizes
        self.rows = sum(size.examples for size in self.sizes)
        self.length = max(size.length for size in (*self.sizes, *config.test_sizes))

    @property
    def given(self) -> dict[str, Any]:
        return {"vocabulary": self.config.vocabulary, "length": self.length}

    def batch(self, step: int, size: int) -> Batch:
        """Returns examples of one size [size,L].

        Every epoch has the same batches, in a new order.
        """
        counts = [max(1, round(sizes.examples / size)) for sizes in self.sizes]
        epoch, place = divmod(step, sum(counts))
        order = torch.randperm(sum(counts), generator=generator(self.seed, "recall order", epoch))
        number = int(order[place])
        kind = 0
        while number >= counts[kind]:
            number -= counts[kind]
            kind += 1
        source = generator(self.seed, "recall", kind * (1 << 32) + number)
        made = make_examples(self.sizes[kind], size, self.config.vocabulary, self.config.empty, source)
        return made.to(self.device)

    def loss(self, model: Model[Any], batch: Batch, smoothing: float = 0.0) -> Tensor:
        if self.device.type != "cpu" or not isinstance(model, GPT):
            return super().loss(model, batch, smoothing)
        logits, labels = _answers(model, batch)  # few tokens have a label, and a CPU has time for no others
        return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the accuracy for each size of the test, on dev examples, and as "accuracy" their mean."""
        return self.measure(model, "dev", self.config.dev)

    def test(self, model: Model[Any]) -> dict[str, float]:
        """Returns the accuracy for each size of the test, and as "accuracy" their mean."""
        return self.measure(model, "test", None)

    @torch.no_grad()
    def measure(self, model: Model[Any], part: str, examples: int | None) -> dict[str, float]:
        """Returns the accuracy for each size and their mean, on at most `examples` examples of "dev" or "test"."""
        shares = {}
        for kind, size in enumerate(self.config.test_sizes):
            asked = size._replace(examples=min(size.examples, examples or size.examples))
            right = torch.zeros((), dtype=torch.long, device=self.device)
            for batch in self._parts(asked, generator(TEST_SEED, f"recall {part}", kind)):
                logits, labels = _answers(model, batch)
                right += (logits.argmax(-1) == labels).sum()
            shares[f"accuracy {size.name}"] = int(right) / (asked.examples * asked.pairs)
        return {"accuracy": mean(shares.values())} | shares

    def _parts(self, size: Sizes, source: torch.Generator) -> Iterator[Batch]:
        """Yields batches of examples of one size, each of at most PART tokens and of one example at least."""
        at_once = max(1, PART // size.length)
        for first in range(0, size.examples, at_once):
            count = min(at_once, size.examples - first)
            made = make_examples(size, count, self.config.vocabulary, self.config.empty, source)
            yield made.to(self.device)


def _answers(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the logits [n,V] at the queries of a batch, and their labels [n]."""
    asked = batch.y != IGNORE
    vectors = model.stack(model.embedding(batch.x))[asked]
    return model.logits(vectors[:, None])[:, 0].float(), batch.y[asked]
