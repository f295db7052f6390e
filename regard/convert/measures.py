"""Comparing a converted model with the original: loss, answers, heads, state, speed, and a page of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.convert.distil import probe_loss, scored_positions
from regard.cost.timing import time_interleaved
from regard.data.batch import Batch
from regard.data.questions import read_questions
from regard.generate import generate
from regard.lab.knowledge.answers import answer, score
from regard.lens import Trace, record
from regard.lens.pages.page import write_page
from regard.lens.recording.regard_models import regard_card
from regard.models import GPT, Encoder, Model
from regard.train.tasks.base import Task
from regard.train.tasks.corruption import KnowledgeData, data_files

STATE_LENGTHS = (128, 1024, 8192)  # numbers of tokens for which the bytes of a state are counted
TIMED_SEQUENCES = 8  # sequences that are continued together when generation is timed
TIMED_TOKENS = 64  # tokens generated for each
ROUNDS = 7
LENS_TOKENS = 96  # tokens of the text on the lens's page
MAX_EXPONENT = 700.0  # e^709 is the most that a float holds


def measure_loss(task: Task, probe: Sequence[Batch], teacher: Model[Any], model: Model[Any]) -> dict[str, Any]:
    """Returns loss and perplexity on held-out text; for an encoder, the relative change of its vectors."""
    if isinstance(model, Encoder):
        assert isinstance(teacher, Encoder)
        return {"change": _vector_change(probe, teacher, model)}
    loss = probe_loss(task, model, probe)
    return {"loss": loss, "perplexity": exp(min(loss, MAX_EXPONENT))}


@torch.no_grad()
def _vector_change(probe: Sequence[Batch], teacher: Encoder, model: Encoder) -> float:
    """Returns ‖y' − y‖ / ‖y‖ of the last layer's vectors."""
    sums = torch.zeros(2, dtype=torch.float64)
    for part in probe:
        scored = scored_positions(part)
        found = model.vectors(part.x, part.visible)[scored].double()
        wanted = teacher.vectors(part.x, part.visible)[scored].double()
        sums += torch.stack([(found - wanted).square().sum(), wanted.square().sum()]).cpu()
    return float((sums[0] / sums[1]).sqrt())


def score_answers(config: KnowledgeData, folder: Path, model: Model[Any]) -> dict[str, Any]:
    """Returns the scores of a model's answers, written token by token, to the questions of dev and test."""
    assert isinstance(model, GPT)
    scores = {}
    files = data_files(config, folder)
    for name, path in {"dev": files.dev, "test": files.test}.items():
        if path is None:
            continue
        questions = read_questions(path)
        if questions and all(question.answer is not None for question in questions):
            scores[name] = score([given.text for given in answer(model, questions)], questions)
    return scores


def measure_states(before: Model[Any], after: Model[Any]) -> list[dict[str, Any]]:
    """Returns a row for each length with the bytes of one sequence's state, before and after, and its growth a
    token."""
    if isinstance(before, Encoder):
        return []
    limit = _shortest_limit(before, after, default=STATE_LENGTHS[-1])
    rows = []
    for length in [n for n in STATE_LENGTHS if n <= limit] or [limit]:
        row: dict[str, Any] = {"tokens": length}
        for name, model in (("before", before), ("after", after)):
            size = model.summary(T=length).total.state
            row[name] = {"bytes": size, "each": model.summary(T=length + 1).total.state - size}
        rows.append(row)
    return rows


def measure_speed(before: Model[Any], after: Model[Any], probe: Sequence[Batch]) -> dict[str, Any] | None:
    """Returns tokens a second of generation in each round, and median, least and largest ratio of the two models.

    The models take turns, so that a slow moment of the machine affects both. Returns None if they cannot generate.
    """
    if not isinstance(before, GPT) or not isinstance(after, GPT):
        return None
    limit = _shortest_limit(before, after, default=1 << 30)
    # The prompt is a quarter of what fits, so that most of the time is spent on generating.
    length = max(1, min(probe[0].x.shape[1], limit) // 4)
    tokens = min(TIMED_TOKENS, limit - length)
    if tokens < 1:
        return None
    rows = torch.cat([part.x[:, :length] for part in probe if part.x.shape[1] >= length])
    prompts = [row.tolist() for row in rows[:TIMED_SEQUENCES]]
    runs = [lambda m=m: generate(m, prompts, max_tokens=tokens) for m in (before, after)]
    times = time_interleaved(runs, before.device, seconds=1.0, rounds=ROUNDS)
    rates = [[len(prompts) * tokens / seconds for seconds in rounds] for rounds in times]
    ratios = [new / old for old, new in zip(*rates, strict=True)]
    return {
        "sequences": len(prompts),
        "prompt": length,
        "tokens": tokens,
        "before": rates[0],
        "after": rates[1],
        "ratio": {"median": median(ratios), "low": min(ratios), "high": max(ratios)},
    }


def _shortest_limit(*models: Model[Any], default: int) -> int:
    """Returns how many tokens all models can read; the default if none has a limit."""
    limits = [model.limit for model in models if isinstance(model, GPT) and model.limit is not None]
    return min(limits, default=default)


def write_lens_page(
    path: Path, pair: Mapping[str, Model[Any]], probe: Sequence[Batch], errors: Mapping[int, Sequence[float]]
) -> None:
    """Writes a page of the original and the converted model over one text, each converted head with its error."""
    longest = max(probe, key=lambda part: part.x.shape[1])
    row = longest.x[0][scored_positions(longest)[0]][:LENS_TOKENS]
    traces = [record(model, row, card=regard_card(model, name, True)) for name, model in pair.items()]
    labels = [
        {"attention": a, "side": "", "layer": layer, "head": head, "label": "error", "effect": error}
        | {"low": None, "high": None, "also": [], "scores": {}}
        for a, (layer, heads) in enumerate(errors.items())
        for head, error in enumerate(heads)
    ]
    # The converted model is the last of the pair; the original has no errors to show.
    traces[-1].recordings[0].labels = labels
    write_page(Trace.joined(*traces), path)
