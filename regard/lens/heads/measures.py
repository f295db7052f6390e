"""Measures of a model while its heads are removed: a loss, the change of its final hidden states, or accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from regard.data.draws import Draws
from regard.data.reviews import ReviewsConfig, reviews
from regard.data.sentences import CLASSES, Sentence
from regard.data.tokenizers import TextError
from regard.errors import OptionError
from regard.lens.heads.ablation import added_cost, make_run
from regard.lens.heads.examine import default_texts
from regard.lens.models import RecordableModel, Sample
from regard.lens.recording.hub_inputs import taken_inputs
from regard.lens.recording.maps import evaluation_mode

MAX_TEXTS = 4  # the largest number of texts in each part: the model reads them again for every removal
MAX_SENTENCES = 64  # likewise, of sentences with a label
TOLERANCES = {"loss": 0.05, "accuracy": 0.02, "change": 0.25}  # relative, absolute, relative
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class Examples:
    """Examples, with a function that measures the model on them.

    `run()` returns the measures by name: {"loss"}, {"change"} or, of a classifier, {"loss", "accuracy"}. `measure` is
    the one that is shown, `cost` the one that decides which head is removed next. `first` is a text or its ids,
    `source` says where the examples come from, and `chance` is the accuracy of the most frequent label.
    """

    size: int
    first: Any
    unit: str
    measure: str
    run: Callable[[], dict[str, float]]
    source: str = ""
    chance: float | None = None

    def __len__(self) -> int:
        return self.size

    @property
    def cost(self) -> str:
        """The name of the measure by which heads are ranked; smaller is better."""
        return "loss" if self.measure == "accuracy" else self.measure

    @property
    def tolerance(self) -> float:
        """How much worse the model may become: relative for a loss or a change, absolute for accuracy."""
        return TOLERANCES[self.measure]

    def fewest_heads(self, curve: Sequence[Mapping[str, float]]) -> int:
        """Returns the smallest number of heads left up to which every point of a curve is within the tolerance."""
        whole = curve[0][self.measure]
        fewest = curve[0]["left"]
        for row in curve:
            if self._loses(row[self.measure], whole) > self.tolerance:
                break
            fewest = row["left"]
        return int(fewest)

    def _loses(self, value: float, whole: float) -> float:
        """Returns how much worse a value is than that of the whole model, in the unit of the tolerance."""
        if self.measure == "accuracy":
            return whole - value
        if self.measure == "loss":
            return (value - whole) / whole
        return value


def is_classifier(recordable: RecordableModel) -> bool:
    """Returns whether a model gives one label to a text: transformers' classes for that say so by their names."""
    return type(recordable.model).__name__.endswith(_CLASSIFIER)


def split_texts(recordable: RecordableModel, texts: Sequence[str | Sample] | None) -> tuple[Examples, Examples]:
    """Returns texts to choose an order on, and other texts to measure it on; they are regard's own if none are given.

    A language model is measured by its loss, another model by the change of its final hidden states.
    """
    if texts is None:
        chosen: Sequence[Any] = encode_default_texts(recordable, 2 * MAX_TEXTS)
        source = "the texts that come with regard"
    else:
        chosen = texts[: 2 * MAX_TEXTS]
        source = "your texts"
    if len(chosen) < 2:
        raise OptionError(
            f"--prune needs 2 texts, has {len(chosen)}: the order is chosen on some, the curve is measured on others"
        )
    first, second = (_measure_texts(recordable, chosen[n::2], source) for n in (0, 1))
    return first, second


def encode_default_texts(recordable: RecordableModel, most: int) -> list[list[int]]:
    """Returns the token ids of at most `most` default texts that the tokenizer can encode, cut to the model's limit."""
    found: list[list[int]] = []
    for text in default_texts():
        try:
            ids = recordable.ids(text)
        except TextError:
            continue
        if len(found) < most:
            found.append(ids[: recordable.limit])
    return found


@torch.no_grad()
def _measure_texts(recordable: RecordableModel, texts: Sequence[Any], source: str) -> Examples:
    """Returns texts as examples: measured by the loss of a language model, else by the change of hidden states."""
    runs = [make_run(recordable, text) for text in texts]
    with evaluation_mode(recordable.model):
        whole = [run() for run in runs]
    is_loss = whole[0].dim() == 0
    measure = "loss" if is_loss else "change"

    @torch.no_grad()
    def run() -> dict[str, float]:
        if is_loss:
            return {measure: sum(float(run()) for run in runs) / len(runs)}
        return {measure: sum(added_cost(run(), before) for run, before in zip(runs, whole, strict=True)) / len(runs)}

    return Examples(len(texts), texts[0], "texts", measure, run, source)


def split_sentences(recordable: RecordableModel, sentences: Sequence[Sentence] | None) -> tuple[Examples, Examples]:
    """Returns labelled sentences to choose an order on, and others to measure it on; generated ones if none are given.

    They are measured by the accuracy of a classifier and by its loss.
    """
    source = "your sentences"
    if sentences is None:
        sentences = reviews(ReviewsConfig()).test
        source = "generated sentences"
    labels = int(recordable.model.config.num_labels)
    if labels != len(CLASSES):
        raise OptionError(f"{recordable.card.name} has {labels} classes; sentences with a label are of two, 0 and 1")
    if len(sentences) < 2:
        raise OptionError(
            f"--prune needs 2 sentences, has {len(sentences)}: the order is chosen on some, measured on others"
        )
    drawn = list(sentences)
    Draws(0, "pruning").shuffle(drawn)  # a file may have all of one label first
    first, second = (_measure_sentences(recordable, drawn[n::2][:MAX_SENTENCES], source) for n in (0, 1))
    return first, second


def _measure_sentences(recordable: RecordableModel, sentences: Sequence[Sentence], source: str) -> Examples:
    """Returns sentences as examples with the accuracy and the loss of a classifier."""
    model = recordable.model
    texts = [sentence.text for sentence in sentences]
    rows = recordable.tokenizer(texts, padding=True, truncation=True, max_length=recordable.limit, return_tensors="pt")
    inputs = taken_inputs(model, rows.to(model.device))
    labels = torch.tensor([sentence.label for sentence in sentences], device=model.device)
    most = Counter(labels.tolist()).most_common(1)[0][1]

    @torch.no_grad()
    def run() -> dict[str, float]:
        logits = model(**inputs).logits.float()
        right = (logits.argmax(-1) == labels).double().mean()
        return {"loss": float(functional.cross_entropy(logits, labels)), "accuracy": float(right)}

    return Examples(len(texts), texts[0], "sentences", "accuracy", run, source, most / len(texts))


def knows_reviews(recordable: RecordableModel) -> bool:
    """Returns whether a classifier has the two classes of regard's generated sentences."""
    names = getattr(recordable.model.config, "id2label", None) or {}
    return tuple(str(names[n]).lower() for n in sorted(names)) == CLASSES
