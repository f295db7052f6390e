"""Generating with the attention of each step: where a model looked while it chose a token.

A step reads what is new, the prompt or the last token, and gives logits and one row of weights for each attention. The
model is the caller's only during a step: several may be continued in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.tokenizers import Pieces
from regard.errors import LengthError, OptionError
from regard.generate import Settings, draw
from regard.generate.sampling import uniforms
from regard.hub.attention import Call, recording_attention
from regard.lens.models import RecordableModel
from regard.lens.recording.hub_tokens import make_detokenizer
from regard.lens.recording.regard_models import attention_layers
from regard.mechanisms.base import without_autocast
from regard.models import GPT, Model
from regard.nn import Attention
from regard.nn.capture import capture_attention
from regard.shapes import Mask

Guard = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A token that was chosen, its text, how probable it was, and the weights [H,S] of each attention over all tokens
    before it: those of the token that was read last, from which it was chosen."""

    token: int
    text: str
    p: float
    weights: list[Float[Tensor, "H S"]]


class Reader(Protocol):
    """A model in the middle of a text."""

    def read(self, ids: Sequence[int]) -> tuple[Float[Tensor, " N"], list[Float[Tensor, "H S"]]]:
        """Reads more tokens: logits of the next one, and the last row of each attention."""


def generates(recordable: RecordableModel) -> bool:
    """Returns whether a model continues a text: a GPT of regard's, or a causal language model of Hugging Face's."""
    if isinstance(recordable.model, Model):
        return isinstance(recordable.model, GPT)
    if getattr(recordable.model.config, "is_encoder_decoder", False):
        return False
    return bool(recordable.reads_text and recordable.model.can_generate())


