"""Generating token by token, with the attention weights of each step.

A step runs the model over the new tokens (the prompt, or the last token) and returns logits and, for each attention
module, the weights [H,S] of the last query. The model is locked (by `guard`) only during a step, so several generations
can take turns.
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
from regard.mechanisms.recurrence import repeat_shared
from regard.models import GPT, Model
from regard.nn import Attention
from regard.nn.capture import capture_attention
from regard.shapes import Mask

Guard = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A generated token, its text, its probability, and the weights [H,S] of each attention module.

    The probability `p` is that of the model, before temperature, top-k and top-p. The weights are those of the query
    that predicted the token, that is, of the last token before it.
    """

    token: int
    text: str
    p: float
    weights: list[Float[Tensor, "H S"]]


class Reader(Protocol):
    """A model with a state (such as a KV cache) that is fed tokens incrementally."""

    def feed(self, ids: Sequence[int]) -> tuple[Float[Tensor, " N"], list[Float[Tensor, "H S"]]]:
        """Feeds more tokens; returns the logits of the next, and the last query's weights in each attention module."""


def generates(recordable: RecordableModel) -> bool:
    """Returns whether a model can continue a text: a GPT of regard, or a causal language model of Hugging Face."""
    if isinstance(recordable.model, Model):
        return isinstance(recordable.model, GPT)
    if getattr(recordable.model.config, "is_encoder_decoder", False):
        return False
    return bool(recordable.reads_text and recordable.model.can_generate())


def context_length(recordable: RecordableModel) -> int | None:
    """Returns the maximum number of tokens of a model's context; None if there is no limit or it is not known."""
    if isinstance(recordable.model, Model):
        limit = getattr(recordable.model.stack, "limit", None)
    else:
        limit = getattr(recordable.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def vocabulary_size(recordable: RecordableModel) -> int:
    """Returns the vocabulary size of a model."""
    if isinstance(recordable.model, Model):
        return int(recordable.model.embedding.num_embeddings)  # type: ignore[union-attr, arg-type]
    return int(recordable.model.config.get_text_config().vocab_size)


def model_detokenizer(recordable: RecordableModel) -> Pieces:
    """Returns an incremental decoder of the model's token ids to text."""
    if isinstance(recordable.model, Model) and recordable.tokenizer is not None:
        detokenizer: Pieces = recordable.tokenizer.pieces()
        return detokenizer
    return make_detokenizer(recordable.tokenizer)


def generate_steps(
    recordable: RecordableModel, ids: Sequence[int], settings: Settings, guard: Guard = nullcontext
) -> Iterator[Step]:
    """Continues token ids one by one, up to an end token, `max_tokens`, or the model's context length.

    `guard()` is a context manager that is held while a step is computed, and released before the step is yielded.
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
        count = min(count, longest - len(ids) + 1)  # the last generated token is not fed to the model
    return _generate_steps(recordable, list(ids), settings, guard, count)


def _generate_steps(
    recordable: RecordableModel, ids: list[int], settings: Settings, guard: Guard, count: int
) -> Iterator[Step]:
    """Yields at most `count` steps."""
    reader: Reader
    if isinstance(recordable.model, GPT):
        reader = _RegardReader(recordable.model, len(ids) + settings.max_tokens)
    else:
        reader = _HubReader(recordable.model)
    ends = end_tokens(recordable)
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
            logits, weights = reader.feed(new)
            if settings.samples:
                token = int(draw(logits[None], settings, numbers[n : n + 1])[0])
            else:
                token = int(logits.argmax())
            p = float(logits.double().softmax(-1)[token])
        if token in ends:
            return
        yield Step(token, detokenizer.push(token), p, weights)
        new = [token]


def end_tokens(recordable: RecordableModel) -> set[int]:
    """Returns the ids of the end-of-text tokens."""
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
    """A GPT of regard with its state. Keys are stored here, because the state of linear attention has none."""

    def __init__(self, model: GPT, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.state: Any = None
        self.layers = [_StepCapture(attention) for *_, attention in attention_layers(model)]

    def feed(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Feeds more tokens, continuing from the state; see `Reader`."""
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
    """The last query of one attention module, and all its keys so far."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.tokens = 0
        self.q: Tensor | None = None
        self.k: Tensor | None = None
        self.gates: dict[str, Tensor] = {}

    def add(self, q: Tensor | None, k: Tensor | None, v: Tensor | None, mask: Mask | None, **gates: Tensor) -> None:
        """Stores the last query and the new keys of a step; a mechanism may use no queries or no keys."""
        assert v is not None
        self.tokens += v.shape[2]
        if q is not None:
            self.q = q[:, :, -1:]
        if k is not None:
            self.k = k if self.k is None else torch.cat([self.k, k], 2)
        for name, x in gates.items():
            self.gates[name] = torch.cat([self.gates[name], x], 2) if name in self.gates else x

    def last_row(self) -> Float[Tensor, "H S"]:
        """Returns the weights of the last query over all tokens so far."""
        mask = self.attention.rules.but(causal=True, size_override=(1, self.tokens))
        like = self.attention.out.weight if self.q is None else self.q
        q, k = repeat_shared(self.attention.mechanism, self.q, self.k, self.attention.size.G)
        with without_autocast(like):
            weights = self.attention.mechanism.weights(q, k, mask, **self.gates)
        return weights[0, :, 0].float().cpu()


class _HubReader:
    """A Hugging Face model with its KV cache; also the `AttentionRecorder` that stores each module's last row."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = None
        self.device = next(model.parameters()).device
        self.last_rows: dict[str, Tensor] = {}
        self.tokens = 0

    def feed(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Feeds more tokens, continuing from the cache; see `Reader`."""
        self.tokens += len(ids)
        tokens = torch.tensor([list(ids)], device=self.device)
        with recording_attention(self.model, self):
            out = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        return out.logits[0, -1].float().cpu(), [_widened(row, self.tokens) for row in self.last_rows.values()]

    def begin(self, call: Call) -> None:
        """Does nothing: the call is not changed."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Stores the last row; rows arrive in order, so later ones overwrite earlier ones."""
        if not call.cross:
            self.last_rows[call.name] = weights[:, -1].float().cpu()

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output unchanged."""
        return out


def _widened(row: Float[Tensor, "H s"], S: int) -> Float[Tensor, "H S"]:
    """Returns the row padded with zeros for the first tokens, if a sliding cache has dropped their keys."""
    return torch.nn.functional.pad(row, (S - row.shape[1], 0))
