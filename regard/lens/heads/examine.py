"""All that can be said about the heads of a model from some texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

import torch

from regard.data.tokenizers import TextError
from regard.errors import LengthError, OptionError
from regard.lens.heads.labels import MIXED, HeadLabel, label_heads
from regard.lens.heads.redundancy import redundant
from regard.lens.models import RecordableModel
from regard.lens.trace.trace import Recording
from regard.models import Model

COPIES, PART = 4, 24  # sequences that repeat themselves, and how many tokens they repeat
Told = Callable[[str, int, int], None]


def default_texts() -> list[str]:
    """Short texts with repeated words, names, pronouns and punctuation."""
    return (resources.files("regard.lens.heads") / "texts.txt").read_text("utf-8").splitlines()


def examine(
    subject: RecordableModel, texts: Sequence[str] | None = None, seed: int = 0, told: Told | None = None
) -> tuple[dict[str, Any], list[Recording]]:
    """Labels, the share of specialised heads, redundant pairs, change over layers; and the recordings behind them."""
    told = told or (lambda what, n, of: None)
    given = default_texts() if texts is None else list(texts)
    recordings = []
    for n, text in enumerate(given):
        told("reading", n, len(given))
        made = _recorded(subject, text, strict=texts is not None)
        recordings += [] if made is None else [made]
    if not recordings:
        raise OptionError(
            f"{subject.card.name} can read none of the texts; give others with --texts, in the letters that it knows"
        )
    again = []
    for n, ids in enumerate(repeated(subject, seed)):
        told("repeating", n, COPIES)
        again.append(subject.read(ids))
    told("scoring", 0, 1)
    labels = label_heads(recordings, again, seed)
    return summary(subject, recordings, labels), recordings


def summary(subject: RecordableModel, recordings: Sequence[Recording], labels: Sequence[HeadLabel]) -> dict[str, Any]:
    """Plain numbers about labelled heads."""
    special = [x for x in labels if x.label != MIXED]
    return {
        "model": subject.card.as_dict(),
        "texts": len(recordings),
        "tokens": sum(len(r.sequences[0]) for r in recordings),
        "heads": [label.as_dict() for label in labels],
        "counts": dict(Counter(x.label for x in labels).most_common()),
        "specialised": len(special) / len(labels) if labels else 0.0,
        "redundant": redundant(recordings),
        "layers": layers(recordings),
    }


def layers(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Means over the heads and texts of each layer: how far, how evenly, and how much at the first token it looks."""
    found = []
    attended = [(a.side, a.layer, a.figures) for r in recordings for a in r.attentions if a.kind == "self"]
    key = sorted(attended, key=lambda x: (x[0] != "encoder", x[1]))
    for (side, layer), group in groupby(key, key=lambda x: (x[0], x[1])):
        figures = [x[2] for x in group]
        means = {}
        for name in ("distance", "entropy", "first", "peak"):
            values = [v for f in figures for v in f[name] or ()]
            means[name] = round(sum(values) / len(values), 5) if values else None
        found.append({"side": side, "layer": layer, **means})
    return found


def repeated(subject: RecordableModel, seed: int = 0) -> list[list[int]]:
    """Random tokens, and the same again: what an induction head is for. None where the model reads no tokens."""
    if not subject.reads_text:
        return []
    model, tokenizer = subject.model, subject.tokenizer
    if isinstance(model, Model):
        many = int(model.embedding.num_embeddings)  # type: ignore[union-attr, arg-type]
        special = set() if tokenizer is None else {tokenizer.id(s) for s in tokenizer.special}
        many = many if tokenizer is None else min(many, tokenizer.size)
    else:
        many = int(model.config.get_text_config().vocab_size)
        special = set(getattr(tokenizer, "all_special_ids", ()))
    usable = torch.tensor([i for i in range(min(many, 50_000)) if i not in special])
    part = PART if subject.limit is None else min(PART, subject.limit // 2 - 1)
    if part < 4 or len(usable) < 8:
        return []
    draw = torch.Generator().manual_seed(seed)
    parts = [usable[torch.randint(len(usable), (part,), generator=draw)].tolist() for _ in range(COPIES)]
    return [ids + ids for ids in parts]


def _recorded(subject: RecordableModel, text: str, strict: bool) -> Recording | None:
    """A text that was given must be readable; those that regard brings along are cut to fit, or left out."""
    try:
        return subject.read(text)
    except TextError:
        if strict:
            raise
        return None
    except LengthError:
        if strict or subject.limit is None:
            raise
        return subject.read(subject.ids(text)[: subject.limit])
