"""Everything that is measured of the heads of a model on some texts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

import torch

from regard.data.tokenizers import TextError
from regard.errors import LengthError, OptionError
from regard.lens.heads.labels import MIXED, HeadLabel, label_heads
from regard.lens.heads.redundancy import redundant_pairs
from regard.lens.models import RecordableModel
from regard.lens.trace.trace import Recording
from regard.models import Model

COPIES = 4  # sequences that repeat themselves
PART = 24  # tokens that they repeat
Progress = Callable[[str, int, int], None]  # what is being done, which one, and of how many


def default_texts() -> list[str]:
    """Returns short texts with repeated words, names, pronouns and punctuation."""
    return (resources.files("regard.lens.heads") / "texts.txt").read_text("utf-8").splitlines()


def default_labels(recordable: RecordableModel, seed: int = 0) -> list[dict[str, Any]] | None:
    """Returns what each head does, measured on texts that come with regard, as `Recording.labels` keeps it.

    A model that cannot read these texts gets None, and a warning says why.
    """
    if not recordable.reads_text:
        return None
    try:
        labels: list[dict[str, Any]] = examine(recordable, None, seed)[0]["heads"]
    except OptionError as error:  # such as letters that a small vocabulary lacks
        warnings.warn(f"no labels: {error}", stacklevel=2)
        return None
    return labels


def examine(
    recordable: RecordableModel, texts: Sequence[str] | None = None, seed: int = 0, progress: Progress | None = None
) -> tuple[dict[str, Any], list[Recording]]:
    """Returns labels, the share of specialised heads, redundant pairs and change over layers; and the recordings."""
    progress = progress or (lambda what, n, of: None)
    chosen = default_texts() if texts is None else texts
    recordings = []
    for n, text in enumerate(chosen):
        progress("reading", n, len(chosen))
        recording = _record(recordable, text, strict=texts is not None)
        if recording is not None:
            recordings.append(recording)
    if not recordings:
        raise OptionError(
            f"{recordable.card.name} can read none of the texts; give others with --texts, in the letters that it knows"
        )
    repeats = []
    for n, ids in enumerate(repeated_tokens(recordable, seed)):
        progress("repeating", n, COPIES)
        repeats.append(recordable.record_one(ids))
    progress("scoring", 0, 1)
    labels = label_heads(recordings, repeats, seed)
    return summary(recordable, recordings, labels), recordings


def summary(
    recordable: RecordableModel, recordings: Sequence[Recording], labels: Sequence[HeadLabel]
) -> dict[str, Any]:
    """Returns plain numbers about labelled heads, as `regard heads --json` prints them."""
    special = [x for x in labels if x.label != MIXED]
    return {
        "model": recordable.card.as_dict(),
        "texts": len(recordings),
        "tokens": sum(len(r.sequences[0]) for r in recordings),
        "heads": [label.as_dict() for label in labels],
        "counts": dict(Counter(x.label for x in labels).most_common()),
        "specialised": len(special) / len(labels) if labels else 0.0,
        "redundant": redundant_pairs(recordings),
        "layers": layers(recordings),
    }


def layers(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns means over the heads and texts of each layer: how far, how evenly, and how much at the first token."""
    rows = []
    attentions = [a for recording in recordings for a in recording.attentions if a.kind == "self"]
    attentions.sort(key=lambda a: (a.side != "encoder", a.layer))
    for (side, layer), group in groupby(attentions, key=lambda a: (a.side, a.layer)):
        figures = [attended.figures for attended in group]
        means: dict[str, float | None] = {}
        for name in ("distance", "entropy", "first", "peak"):
            values = [value for figure in figures for value in figure[name] or ()]
            means[name] = round(sum(values) / len(values), 5) if values else None
        rows.append({"side": side, "layer": layer, **means})
    return rows


def repeated_tokens(recordable: RecordableModel, seed: int = 0) -> list[list[int]]:
    """Returns sequences of random tokens that come twice: what an induction head is for.

    There are none where the model reads no tokens, or too few of them.
    """
    if not recordable.reads_text:
        return []
    size, special = _vocabulary(recordable)
    usable = torch.tensor([i for i in range(min(size, 50_000)) if i not in special])
    length = PART
    if recordable.limit is not None:
        length = min(PART, recordable.limit // 2 - 1)
    if length < 4 or len(usable) < 8:
        return []
    draw = torch.Generator().manual_seed(seed)
    parts = [usable[torch.randint(len(usable), (length,), generator=draw)].tolist() for _ in range(COPIES)]
    return [ids + ids for ids in parts]


def _vocabulary(recordable: RecordableModel) -> tuple[int, set[int | None]]:
    """Returns how many tokens a model knows, and the special ones."""
    model = recordable.model
    tokenizer = recordable.tokenizer
    if not isinstance(model, Model):
        return int(model.config.get_text_config().vocab_size), set(getattr(tokenizer, "all_special_ids", ()))
    size = int(model.embedding.num_embeddings)  # type: ignore[union-attr, arg-type]
    if tokenizer is None:
        return size, set()
    return min(size, tokenizer.size), {tokenizer.id(name) for name in tokenizer.special}


def _record(recordable: RecordableModel, text: str, strict: bool) -> Recording | None:
    """Records a text. One that was given must be readable; those that come with regard are cut to fit, or left out."""
    try:
        return recordable.record_one(text)
    except TextError:
        if strict:
            raise
        return None
    except LengthError:
        if strict or recordable.limit is None:
            raise
        return recordable.record_one(recordable.ids(text)[: recordable.limit])
