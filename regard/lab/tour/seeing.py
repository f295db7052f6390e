"""The head that finds the birthplace: the one without which the answers are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.data.batch import IGNORE, Batch
from regard.data.questions import UNKNOWN, Question, prompt, question_batch, special_id
from regard.lab.knowledge.answers import person
from regard.lab.tour.results import MeasuredHead
from regard.lens.heads.ablation import silenced
from regard.lens.recording.maps import attention_maps, evaluation_mode
from regard.models import Decoder
from regard.train.tasks.questions import score_answers


class AskedRows(NamedTuple):
    """Questions with their answers as rows, and which of their tokens [N,T] belong to the person's name."""

    batch: Batch
    is_name: Bool[Tensor, "N T"]


class HeadSearch(NamedTuple):
    """All heads, the one whose removal costs the most first, and the loss and accuracy of the whole model.

    The loss is that on the questions by which heads are chosen, the accuracy that on the questions that are reported.
    """

    heads: list[MeasuredHead]
    loss: float
    accuracy: float


def ask_rows(model: Decoder[Any], questions: Sequence[Question]) -> AskedRows:
    """Returns questions with their answers as rows on the device of a model."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    longest = max(len(tokenizer.encode(prompt(question) + (question.answer or ""))) for question in questions) + 1
    batch = question_batch(tokenizer, questions, longest).to(model.device)
    is_name = torch.zeros_like(batch.x, dtype=torch.bool)
    for n, question in enumerate(questions):
        name = person(question.text)
        start = len(tokenizer.encode(question.text[: question.text.index(name)]))
        is_name[n, start : start + len(tokenizer.encode(name))] = True
    return AskedRows(batch, is_name)


@torch.no_grad()
def find_head(
    model: Decoder[Any], untrained: Decoder[Any], choose_by: Sequence[Question], report_on: Sequence[Question]
) -> HeadSearch:
    """Removes one head after the other, and sorts heads by how much that raises the loss of answers, largest first.

    Heads are chosen by other questions than those that are reported, so that the reported cost is not biased upwards.
    """
    chosen = ask_rows(model, choose_by).batch
    reported = ask_rows(model, report_on)
    on_name = weight_on_names(model, reported)
    untrained_on_name = weight_on_names(untrained, reported)
    heads = []
    with evaluation_mode(model):
        for layer, shares in enumerate(on_name):
            for head, share in enumerate(shares.tolist()):
                with silenced({model.stack.layers[layer].attention.mechanism: [head]}):
                    loss = _score(model, chosen)["loss"]
                    accuracy = _score(model, reported.batch)["accuracy"]
                before = float(untrained_on_name[layer][head])
                heads.append(MeasuredHead(layer, head, loss, accuracy, share, before))
        heads.sort(key=lambda one: -one.loss)
        return HeadSearch(heads, _score(model, chosen)["loss"], _score(model, reported.batch)["accuracy"])


def _score(model: Decoder[Any], rows: Batch) -> dict[str, float]:
    """Returns the loss and the accuracy of whole answers."""
    assert model.tokenizer is not None
    return score_answers(model, rows, special_id(model.tokenizer, UNKNOWN))


def weight_on_names(model: Decoder[Any], rows: AskedRows) -> list[Float[Tensor, " H"]]:
    """Returns for each layer the mean weight that its heads put on the name while an answer is written."""
    is_answering = rows.batch.y != IGNORE
    shares = []
    for weights in attention_maps(model, rows.batch.x):
        on_name = (weights * rows.is_name[:, None, None, :]).sum(-1)
        shares.append((on_name * is_answering[:, None]).sum((0, 2)) / is_answering.sum())
    return shares
