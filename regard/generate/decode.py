"""Generating text: one loop for every model and mechanism, always with a state.

Prompts of unequal length are padded on the left and the padding is invisible; a position counts visible tokens, so each
row is computed as it would be alone. Random numbers depend on the seed and the number of the output, not on the place
in the batch: a prompt is continued the same way alone and among others. A repeated prompt has other random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.devices import explain_memory
from regard.generate.beam_search import BeamSearch
from regard.generate.graph import DecodingGraph, get_graph, round_up
from regard.generate.prompts import Ids, PromptError, padded, read_prompts
from regard.generate.sampler import Sampler
from regard.generate.settings import Choice, Result, Settings
from regard.models import GPT, Decoder, Model

ROUNDS = 8  # rounds of sampling until the outputs are distinct
WORTH_A_GRAPH = 16  # remaining tokens from which on a CUDA graph pays
CPU_CAPACITY = 32  # tokens for which a state first has room on a CPU
_LOWER = "Lower max_tokens, n or beams, give fewer or shorter prompts, or take a smaller model"


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
    """Returns the continuation of a prompt, or a list of those of several prompts.

    `generate(model, "Once", max_tokens=50, temperature=0.8, seed=0)`. A prompt is text or token ids; for a Seq2Seq it
    is the source. See `Settings` for the options.
    """
    settings = settings.but(**changes)
    decoder = _require_decoder(model, settings)
    tokenizer = tokenizer or model.tokenizer
    prompts, single = read_prompts(prompt, decoder, settings, tokenizer)
    seed = _seed(settings)
    with explain_memory("generating", _LOWER), _eval_mode(decoder):
        if settings.beams is not None:
            choices = _search_beams(decoder, prompts, settings, tokenizer)
        elif settings.slide:
            choices = _sample_by_length(decoder, prompts, settings, tokenizer, seed)
        else:
            choices = _sample(decoder, prompts, settings, tokenizer, seed)
    results = [Result(tuple(of_prompt[: settings.beams or settings.n])) for of_prompt in choices]
    if single:
        return results[0]
    return results


def stream(
    model: Model[Any],
    prompt: str | Ids,
    settings: Settings = Settings(),  # noqa: B008
    *,
    tokenizer: Tokenizer | None = None,
    **changes: Any,
) -> Iterator[str]:
    """Yields the text of `generate` piece by piece, never half a character or the beginning of a stop text."""
    settings = settings.but(**changes)
    decoder = _require_decoder(model, settings)
    tokenizer = tokenizer or model.tokenizer
    if settings.beams is not None or settings.n > 1:
        raise PromptError("a stream has one output and no beams: those are known only at the end; use generate")
    if tokenizer is None:
        raise PromptError("a stream is text: set model.tokenizer, or give tokenizer=")
    prompts, single = read_prompts(prompt, decoder, settings, tokenizer)
    if not single:
        raise PromptError("a stream continues one prompt; use generate for several")
    # The generator is another function, so that errors are raised and the seed is drawn now, not at the first piece.
    return _stream_pieces(decoder, prompts, settings, tokenizer, _seed(settings))


def _stream_pieces(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer, seed: int
) -> Iterator[str]:
    """Yields after each token the new text that no later token can change."""
    with explain_memory("generating", _LOWER), _eval_mode(model):
        sampler = _make_sampler(model, prompts, settings, tokenizer, seed, [0], watch=True)
        loop = DecodingLoop(model, prompts, sampler, settings.slide)
        output = sampler.texts[0]
        while loop.advance():
            if piece := output.take_new():
                yield piece
        output.finish()
        if piece := output.take_new(final=True):
            yield piece


class DecodingLoop:
    """Reads the prompts once, then one token at a time, which `search` chooses; each prompt has `copies` rows.

    `slide`: when the model's length is reached, the last half of it is read anew as a prompt.
    """

    def __init__(
        self,
        model: Decoder[Any],
        prompts: list[list[int]],
        search: Sampler | BeamSearch,
        slide: bool = False,
        copies: int = 1,
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.search = search
        self.copies = copies
        self.slides_at = None
        if slide:
            self.slides_at = model.limit
        self.device = model.device
        self.state: Any = None
        self.reach = 0  # upper bound of the tokens of a row before the next prefill
        self.next: Int[Tensor, " B"] | None = None
        self.graph: DecodingGraph | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Decodes until all outputs have ended."""
        while self._advance():
            pass

    @torch.inference_mode()
    def advance(self) -> bool:
        """Decodes one more token for each row; returns whether any output is still unfinished."""
        return self._advance()

    def _advance(self) -> bool:
        # Not decorated, so that `run` enters inference mode once and not at each token.
        if self.next is None:
            logits = self._prefill(self.prompts, self.copies)
        elif self.slides_at is not None and self.state.used >= self.slides_at:
            logits = self._prefill(self._last_tokens(max(1, self.slides_at // 2)))
        else:
            logits = self._extend(self.next)
        if self.graph is not None and isinstance(self.search, Sampler):
            self.next, rows = self.search.step(logits[:, -1], self.graph.greedy)
        else:
            self.next, rows = self.search.step(logits[:, -1])
        if self.search.done:
            return False
        if rows is not None:
            # The first step of beams makes many rows of the one of each prompt, so the state of the source is copied
            # then.
            same_source = len(rows) == len(logits) and not self.search.moves_source
            self.state = self.model.fork(self.state, rows, same_source=same_source)
            self.graph = None  # it was captured for the buffers of the earlier state
        return True

    def _extend(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B 1 N"]:
        """Returns logits after one more token of each row; on a GPU by a CUDA graph, if it pays to capture one."""
        if self.graph is None and self._pays_for_graph():
            self.graph = get_graph(self.model, self.state, self.reach)
            self.state = self.graph.state
        if self.graph is not None:
            return self.graph(tokens)
        logits, self.state = self.model.extend(tokens[:, None], self.state, last=True)
        return logits

    def _pays_for_graph(self) -> bool:
        """Returns whether enough tokens remain for a CUDA graph; beams, which reorder rows, cannot use one."""
        if self.device.type != "cuda" or not isinstance(self.search, Sampler) or self.slides_at is not None:
            return False
        return self.search.limit - self.search.count >= WORTH_A_GRAPH

    def _prefill(self, prompts: list[list[int]], copies: int = 1) -> Float[Tensor, "B 1 N"]:
        """Reads each prompt once, however many rows continue it; returns the logits of each row."""
        tokens, visible = padded(prompts, self.device)
        capacity = self.search.limit
        if self.device.type == "cpu":
            # A cache that is mostly full is read faster, and doubling it now and then costs little.
            capacity = min(capacity, CPU_CAPACITY)
        if self._pays_for_graph():
            capacity = round_up(tokens.shape[1] + capacity) - tokens.shape[1]
        self.reach = tokens.shape[1] + capacity
        logits, self.state = self.model.prefill(tokens, visible, capacity)
        if copies > 1:
            rows = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
            self.state = self.model.fork(self.state, rows)
            logits = logits.index_select(0, rows)
        return logits

    def _last_tokens(self, n: int) -> list[list[int]]:
        """Returns the last n tokens of each row, its prompt included."""
        assert isinstance(self.search, Sampler)
        written = self.search.tokens.tolist()
        return [
            (self.prompts[output // self.copies] + ids)[-n:]
            for output, ids in zip(self.search.active, written, strict=True)
        ]


def _sample_by_length(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer | None, seed: int
) -> list[list[Choice]]:
    """Returns the outputs of `_sample` for windows that slide, with prompts of one length in a batch.

    A window slides when it is full: rows of one length are full at the same time, as each would be alone.
    """
    choices: dict[int, list[Choice]] = {}
    for length in sorted({len(ids) for ids in prompts}):
        places = [p for p, ids in enumerate(prompts) if len(ids) == length]
        batch = _sample(model, [prompts[p] for p in places], settings, tokenizer, seed)
        choices |= dict(zip(places, batch, strict=True))
    return [choices[p] for p in range(len(prompts))]


def _sample(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer | None, seed: int
) -> list[list[Choice]]:
    """Returns `n` distinct outputs for each prompt, greedy or sampled; fewer if ROUNDS rounds find no more."""
    distinct: list[dict[tuple[int, ...], Choice]] = [{} for _ in prompts]
    drawn = 0
    for _ in range(ROUNDS):
        lacking = [p for p, choices in enumerate(distinct) if len(choices) < settings.n]
        if not lacking:
            break
        copies = max(settings.n - len(distinct[p]) for p in lacking)
        batch = [prompts[p] for p in lacking]
        sampler = _make_sampler(model, batch, settings, tokenizer, seed, range(drawn, drawn + copies))
        DecodingLoop(model, batch, sampler, settings.slide, copies).run()
        for n, choice in enumerate(sampler.choices):
            distinct[lacking[n // copies]].setdefault(tuple(choice.tokens), choice)
        drawn += copies
    return [list(choices.values()) for choices in distinct]


def _make_sampler(
    model: Decoder[Any],
    prompts: list[list[int]],
    settings: Settings,
    tokenizer: Tokenizer | None,
    seed: int,
    draws: Sequence[int],
    watch: bool = False,
) -> Sampler:
    """Returns a sampler with a row for each prompt and each of `draws`, the numbers of its outputs."""
    seen = None
    if settings.repetition_penalty != 1:
        seen = torch.zeros(len(prompts), model.embedding.num_embeddings, dtype=torch.bool)
        if isinstance(model, GPT):  # the source of a Seq2Seq has another vocabulary
            for row, ids in zip(seen, prompts, strict=True):
                row[ids] = True
        seen = seen.repeat_interleave(len(draws), 0).to(model.device)
    limits = [_token_limit(model, ids, settings) for ids in prompts for _ in draws]
    stops = _stop_tokens(settings, tokenizer)
    # A repeated prompt has other random streams: the upper bits count its earlier occurrences.
    repeats = [prompts[:p].count(ids) for p, ids in enumerate(prompts)]
    streams = [(times << 32) + n for times in repeats for n in draws]
    return Sampler(settings, limits, streams, seed, tokenizer, stops, seen, model.device, watch)


def _search_beams(
    model: Decoder[Any], prompts: list[list[int]], settings: Settings, tokenizer: Tokenizer | None
) -> list[list[Choice]]:
    """Returns the beams of each prompt, best first; prompts with one limit of tokens share a search."""
    limits = [_token_limit(model, ids, settings) for ids in prompts]
    stops = _stop_tokens(settings, tokenizer)
    choices: dict[int, list[Choice]] = {}
    for limit in set(limits):
        places = [p for p, n in enumerate(limits) if n == limit]
        search = BeamSearch(settings, len(places), limit, tokenizer, stops)
        DecodingLoop(model, [prompts[p] for p in places], search).run()
        choices |= dict(zip(places, search.choices, strict=True))
    return [choices[p] for p in range(len(prompts))]


def _token_limit(model: Decoder[Any], ids: list[int], settings: Settings) -> int:
    """Returns how many tokens to generate: `max_tokens`, or fewer if the model has no room for them."""
    room = model.max_new_tokens(len(ids))
    if settings.slide or room is None:
        return settings.max_tokens
    return min(settings.max_tokens, room)


def _stop_tokens(settings: Settings, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Returns the tokens that end an output: those of the settings, and those that end a text for the tokenizer."""
    if tokenizer is None:
        if settings.stops:
            raise PromptError("stop texts need a tokenizer: set model.tokenizer, or use stop_tokens")
        return frozenset(settings.stop_tokens)
    return tokenizer.ends.union(settings.stop_tokens)


def _require_decoder(model: Model[Any], settings: Settings) -> Decoder[Any]:
    """Returns the model; raises a PromptError if it cannot generate, or cannot slide as the settings ask."""
    if not isinstance(model, Decoder):
        raise PromptError(f"{type(model).__name__} does not generate text; use a GPT or a Seq2Seq")
    if settings.slide and not isinstance(model, GPT):
        raise PromptError(f"slide=True: a {type(model).__name__} cannot forget the beginning of what it writes")
    return model


def _seed(settings: Settings) -> int:
    """Returns the seed of the settings, or one from PyTorch's default generator, which torch.manual_seed seeds."""
    if settings.seed is None:
        return int(torch.randint(1 << 62, ()))
    return settings.seed


@contextmanager
def _eval_mode(model: Decoder[Any]) -> Iterator[None]:
    """Puts the model into evaluation mode while the block runs."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
