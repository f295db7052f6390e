"""The likelihood of a text under a language model: loss, perplexity and bits, of the whole and token by token.

A text longer than the model's context is read in windows that overlap by half, and each token is scored once, in the
first window that holds it: so every token but those of the first half window has at least half a window before it. The
first token has nothing before it and is not scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.files import DataError
from regard.data.tokenizers import Bytes
from regard.errors import OptionError
from regard.lens.models import RecordableModel
from regard.models import Decoder, Model

WINDOW = 1024  # tokens that are read at once where a model has no limit of its own
_NUMBERS = 1 << 26  # logits held at once


@dataclass(frozen=True)
class JudgedToken:
    """A token of a text: its loss, its probability, its rank among all tokens, and the likeliest token in its place.

    `loss` is −ln p, `rank` 1 where no token was likelier. All but the text are None for the first token.
    """

    text: str
    loss: float | None = None
    probability: float | None = None
    rank: int | None = None
    likeliest: str | None = None


@dataclass(frozen=True)
class Likelihood:
    """The losses of a text under a model. `characters` and `bytes` are those of the tokens that were scored."""

    tokens: tuple[JudgedToken, ...]
    characters: int
    bytes: int

    @property
    def losses(self) -> list[float]:
        """The losses of the tokens that were judged."""
        return [token.loss for token in self.tokens if token.loss is not None]

    @property
    def loss(self) -> float:
        """The mean −ln p of a token."""
        return sum(self.losses) / len(self.losses)

    def summary(self) -> dict[str, float]:
        """Returns the numbers of the whole text by name; a perplexity too large for a float is infinite."""
        bits = sum(self.losses) / log(2)
        perplexity = float("inf")
        if self.loss < 700:
            perplexity = exp(self.loss)
        return {
            "tokens": len(self.losses),
            "loss": self.loss,
            "perplexity": perplexity,
            "bits_per_token": bits / len(self.losses),
            "bits_per_character": bits / max(1, self.characters),
            "bits_per_byte": bits / max(1, self.bytes),
        }


def judge_text(opened: RecordableModel, text: str, *, with_tokens: bool = False) -> Likelihood:
    """Returns the losses of a text under a language model of regard or of transformers.

    With `with_tokens` each token also has its probability, its rank and the likeliest token in its place.
    """
    read = logits_of(opened)
    ids = opened.ids(text)
    decode = (opened.tokenizer or Bytes()).decode  # a random model without a tokenizer reads bytes
    if len(ids) < 2:
        raise DataError(f"a text of {len(ids)} tokens; expected at least 2: the first has nothing before it")
    window = min(opened.limit or WINDOW, len(ids))
    if window < 2:
        raise OptionError(f"{opened.card.name} reads {window} token at a time; expected at least 2")
    device = next(opened.model.parameters()).device
    tokens = [JudgedToken(decode(ids[:1]))]
    for start, first in _windows(len(ids), window):
        row = torch.tensor(ids[start : start + window], device=device)
        with torch.inference_mode():
            logits = read(row[None, :-1])[0, first - start - 1 :]
            tokens += _judge(logits, row[first - start :], decode, with_tokens)
    judged = decode(ids[1:])
    return Likelihood(tuple(tokens), len(judged), len(judged.encode()))


def logits_of(opened: RecordableModel) -> Callable[[Int[Tensor, "B T"]], Float[Tensor, "B T V"]]:
    """Returns the function from token ids to the logits of the next token, or raises for another kind of model."""
    model: Any = opened.model.eval()
    if isinstance(model, Decoder):
        return lambda ids: model(ids)
    predicts = not isinstance(model, Model) and model.can_generate() and not model.config.is_encoder_decoder
    if not predicts:
        raise OptionError(
            f"{opened.card.name} is a {type(model).__name__}, which does not predict the next token of a text; "
            "expected a language model such as GPT-2"
        )
    return lambda ids: model(input_ids=ids).logits


def _windows(n: int, window: int) -> list[tuple[int, int]]:
    """Returns where each window starts, and the first token that is judged in it."""
    made = [(0, 1)]
    step = max(1, window // 2)
    while made[-1][0] + window < n:
        start = min(made[-1][0] + step, n - window)
        made.append((start, made[-1][0] + window))
    return made


def _judge(
    logits: Float[Tensor, "T V"], targets: Int[Tensor, " T"], decode: Callable[[Sequence[int]], str], with_tokens: bool
) -> list[JudgedToken]:
    """Returns the tokens of one window, judged by the logits before each."""
    judged = []
    rows = max(1, _NUMBERS // logits.shape[1])
    for part, wanted in zip(logits.split(rows), targets.split(rows), strict=True):
        logp = part.double().log_softmax(-1)
        chosen = logp.gather(1, wanted[:, None])
        losses = (-chosen[:, 0]).tolist()
        if not with_tokens:
            judged += [JudgedToken("", loss) for loss in losses]
            continue
        ranks = ((logp > chosen).sum(1) + 1).tolist()
        best = logp.argmax(1).tolist()
        for token, loss, rank, likeliest in zip(wanted.tolist(), losses, ranks, best, strict=True):
            judged.append(JudgedToken(decode([token]), loss, exp(-loss), rank, decode([likeliest])))
    return judged
