"""Recording the attention of a model: one of regard's, with any mechanism, or one of Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.devices import explain_memory
from regard.errors import OptionError
from regard.generate import Settings
from regard.lens.recording.hub_models import hub_card, record_hub_model
from regard.lens.recording.predictions import add_predictions
from regard.lens.recording.regard_models import Gradient, record_regard_model, regard_card
from regard.lens.trace.trace import Card, Recording, Trace
from regard.models import Model

Text = str | Sequence[int] | Tensor | Mapping[str, Any]


@explain_memory("recording", "Give a shorter text, generate fewer tokens, or take a smaller model")
def record(
    model: Any,
    text: Text,
    text_b: Text | None = None,
    *,
    pair: str | None = None,
    tokenizer: Any = None,
    target: str | Sequence[int] | None = None,
    generate: int | Mapping[str, Any] | None = None,
    gradient: Gradient = False,
    contributions: bool | None = None,
    card: Card | None = None,
) -> Trace:
    """Records the attention of a model while it reads a text, or two texts; returns a trace with a recording of each.

    model: one of regard's models, or one of Hugging Face's `transformers`.
    text: a text, token ids, or (for a Hugging Face model) a dict of ready-made inputs, such as an image.
    text_b: another text to compare with the first. It is recorded separately; it is not the second text of a pair.
    pair: the second text of a pair, which a Hugging Face model's tokenizer joins to the first, with token types where
        the model has them. With `text_b`, each of the two texts is paired with it.
    target: the text or ids that the decoder of an encoder-decoder is given; not together with `generate`. If there is
        no `target` and no `generate`, the model generates a target greedily, with a warning; if it cannot generate, its
        decoder gets the start token.
    generate: the number of tokens to generate after the text, or a dict of generation settings: the fields of
        `regard.generate.Settings`, or for a Hugging Face model the arguments of its `generate`. Every step is recorded.
    gradient: True to record also the gradient of the loss with respect to the weights. The loss is the next-token
        cross entropy (over generated tokens only, if there are any); for a masked language model or an encoder each
        token is masked in turn (see `losses.py`). Or a function of the model's output, whose result is then the loss.
    contributions: whether to record what heads contribute: the length of each value after the output projection, and
        for a decoder-only language model the next tokens that each layer predicts (logit lens) and what each head adds
        to their logits. None: only for texts of at most 512 tokens, and only if it takes seconds.
    """
    texts = [("text", text)]
    if text_b is not None:
        texts.append(("text b", text_b))
    recordings: list[Recording] = []
    if isinstance(model, Model):
        if pair is not None:
            raise OptionError(f"a {type(model).__name__} of regard's reads one text: leave out the pair")
        card = card or regard_card(model)
        for name, x in texts:
            recordings.append(
                _record_regard(model, x, tokenizer, target, generate, gradient, contributions, name, card)
            )
            add_predictions(recordings[-1], model, tokenizer or model.tokenizer, contributions)
        return Trace(recordings)
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise OptionError(
            f"cannot record a {type(model).__name__}: expected a model of regard's, or of Hugging Face's transformers"
        )
    settings = {"max_new_tokens": generate} if isinstance(generate, int) else generate
    options: dict[str, Any] = {"tokenizer": tokenizer, "target": target, "generate": settings, "gradient": gradient}
    options |= {"pair": pair, "contributions": contributions}
    card = card or hub_card(model)
    for name, x in texts:
        recordings.append(record_hub_model(model, x, name=name, card=card, **options))
        add_predictions(recordings[-1], model, tokenizer, contributions)
    return Trace(recordings)


def _record_regard(
    model: Model[Any],
    text: Text,
    tokenizer: Any,
    target: str | Sequence[int] | None,
    generate: int | Mapping[str, Any] | None,
    gradient: Gradient,
    contributions: bool | None,
    name: str,
    card: Card,
) -> Recording:
    """Records one text with one of regard's models; `tokenizer` defaults to the model's own."""
    tokenizer = tokenizer or model.tokenizer
    ids = _token_ids(text, tokenizer)
    vocabulary = getattr(model.config, "vocabulary", None)
    _check_vocabulary(ids, vocabulary)
    if target is not None:
        target = _token_ids(target, tokenizer)
        _check_vocabulary(target, getattr(model.config, "target_vocabulary", None) or vocabulary)
    settings = None
    if isinstance(generate, int):
        settings = Settings(max_tokens=generate)
    elif generate is not None:
        settings = Settings().but(**generate)
    return record_regard_model(
        model,
        ids,
        tokenizer=tokenizer,
        text=text if isinstance(text, str) else None,
        target=target,
        generate=settings,
        gradient=gradient,
        contributions=contributions,
        name=name,
        card=card,
    )


def _token_ids(text: Text, tokenizer: Any) -> list[int]:
    """Returns the token ids of a text as a list; token ids are returned as a list too."""
    if isinstance(text, str):
        if tokenizer is None:
            raise OptionError("text needs a tokenizer: set model.tokenizer, or give token ids instead of text")
        return list(tokenizer.encode(text))
    if isinstance(text, Mapping):
        raise OptionError("one of regard's models reads text or token ids, no dict of inputs")
    if isinstance(text, Tensor):
        text = text.reshape(-1).tolist()
    return [int(i) for i in text]


def _check_vocabulary(ids: list[int], size: int | None) -> None:
    """Raises OptionError if a token id is outside the vocabulary; on a GPU the embedding would abort the process."""
    if size is None:
        return
    for place, i in enumerate(ids):
        if not 0 <= i < size:
            raise OptionError(
                f"token {i} at position {place}: this model's vocabulary is 0 to {size - 1}. "
                "Is the tokenizer that of the model?"
            )
