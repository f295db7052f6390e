"""The first batch of a training, as ids and as text: the model's inputs, its targets, and the padding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import IGNORE, Batch
from regard.data.files import write_lines
from regard.data.prose import python_prose
from regard.data.tokenizers import Tokenizer
from regard.train.recipe import Recipe
from regard.train.tasks.base import TASKS, Task
from regard.train.tasks.lm import LMData
from regard.train.tasks.repeats import RepeatsData

OWN_TEXT = "no data.text is given: this is the prose of Python's own documentation"
READS_OWN_TEXT = "no data.text is given: it reads the prose of Python's own documentation"
_READ = {
    "source": "ids that the encoder reads",
    "source_visible": "True at tokens, False at padding: the keys that the encoder and cross-attention may see",
    "x": "ids that the model reads; a place sees itself and those before it (causal)",
    "y": f"targets: what comes behind each place of x; {IGNORE} where there is no loss",
    "visible": "True at tokens of x, False at padding",
}
_SHIFTED = "ids that the decoder reads: the target moved one place on, behind its first token; causal"


@dataclass(frozen=True)
class TokenRow:
    """One row of a tensor of ids: the ids, their texts, and which of them are no padding, or are targets."""

    ids: list[int]
    tokens: list[str]
    counted: list[bool]

    @property
    def text(self) -> str:
        """The tokens that count, concatenated."""
        return "".join(token for token, counted in zip(self.tokens, self.counted, strict=True) if counted)


@dataclass(frozen=True)
class FirstBatch:
    """A batch: its tensors as (name, what it holds, shape, dtype), and its rows.

    `source` is empty for a model that reads one sequence. `notes` are remarks and warnings about the data.
    """

    tensors: list[tuple[str, str, list[int], str]]
    source: list[TokenRow]
    x: list[TokenRow]
    y: list[TokenRow]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Returns the batch as a dict for JSON: its tensors, and for each row its ids, tokens and mask."""
        rows = []
        for n in range(len(self.x)):
            row = {"reads": vars(self.x[n]), "targets": vars(self.y[n])}
            if self.source:
                row = {"encoder": vars(self.source[n]), "decoder": row["reads"], "targets": row["targets"]}
            rows.append(row)
        tensors = [dict(zip(("name", "what", "shape", "dtype"), tensor, strict=True)) for tensor in self.tensors]
        return {"tensors": tensors, "rows": rows, "notes": self.notes}


def reads_own_text(recipe: Recipe) -> bool:
    """Returns whether a recipe of a language model names no text, and so reads Python's own documentation."""
    data = recipe.data
    if not isinstance(data, LMData) or isinstance(data, RepeatsData):  # which has documents of its own
        return False
    return not data.text and not data.tokens


def first_batch(recipe: Recipe, size: int) -> FirstBatch:
    """Returns the batch of the first step of a recipe, with `size` rows.

    Where a recipe reads a text and none is given, it reads Python's own documentation.
    """
    notes = []
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data: Any = recipe.data
        if reads_own_text(recipe):
            path = Path(folder) / "prose.txt"
            write_lines(path, python_prose())
            data = data.but(text=str(path))
            notes.append(OWN_TEXT)
        task = TASKS[recipe.task](data, recipe.train.seed, torch.device("cpu"), Path(folder), None)
        batch = task.batch(0, size)
    notes += [str(warning.message).replace(f"{folder}/", "") for warning in caught]
    return _describe(task, batch, notes)


def _describe(task: Task, batch: Batch, notes: list[str]) -> FirstBatch:
    """Returns a batch with the meanings of its tensors and the text of its rows."""
    meaning = dict(_READ)
    if batch.source is not None:
        meaning["x"] = _SHIFTED
    tensors = [
        (name, meaning[name], list(x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in batch._asdict().items()
        if x is not None
    ]
    tensors.sort(key=lambda tensor: list(meaning).index(tensor[0]))
    source: list[TokenRow] = []
    if batch.source is not None:
        source = _rows(task.tokenizer, batch.source, batch.source_visible)
    x = _rows(task.tokenizer, batch.x, batch.visible)
    y = _rows(task.tokenizer, batch.y, batch.y != IGNORE)
    return FirstBatch(tensors, source, x, y, notes)


def _rows(tokenizer: Tokenizer, ids: Tensor, counted: Tensor | None) -> list[TokenRow]:
    """Returns each row of ids [B,T] with the text of its tokens, which is "" for IGNORE."""
    if counted is None:
        counted = torch.ones_like(ids, dtype=torch.bool)
    return [
        TokenRow(row, _decode_each(tokenizer, row), which)
        for row, which in zip(ids.tolist(), counted.tolist(), strict=True)
    ]


def _decode_each(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return ["" if token == IGNORE else tokenizer.decode([token]) for token in ids]
