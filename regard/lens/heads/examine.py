"""Examining the heads of a model on texts: labels, redundant pairs, and means per layer."""

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
from regard.lens.models import RecordableModel, Sample
from regard.lens.recording.regard_models import OwnTargetWarning
from regard.lens.trace.trace import Recording
from regard.models import Model

REPEATED_SEQUENCES = 8  # number of random sequences in which every token occurs twice
REPEATED_LENGTH = 24  # length of the part that each of them repeats
Progress = Callable[[str, int, int], None]  # called with the phase, the index of a text, and the number of texts


def default_texts() -> list[str]:
    """Returns short texts with repeated words, names, pronouns and punctuation."""
    return (resources.files("regard.lens.heads") / "texts.txt").read_text("utf-8").splitlines()


def default_labels(recordable: RecordableModel, seed: int = 0) -> list[dict[str, Any]] | None:
    """Returns the labels of all heads, measured on regard's default texts, in the form of `Recording.labels`.

    Returns None if the model does not read text, and None with a warning if it cannot read these texts.
    """
    if not recordable.reads_text:
        return None
    try:
        with warnings.catch_warnings():
            # A warning would seem to be about the reader's text, whose target may well have been given.
            warnings.simplefilter("ignore", OwnTargetWarning)
            labels: list[dict[str, Any]] = examine(recordable, None, seed)[0]["heads"]
    except OptionError as error:  # for example, characters that are not in a small vocabulary
        warnings.warn(f"no labels: {error}", stacklevel=2)
        return None
    return labels


def examine(
    recordable: RecordableModel,
    texts: Sequence[str | Sample] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Recording]]:
    """Returns the results of `summary` (labels, redundant pairs, means per layer), and the recordings of the texts."""
    labels, recordings = label_model(recordable, texts, seed, progress)
    return summary(recordable, recordings, labels), recordings


def label_model(
    recordable: RecordableModel,
    texts: Sequence[str | Sample] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[list[HeadLabel], list[Recording]]:
    """Returns the labels of all heads of a model on some texts, and the recordings of the texts."""
    if not recordable.reads_text:
        raise OptionError(
            f"{recordable.card.name} reads no text but {recordable.model.main_input_name}, and labels are about texts; "
            "see its heads with `regard view`"
        )
    progress = progress or (lambda what, n, of: None)
    chosen: Sequence[str | Sample] = default_texts() if texts is None else texts
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
    for n, sample in enumerate(repeated_samples(recordable, seed)):
        progress("repeating", n, REPEATED_SEQUENCES)
        repeats.append(recordable.record_one(sample))
    progress("scoring", 0, 1)
    return label_heads(recordings, repeats, seed), recordings


def summary(
    recordable: RecordableModel, recordings: Sequence[Recording], labels: Sequence[HeadLabel]
) -> dict[str, Any]:
    """Returns the results about all heads as plain numbers, as `regard heads --json` prints them."""
    specialised = [x for x in labels if x.label != MIXED]
    return {
        "model": recordable.card.as_dict(),
        "texts": len(recordings),
        "tokens": sum(len(r.sequences[0]) for r in recordings),
        "heads": [label.as_dict() for label in labels],
        "counts": dict(Counter(x.label for x in labels).most_common()),
        "specialised": len(specialised) / len(labels) if labels else 0.0,
        "redundant": redundant_pairs(recordings),
        "layers": layer_means(recordings),
    }


def layer_means(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns per-layer means over heads and texts: distance, entropy, weight on the first token, largest weight."""
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
    """Returns sequences of token ids to measure induction: a random part, and the same part again.

    Returns [] if the model does not read tokens, or if its context or its vocabulary is too small.
    """
    if not recordable.reads_text:
        return []
    size, special = _vocabulary(recordable)
    usable = torch.tensor([i for i in range(min(size, 50_000)) if i not in special])
    length = REPEATED_LENGTH
    if recordable.limit is not None:
        length = min(REPEATED_LENGTH, recordable.limit // 2 - 1)
    if length < 4 or len(usable) < 8:
        return []
    draw = torch.Generator().manual_seed(seed)
    parts = [usable[torch.randint(len(usable), (length,), generator=draw)].tolist() for _ in range(REPEATED_SEQUENCES)]
    return [ids + ids for ids in parts]


def repeated_samples(recordable: RecordableModel, seed: int = 0) -> list[Sample]:
    """Returns the sequences of `repeated_tokens` as samples; encoder and decoder, if there are two, get different ones.

    So the decoder's text repeats itself, and is no copy of the encoder's.
    """
    sources = repeated_tokens(recordable, seed)
    if not recordable.has_decoder_of_its_own:
        return [Sample(ids) for ids in sources]
    targets = repeated_tokens(recordable, seed + 1)
    return [Sample(ids, target=target) for ids, target in zip(sources, targets, strict=True)]


def _vocabulary(recordable: RecordableModel) -> tuple[int, set[int | None]]:
    """Returns the vocabulary size of a model, and the ids of its special tokens."""
    model = recordable.model
    tokenizer = recordable.tokenizer
    if not isinstance(model, Model):
        return int(model.config.get_text_config().vocab_size), set(getattr(tokenizer, "all_special_ids", ()))
    size = int(model.embedding.num_embeddings)  # type: ignore[union-attr, arg-type]
    if tokenizer is None:
        return size, set()
    return min(size, tokenizer.size), {tokenizer.id(name) for name in tokenizer.special}


def _record(recordable: RecordableModel, text: str | Sample, strict: bool) -> Recording | None:
    """Records a text.

    If not `strict`, a text that is too long is cut to the model's limit, if that is known, and None is returned for a
    text that the tokenizer cannot encode.
    """
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
