"""How a converted model compares with the one it came from: loss, answers, heads, state, speed, and a page to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.convert.distil import counted, probe_loss
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

LENGTHS = (128, 1024, 8192)  # tokens at which a state is weighed
ROWS, TOKENS = 8, 64  # sequences that are continued at a time, and by how many tokens
ROUNDS = 7
SHOWN = 96  # tokens of the text on the lens's page


def measured(task: Task, probe: Sequence[Batch], teacher: Model[Any], model: Model[Any]) -> dict[str, Any]:
    """Loss and perplexity on text that is not learned from; of an encoder, how far its vectors have moved."""
    if isinstance(model, Encoder):
        assert isinstance(teacher, Encoder)
        return {"change": _change(probe, teacher, model)}
    loss = probe_loss(task, model, probe)
    return {"loss": loss, "perplexity": exp(min(loss, 700.0))}


@torch.no_grad()
def _change(probe: Sequence[Batch], teacher: Encoder, model: Encoder) -> float:
    """‖y' − y‖ / ‖y‖ of the last vectors."""
    sums = torch.zeros(2, dtype=torch.float64)
    for part in probe:
        seen = counted(part)
        found, wanted = (m.vectors(part.x, part.visible)[seen].double() for m in (model, teacher))
        sums += torch.stack([(found - wanted).square().sum(), wanted.square().sum()]).cpu()
    return float((sums[0] / sums[1]).sqrt())


def answered(config: KnowledgeData, folder: Path, model: Model[Any]) -> dict[str, Any]:
    """Right answers to the questions of dev and test, as written token by token."""
    assert isinstance(model, GPT)
    found = {}
    files = data_files(config, folder)
    for name, path in {"dev": files.dev, "test": files.test}.items():
        questions = None if path is None else read_questions(path)
        if questions and all(q.answer is not None for q in questions):
            found[name] = score([a.text for a in answer(model, questions)], questions)
    return found


def states(before: Model[Any], after: Model[Any]) -> list[dict[str, Any]]:
    """Bytes of the state of one sequence after so many tokens, and by how many it grows with a token."""
    if isinstance(before, Encoder):
        return []
    limit = min((m.limit for m in (before, after) if isinstance(m, GPT) and m.limit is not None), default=LENGTHS[-1])
    lengths = [n for n in LENGTHS if n <= limit] or [limit]
    rows = []
    for n in lengths:
        row: dict[str, Any] = {"tokens": n}
        for name, model in (("before", before), ("after", after)):
            one, more = (model.summary(T=T).total.state for T in (n, n + 1))
            row[name] = {"bytes": one, "each": more - one}
        rows.append(row)
    return rows


def speeds(before: Model[Any], after: Model[Any], probe: Sequence[Batch]) -> dict[str, Any] | None:
    """Tokens a second of generating, the two in turn: each round's, and the ratio's median, least and most."""
    if not isinstance(before, GPT) or not isinstance(after, GPT):
        return None
    limit = min((m.limit for m in (before, after) if m.limit is not None), default=1 << 30)
    length = max(1, min(probe[0].x.shape[1], limit) // 4)
    few = min(TOKENS, limit - length)
    rows = torch.cat([part.x[:, :length] for part in probe if part.x.shape[1] >= length])
    prompts = [row.tolist() for row in rows[:ROWS]]
    if few < 1:
        return None
    runs = [lambda m=m: generate(m, prompts, max_tokens=few) for m in (before, after)]
    times = time_interleaved(runs, before.device, seconds=1.0, rounds=ROUNDS)
    rates = [[len(prompts) * few / t for t in one] for one in times]
    ratios = [b / a for a, b in zip(*rates, strict=True)]
    return {
        "sequences": len(prompts),
        "prompt": length,
        "tokens": few,
        "before": rates[0],
        "after": rates[1],
        "ratio": {"median": median(ratios), "low": min(ratios), "high": max(ratios)},
    }


def lens_page(
    path: Path, pair: Mapping[str, Model[Any]], probe: Sequence[Batch], errors: Mapping[int, Sequence[float]]
) -> None:
    """Original and converted model side by side over one text; each converted head says how far off it is."""
    longest = max(probe, key=lambda part: part.x.shape[1])
    row = longest.x[0][counted(longest)[0]][:SHOWN]
    traces = [record(model, row, card=regard_card(model, name, True)) for name, model in pair.items()]
    labels = [
        {"attention": a, "side": "", "layer": layer, "head": head, "label": "error", "effect": error}
        | {"low": None, "high": None, "also": [], "scores": {}}
        for a, (layer, heads) in enumerate(errors.items())
        for head, error in enumerate(heads)
    ]
    traces[-1].recordings[0].labels = labels
    write_page(Trace.joined(*traces), path)
