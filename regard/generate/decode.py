"""Generating text: one loop for every model and mechanism, always with a state.

Prompts of unequal length are padded on the left and the padding is invisible; a position counts visible tokens, so each
row is computed as it would be alone. Random numbers belong to the seed and the number of the output, not to the place
in the batch: a prompt is continued the same way alone and among others. Where it occurs twice it is drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, overload

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.errors import LengthError, RegardError
from regard.generate.beams import Beams
from regard.generate.graph import GraphStep, graph_step, roomy
from regard.generate.rows import Rows
from regard.generate.settings import Choice, Result, Settings
from regard.models import GPT, Decoder, Model

Ids = Sequence[int] | Int[Tensor, " T"]
ROUNDS = 8  # of drawing again for distinct outputs
WORTH_A_GRAPH = 16  # tokens to come


class PromptError(RegardError, ValueError):
    """A prompt that cannot be continued."""


@overload
def generate(
    model: Model[Any],
    prompt: str | Ids,
    settings: Settings = ...,
    *,
    tokenizer: Tokenizer | None = ...,
    **changes: Any,
) -> Result: ...


@overload
def generate(
    model: Model[Any],
    prompt: Sequence[str] | Sequence[Ids] | Int[Tensor, "B T"],
    settings: Settings = ...,
    *,
    tokenizer: Tokenizer | None = ...,
    **changes: Any,
) -> list[Result]: ...


def generate(
    model: Model[Any],
    prompt: Any,
    settings: Settings = Settings(),  # noqa: B008
    *,
    tokenizer: Tokenizer | None = None,
    **changes: Any,
) -> Result | list[Result]:
    """What follows a prompt, or each of several: `generate(model, "Once", max_tokens=50, temperature=0.8, seed=0)`.

    A prompt is text or token ids; of a Seq2Seq it is the source. See `Settings` for what can be asked for.
    """
    settings = settings.but(**changes)
    decoder, tokenizer = _decoder(model, settings), tokenizer or model.tokenizer
    prompts, single = _prompts(prompt, tokenizer)
    prompts = [_fitted(decoder, ids, settings) for ids in prompts]
    seed = int(torch.randint(1 << 62, ())) if settings.seed is None else settings.seed
    with _evaluating(decoder):
        if settings.beams is not None:
            found = _beams(decoder, prompts, settings, tokenizer)
        else:
            found = _by_length(decoder, prompts, settings, tokenizer, seed)
    results = [Result(tuple(choices[: settings.beams or settings.n])) for choices in found]
    return results[0] if single else results


def stream(
    model: Model[Any],
    prompt: str | Ids,
    settings: Settings = Settings(),  # noqa: B008
    *,
    tokenizer: Tokenizer | None = None,
    **changes: Any,
) -> Iterator[str]:
    """The same text as `generate`, piece by piece; never half a character or the beginning of a stop text."""
    settings = settings.but(**changes)
    decoder, tokenizer = _decoder(model, settings), tokenizer or model.tokenizer
    if settings.beams is not None or settings.n > 1:
        raise PromptError("a stream has one output and no beams: those are known only at the end; use generate")
    if tokenizer is None:
        raise PromptError("a stream is text: set model.tokenizer, or give tokenizer=")
    prompts, single = _prompts(prompt, tokenizer)
    if not single:
        raise PromptError("a stream continues one prompt; use generate for several")
    prompts = [_fitted(decoder, ids, settings) for ids in prompts]
    seed = int(torch.randint(1 << 62, ())) if settings.seed is None else settings.seed
    return _pieces(decoder, prompts, settings, tokenizer, seed)


def _pieces(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer, seed: int
) -> Iterator[str]:
    with _evaluating(model):
        search = _rows(model, prompts, settings, tokenizer, seed, [0], watch=True)
        decoding = Decoding(model, prompts, search, settings.slide)
        writer = search.writers[0]
        while decoding.advance():
            if piece := writer.news():
                yield piece
        writer.finish()
        if piece := writer.news(final=True):
            yield piece


class Decoding:
    """One decoding under way, `copies` rows for each prompt."""

    def __init__(
        self, model: Decoder[Any], prompts: list[list[int]], search: Rows | Beams, slide: bool = False, copies: int = 1
    ) -> None:
        self.model, self.prompts, self.search, self.copies = model, prompts, search, copies
        self.slides_at = model.limit if slide else None
        self.device = model.device
        self.state: Any = None
        self.next: Tensor | None = None
        self.graph: GraphStep | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """All of it."""
        while self._advance():
            pass

    @torch.inference_mode()
    def advance(self) -> bool:
        """One token more for each row; says whether there is more to come."""
        return self._advance()

    def _advance(self) -> bool:
        if self.next is None:
            logits = self._begin(self.prompts, self.copies)
        elif self.slides_at is not None and self.state.used >= self.slides_at:
            logits = self._begin(self._latest(max(1, self.slides_at // 2)))
        else:
            logits = self._extend(self.next)
        self.next, rows = self.search.step(logits[:, -1])
        if self.search.done:
            return False
        if rows is not None:
            same = len(rows) == len(logits) and not self.search.moves_source
            self.state = self.model.fork(self.state, rows, same_source=same)
            self.graph = None
        return True

    def _extend(self, tokens: Tensor) -> Tensor:
        """One more token for each row; on a GPU as a CUDA graph, where enough tokens follow to pay for making it."""
        if self.graph is None and self._many_follow():
            self.graph = graph_step(self.model, self.state)
            self.state = self.graph.state
        if self.graph is not None:
            return self.graph(tokens)
        logits, self.state = self.model.extend(tokens[:, None], self.state, last=True)
        return logits

    def _many_follow(self) -> bool:
        on_gpu = self.device.type == "cuda" and isinstance(self.search, Rows) and self.slides_at is None
        return on_gpu and self.search.limit - self.search.count >= WORTH_A_GRAPH

    def _begin(self, prompts: list[list[int]], copies: int = 1) -> Tensor:
        """Reads each prompt once, however many rows continue it."""
        tokens, visible = padded(prompts, self.device)
        # On a CPU a cache that is mostly used is read faster, and doubling it now and then costs next to nothing.
        room = min(self.search.limit, 32) if self.device.type == "cpu" else self.search.limit
        if self._many_follow():
            room = roomy(tokens.shape[1] + room) - tokens.shape[1]
        logits, self.state = self.model.prefill(tokens, visible, room)
        if copies > 1:
            rows = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
            self.state, logits = self.model.fork(self.state, rows), logits.index_select(0, rows)
        return logits

    def _latest(self, n: int) -> list[list[int]]:
        """The last n tokens of each row."""
        assert isinstance(self.search, Rows)
        written = self.search.tokens.tolist()
        return [
            (self.prompts[output // self.copies] + ids)[-n:]
            for output, ids in zip(self.search.going, written, strict=True)
        ]


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Prompts as one tensor, padded on the left, and what of it is visible; None: all."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    if all(len(ids) == longest for ids in prompts):
        return tokens, None
    blank = torch.tensor([longest - len(ids) for ids in prompts], device=device)
    return tokens, torch.arange(longest, device=device) >= blank[:, None]


def _by_length(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer | None, seed: int
) -> list[list[Choice]]:
    """Samples for each prompt. Where windows slide, only prompts of one length share a batch.

    A window slides when it is full. Rows of one length are full at the same time, as each would be alone.
    """
    if not settings.slide:
        return _distinct(model, prompts, settings, tokenizer, seed)
    found: dict[int, list[Choice]] = {}
    for length in sorted({len(ids) for ids in prompts}):
        places = [p for p, ids in enumerate(prompts) if len(ids) == length]
        choices = _distinct(model, [prompts[p] for p in places], settings, tokenizer, seed)
        found |= dict(zip(places, choices, strict=True))
    return [found[p] for p in range(len(prompts))]


def _distinct(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer | None, seed: int
) -> list[list[Choice]]:
    """`n` outputs for each prompt, drawn again where two are the same."""
    found: list[dict[tuple[int, ...], Choice]] = [{} for _ in prompts]
    drawn = 0
    for _ in range(ROUNDS):
        lacking = [p for p, choices in enumerate(found) if len(choices) < settings.n]
        if not lacking:
            break
        copies = max(settings.n - len(found[p]) for p in lacking)
        asked = [prompts[p] for p in lacking]
        search = _rows(model, asked, settings, tokenizer, seed, range(drawn, drawn + copies))
        Decoding(model, asked, search, settings.slide, copies).run()
        for n, choice in enumerate(search.choices):
            found[lacking[n // copies]].setdefault(tuple(choice.tokens), choice)
        drawn += copies
    return [list(choices.values()) for choices in found]


def _rows(
    model: Decoder[Any],
    prompts: list[list[int]],
    settings: Settings,
    tokenizer: Tokenizer | None,
    seed: int,
    draws: Sequence[int],
    watch: bool = False,
) -> Rows:
    """Rows for each prompt, one for each of `draws`."""
    seen = None
    if settings.repetition_penalty != 1:
        seen = torch.zeros(len(prompts), model.embedding.num_embeddings, dtype=torch.bool)
        if isinstance(model, GPT):
            for row, ids in zip(seen, prompts, strict=True):
                row[ids] = True
        seen = seen.repeat_interleave(len(draws), 0).to(model.device)
    limits = [_limit(model, ids, settings) for ids in prompts for _ in draws]
    stops = _stop_tokens(settings, tokenizer)
    again = [prompts[:p].count(ids) for p, ids in enumerate(prompts)]
    streams = [(times << 32) + n for times in again for n in draws]
    return Rows(settings, limits, streams, seed, tokenizer, stops, seen, model.device, watch)


def _beams(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer | None
) -> list[list[Choice]]:
    limits, stops = [_limit(model, ids, settings) for ids in prompts], _stop_tokens(settings, tokenizer)
    found: dict[int, list[Choice]] = {}
    for limit in set(limits):  # one search has one limit
        places = [p for p, n in enumerate(limits) if n == limit]
        search = Beams(settings, len(places), limit, tokenizer, stops)
        Decoding(model, [prompts[p] for p in places], search).run()
        found |= dict(zip(places, search.choices, strict=True))
    return [found[p] for p in range(len(prompts))]


def _limit(model: Decoder[Any], ids: list[int], settings: Settings) -> int:
    """How many tokens to generate: as many as asked for, or as the model has room for."""
    room = None if settings.slide else model.max_new_tokens(len(ids))
    return settings.max_tokens if room is None else min(settings.max_tokens, room)


def _stop_tokens(settings: Settings, tokenizer: Tokenizer | None) -> frozenset[int]:
    if settings.stops and tokenizer is None:
        raise PromptError("stop texts need a tokenizer: set model.tokenizer, or use stop_tokens")
    return frozenset(settings.stop_tokens) | (frozenset() if tokenizer is None else tokenizer.ends)


def _decoder(model: Model[Any], settings: Settings) -> Decoder[Any]:
    if not isinstance(model, Decoder):
        raise PromptError(f"{type(model).__name__} does not generate text; use a GPT or a Seq2Seq")
    if settings.slide and not isinstance(model, GPT):
        raise PromptError(f"slide=True: a {type(model).__name__} cannot forget the beginning of what it writes")
    return model


def _prompts(prompt: Any, tokenizer: Tokenizer | None) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether there was only one, not in a list."""
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Integral))
    many = [prompt] if single else list(prompt)
    if not many:
        raise PromptError("no prompt: give a text or a list of token ids")
    return [_ids(p, n, tokenizer) for n, p in enumerate(many)], single


def _ids(prompt: Any, n: int, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("a prompt of text needs a tokenizer: set model.tokenizer, or give token ids")
        prompt = tokenizer.encode(prompt)
    ids = [int(i) for i in prompt]
    if not ids:
        raise PromptError(f"prompt {n} is empty: give at least one token to continue")
    return ids


def _fitted(model: Decoder[Any], ids: list[int], settings: Settings) -> list[int]:
    """A prompt that the model can read, or an error."""
    known = getattr(model.config, "vocabulary", model.embedding.num_embeddings)
    wrong = next((n for n, i in enumerate(ids) if not 0 <= i < known), None)
    if wrong is not None:
        raise PromptError(
            f"token {ids[wrong]} at position {wrong} of the prompt: this model's vocabulary is 0 to {known - 1}. "
            "Is the tokenizer that of the model?"
        )
    room = model.max_new_tokens(len(ids))
    if room is None or room >= 1:
        return ids
    if not settings.slide:
        raise LengthError(
            f"the prompt has {len(ids)} tokens, but the model was built for {model.limit}. Shorten it, or use "
            "slide=True to keep only its end."
        )
    return ids[-int(model.limit or 1) :]


@contextmanager
def _evaluating(model: Decoder[Any]) -> Iterator[None]:
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
