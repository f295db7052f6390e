"""Recording what a model attends to: regard's own models, with any mechanism, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.errors import OptionError
from regard.generate import Settings
from regard.lens.recording.hub_models import described as described_foreign
from regard.lens.recording.hub_models import record_foreign
from regard.lens.recording.regard_models import Gradient, described, record_regard
from regard.lens.trace.trace import Card, Recording, Trace
from regard.models import Model

Text = str | Sequence[int] | Tensor | Mapping[str, Any]


def record(
    model: Any,
    text: Text,
    text_b: Text | None = None,
    *,
    tokenizer: Any = None,
    target: str | Sequence[int] | None = None,
    generate: int | Mapping[str, Any] | None = None,
    gradient: Gradient = False,
    card: Card | None = None,
) -> Trace:
    """What a model attends to in a text, or in two to be compared.

    `model` is one of regard's or one of Hugging Face's `transformers`; `text` is a text, token ids, or for the latter a
    dict of ready-made inputs, such as an image. An encoder-decoder reads `text` and is given `target`; without one, its
    decoder reads what it writes itself, greedily, and a warning says so. `generate` lets the model go on by so many
    tokens, or as settings say, and records every step. `gradient` also records the gradient of the loss with respect to
    the weights; a function of the model's output takes the place of its loss. The loss is that of the next token, of
    generated text alone where there is some; a masked language model is asked for each token in turn, masked.
    """
    given = [(name, x) for name, x in (("text", text), ("text b", text_b)) if x is not None]
    recordings: list[Recording] = []
    if isinstance(model, Model):
        card = card or described(model)
        for name, x in given:
            recordings.append(_regard(model, x, tokenizer, target, generate, gradient, name, card))
        return Trace(recordings)
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise OptionError(
            f"cannot record a {type(model).__name__}: expected a model of regard's, or of Hugging Face's transformers"
        )
    settings = {"max_new_tokens": generate} if isinstance(generate, int) else generate
    asked: dict[str, Any] = {"tokenizer": tokenizer, "target": target, "generate": settings, "gradient": gradient}
    card = card or described_foreign(model)
    for name, x in given:
        recordings.append(record_foreign(model, x, name=name, card=card, **asked))
    return Trace(recordings)


def _regard(
    model: Model[Any],
    text: Text,
    tokenizer: Any,
    target: str | Sequence[int] | None,
    generate: int | Mapping[str, Any] | None,
    gradient: Gradient,
    name: str,
    card: Card,
) -> Recording:
    tokenizer = tokenizer or model.tokenizer

    def ids(x: Text) -> list[int]:
        if isinstance(x, str):
            if tokenizer is None:
                raise OptionError("text needs a tokenizer: set model.tokenizer, or give token ids instead of text")
            return list(tokenizer.encode(x))
        if isinstance(x, Mapping):
            raise OptionError("one of regard's models reads text or token ids, no dict of inputs")
        return [int(i) for i in (x.reshape(-1) if isinstance(x, Tensor) else x)]

    settings = None
    if generate is not None:
        settings = Settings(max_tokens=generate) if isinstance(generate, int) else Settings().but(**generate)
    return record_regard(
        model,
        ids(text),
        tokenizer=tokenizer,
        text=text if isinstance(text, str) else None,
        target=None if target is None else ids(target),
        generate=settings,
        gradient=gradient,
        name=name,
        card=card,
    )