def context_length(recordable: RecordableModel) -> int | None:
    """Returns how many tokens a model can read; None: any number."""
    if isinstance(recordable.model, Model):
        limit = getattr(recordable.model.stack, "limit", None)
    else:
        limit = getattr(recordable.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def vocabulary_size(recordable: RecordableModel) -> int:
    """Returns how many tokens a model knows."""
    if isinstance(recordable.model, Model):
        return int(recordable.model.embedding.num_embeddings)  # type: ignore[union-attr, arg-type]
    return int(recordable.model.config.get_text_config().vocab_size)


def model_detokenizer(recordable: RecordableModel) -> Pieces:
    """Returns what decodes the model's tokens one at a time."""
    if isinstance(recordable.model, Model) and recordable.tokenizer is not None:
        detokenizer: Pieces = recordable.tokenizer.pieces()
        return detokenizer
    return make_detokenizer(recordable.tokenizer)


def steps(
    recordable: RecordableModel, ids: Sequence[int], settings: Settings, guard: Guard = nullcontext
) -> Iterator[Step]:
    """Continues token ids one by one, up to an end token, `max_tokens`, or as many as the model can read.

    `guard` is entered for each step, and left before it is given out.
    """
    if not generates(recordable):
        raise OptionError(f"{recordable.card.name} does not continue a text; expected a decoder-only language model")
    if settings.beams is not None or settings.n > 1 or settings.slide or settings.repetition_penalty != 1:
        raise OptionError("a step is one token of one output: leave out beams, n, slide and repetition_penalty")
    if not ids:
        raise OptionError("nothing to continue: the text has no tokens")
    longest = context_length(recordable)
    if longest is not None and len(ids) > longest:
        raise LengthError(f"the text has {len(ids)} tokens, but the model was built for {longest}: shorten it")
    count = settings.max_tokens
    if longest is not None:
        count = min(count, longest - len(ids) + 1)  # the last token is not read
    return _steps(recordable, list(ids), settings, guard, count)


def _steps(recordable: RecordableModel, ids: list[int], settings: Settings, guard: Guard, count: int) -> Iterator[Step]:
    """Yields at most `count` steps."""
    reader: Reader
    if isinstance(recordable.model, GPT):
        reader = _RegardReader(recordable.model, len(ids) + settings.max_tokens)
    else:
        reader = _HubReader(recordable.model)
    ends = _end_tokens(recordable)
    detokenizer = model_detokenizer(recordable)
    for token in ids:
        detokenizer.push(token)
    seed = settings.seed
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    numbers = uniforms(seed, [0], settings.max_tokens)[0]
    new = ids
    for n in range(count):
        with guard(), torch.inference_mode():
            logits, weights = reader.read(new)
            if settings.samples:
                token = int(draw(logits[None], settings, numbers[n : n + 1])[0])
            else:
                token = int(logits.argmax())
            p = float(logits.double().softmax(-1)[token])
        if token in ends:
            return
        yield Step(token, detokenizer.push(token), p, weights)
        new = [token]


def _end_tokens(recordable: RecordableModel) -> set[int]:
    """Returns the tokens that end a text."""
    if isinstance(recordable.model, Model):
        if recordable.tokenizer is None:
            return set()
        end = recordable.tokenizer.role("end")
    else:
        end = recordable.model.generation_config.eos_token_id
    if end is None:
        return set()
    return set(end) if isinstance(end, list) else {int(end)}


class _RegardReader:
    """One of regard's models, read from a state. Keys are kept here: a linear mechanism's state has none."""

    def __init__(self, model: GPT, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.state: Any = None
        self.layers = [_StepCapture(attention) for *_, attention in attention_layers(model)]

    def read(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Reads more tokens from the state."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        with ExitStack() as captures:
            for layer in self.layers:
                captures.enter_context(capture_attention(layer.attention, layer.add, recurrent=True))
            if self.state is None:
                logits, self.state = self.model.prefill(tokens, None, self.capacity)
            else:
                logits, self.state = self.model.extend(tokens, self.state, last=True)
        return logits[0, -1].float().cpu(), [layer.last_row() for layer in self.layers]


class _StepCapture:
    """The last query of one attention, and all keys so far."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.tokens = 0
        self.q: Tensor | None = None
        self.k: Tensor | None = None

    def add(self, q: Tensor | None, k: Tensor | None, v: Tensor | None, mask: Mask | None) -> None:
        """Keeps what a step brings; a mechanism may have no queries or no keys."""
        assert v is not None
        self.tokens += v.shape[2]
        if q is not None:
            self.q = q[:, :, -1:]
        if k is not None:
            self.k = k if self.k is None else torch.cat([self.k, k], 2)

    def last_row(self) -> Float[Tensor, "H S"]:
        """Returns the weights of the last query."""
        mask = self.attention.rules.but(causal=True, size_override=(1, self.tokens))
        like = self.attention.out.weight if self.q is None else self.q
        with without_autocast(like):
            weights = self.attention.mechanism.weights(self.q, self.k, mask)
        return weights[0, :, 0].float().cpu()


class _HubReader:
    """One of Hugging Face's models, read with its cache. It records the last row of each attention itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = None
        self.device = next(model.parameters()).device
        self.last_rows: dict[str, Tensor] = {}
        self.tokens = 0

    def read(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Reads more tokens with the cache."""
        self.tokens += len(ids)
        tokens = torch.tensor([list(ids)], device=self.device)
        with recording_attention(self.model, self):
            out = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        return out.logits[0, -1].float().cpu(), [_widened(row, self.tokens) for row in self.last_rows.values()]

    def begin(self, call: Call) -> None:
        """Leaves the call as it is."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Keeps the last row; rows come in order, so that of the last part stays."""
        if not call.cross:
            self.last_rows[call.name] = weights[:, -1].float().cpu()

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output as it is."""
        return out


def _widened(row: Float[Tensor, "H s"], S: int) -> Float[Tensor, "H S"]:
    """Returns a row over all tokens, where a cache has let go of the first."""
    return torch.nn.functional.pad(row, (S - row.shape[1], 0))
