"""Generating with the attention of each step: where a model looked while it chose a token.

A step reads what is new, the prompt or the last token, and gives logits and one row of weights for each attention. The
model is the caller's only during a step: several may be continued in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from regard.lens.recording.regard_models import attentions
from regard.mechanisms.base import without_autocast
from regard.models import GPT, Model
from regard.nn import Attention

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


def generates(subject: RecordableModel) -> bool:
    """Whether a model continues a text: a GPT of regard's, or a causal language model of Hugging Face's."""
    if isinstance(subject.model, Model):
        return isinstance(subject.model, GPT)
    if getattr(subject.model.config, "is_encoder_decoder", False):
        return False
    return bool(subject.reads_text and subject.model.can_generate())


def room(subject: RecordableModel) -> int | None:
    """How many tokens a model can read; None: any number."""
    if isinstance(subject.model, Model):
        limit = getattr(subject.model.stack, "limit", None)
    else:
        limit = getattr(subject.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def vocabulary(subject: RecordableModel) -> int:
    """How many tokens a model knows."""
    own = isinstance(subject.model, Model)
    return int(subject.model.embedding.num_embeddings if own else subject.model.config.get_text_config().vocab_size)


def pieces(subject: RecordableModel) -> Pieces:
    """The text of tokens, one at a time."""
    if isinstance(subject.model, Model) and subject.tokenizer is not None:
        found: Pieces = subject.tokenizer.pieces()
        return found
    return Pieces(_Decoder(subject.tokenizer))  # type: ignore[arg-type]


def steps(
    subject: RecordableModel, ids: Sequence[int], settings: Settings, guard: Guard = nullcontext
) -> Iterator[Step]:
    """Continues token ids one by one, up to an end token, `max_tokens`, or as many as the model can read.

    `guard` is entered for each step, and left before it is given out.
    """
    if not generates(subject):
        raise OptionError(f"{subject.card.name} does not continue a text; expected a decoder-only language model")
    if settings.beams is not None or settings.n > 1 or settings.slide or settings.repetition_penalty != 1:
        raise OptionError("a step is one token of one output: leave out beams, n, slide and repetition_penalty")
    if not ids:
        raise OptionError("nothing to continue: the text has no tokens")
    most = room(subject)
    if most is not None and len(ids) > most:
        raise LengthError(f"the text has {len(ids)} tokens, but the model was built for {most}: shorten it")
    return _steps(subject, list(ids), settings, guard, most)


def _steps(
    subject: RecordableModel, ids: list[int], settings: Settings, guard: Guard, most: int | None
) -> Iterator[Step]:
    own = isinstance(subject.model, Model)
    reader: Reader = _Own(subject.model, len(ids) + settings.max_tokens) if own else _Foreign(subject.model)
    ends, texts = _ends(subject), pieces(subject)
    for token in ids:
        texts.push(token)
    seed = int(torch.randint(1 << 62, ())) if settings.seed is None else settings.seed
    numbers = uniforms(seed, [0], settings.max_tokens)[0]
    count = settings.max_tokens if most is None else min(settings.max_tokens, most - len(ids) + 1)
    new = ids
    for n in range(count):
        with guard(), torch.inference_mode():
            logits, weights = reader.read(new)
            token = int(draw(logits[None], settings, numbers[n : n + 1])[0] if settings.samples else logits.argmax())
            p = float(logits.double().softmax(-1)[token])
        if token in ends:
            return
        yield Step(token, texts.push(token), p, weights)
        new = [token]


def _ends(subject: RecordableModel) -> set[int]:
    if isinstance(subject.model, Model):
        end = None if subject.tokenizer is None else subject.tokenizer.role("end")
    else:
        end = subject.model.generation_config.eos_token_id
    return set(end) if isinstance(end, list) else set() if end is None else {int(end)}


class _Own:
    """One of regard's models, read from a state. Keys are kept here: a linear mechanism's state has none."""

    def __init__(self, model: GPT, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.state: Any = None
        self.layers = [_Tap(attention) for _, _, _, _, attention in attentions(model)]

    def read(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        tokens = torch.tensor([list(ids)], device=self.model.device)
        with ExitStack() as taps:
            for layer in self.layers:
                taps.enter_context(layer.listening())
            if self.state is None:
                logits, self.state = self.model.prefill(tokens, None, self.capacity)
            else:
                logits, self.state = self.model.extend(tokens, self.state, last=True)
        return logits[0, -1].float().cpu(), [layer.row() for layer in self.layers]


class _Tap:
    """What one attention was given so far."""

    def __init__(self, attention: Attention) -> None:
        self.attention, self.tokens = attention, 0
        self.q: Tensor | None = None
        self.k: Tensor | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        mechanism = self.attention.mechanism
        whole = mechanism.extend

        def extend(q: Any, k: Any, v: Tensor, state: Any, visible: Any = None) -> Any:
            self.tokens += v.shape[2]
            self.q = None if q is None else q[:, :, -1:]
            self.k = k if self.k is None else torch.cat([self.k, k], 2)
            return whole(q, k, v, state, visible)

        try:
            mechanism.extend = extend  # type: ignore[method-assign]
            yield
        finally:
            del mechanism.extend

    def row(self) -> Float[Tensor, "H S"]:
        """The weights of the last query."""
        mechanism = self.attention.mechanism
        mask = self.attention.rules.but(causal=True, size_override=(1, self.tokens))
        like = self.q if self.q is not None else self.attention.out.weight
        with without_autocast(like):
            found = mechanism.weights(self.q, self.k, mask)
        return found[0, :, 0].float().cpu()


class _Foreign:
    """One of Hugging Face's models, read with its cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.device = model, None, next(model.parameters()).device
        self.rows_of: dict[str, Tensor] = {}
        self.tokens = 0

    def read(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        self.tokens += len(ids)
        with recording_attention(self.model, self):
            out = self.model(
                input_ids=torch.tensor([list(ids)], device=self.device), past_key_values=self.cache, use_cache=True
            )
        self.cache = out.past_key_values
        return out.logits[0, -1].float().cpu(), [_widened(row, self.tokens) for row in self.rows_of.values()]

    def begin(self, call: Call) -> None:
        """Part of listening."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        if not call.cross:
            self.rows_of[call.name] = weights[:, -1].float().cpu()

    def end(self, call: Call, out: Tensor) -> Tensor:
        return out


def _widened(row: Float[Tensor, "H s"], S: int) -> Float[Tensor, "H S"]:
    """A row over all tokens, where a cache has let go of the first."""
    return torch.nn.functional.pad(row, (S - row.shape[1], 0))


class _Decoder:
    """What `Pieces` needs of a Hugging Face tokenizer; without one, tokens are shown as numbers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f" {i}" for i in ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
