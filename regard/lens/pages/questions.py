"""Answers to two questions of the served page: what changes without some heads, and what each head adds to a logit.

For the first, a text is read and continued twice, with all heads and without the chosen ones, greedily or with the same
random numbers, so that only the heads make a difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import OptionError
from regard.generate import Settings, draw
from regard.generate.sampling import uniforms
from regard.lens.heads.ablation import without_heads
from regard.lens.models import RecordableModel
from regard.lens.pages.live import context_length, end_tokens, generates, model_detokenizer
from regard.lens.recording.maps import evaluation_mode
from regard.lens.recording.predictions import direct_contributions, token_of, token_text
from regard.lens.recording.stream import read_stream
from regard.models import Model

NEXT = 10  # likeliest next tokens that are listed
EXPECTED = 'expected {"heads": [[name of a self-attention, number of a head], …]} of this model'
Guard = Callable[[], AbstractContextManager[Any]]


def removed_heads(asked: Any, layers: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns the heads to remove by the names of their attention modules; `layers` has the number of heads of each.

    Raises OptionError for anything but a list of pairs of a name and a number of these.
    """
    heads: dict[str, list[int]] = {}
    for pair in asked if isinstance(asked, list) else ():
        if not _is_head(pair, layers):
            raise OptionError(EXPECTED)
        if pair[1] not in heads.setdefault(pair[0], []):
            heads[pair[0]].append(pair[1])
    if not heads:
        raise OptionError(f"no head was chosen: {EXPECTED}")
    return heads


def _is_head(pair: Any, layers: Mapping[str, int]) -> bool:
    """Returns whether this is a pair of the name of an attention module and the number of one of its heads."""
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or type(pair[1]) is not int:
        return False
    return bool(0 <= pair[1] < layers.get(pair[0], 0))


def with_and_without(
    recordable: RecordableModel,
    ids: Sequence[int],
    heads: Mapping[str, Sequence[int]],
    settings: Settings,
    guard: Guard,
    seconds: float,
) -> dict[str, Any]:
    """Returns the predictions of a language model with all heads ("with") and without some ("without").

    Each has "next" (the likeliest next tokens), "loss" (the mean loss of the text's own tokens, null for one token),
    "text" and "tokens" (the generated continuation). `guard()` is held during each pass; each of the two ends after
    `seconds`.
    """
    if not generates(recordable):
        raise OptionError(f"{recordable.card.name} does not continue a text; expected a decoder-only language model")
    seed = settings.seed
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    settings = settings.but(seed=seed)
    return {
        "with": _reading(recordable, ids, nullcontext, settings, guard, seconds),
        "without": _reading(recordable, ids, lambda: without_heads(recordable.model, heads), settings, guard, seconds),
    }


def _reading(
    recordable: RecordableModel,
    ids: Sequence[int],
    change: Guard,
    settings: Settings,
    guard: Guard,
    seconds: float,
) -> dict[str, Any]:
    """Returns one of the two dicts of `with_and_without`, read while the context `change()` lasts."""
    steps = _steps(recordable, list(ids), change, guard)
    logits = next(steps)
    p, best = logits[-1].softmax(-1).topk(min(NEXT, logits.shape[-1]))
    loss = None
    if len(ids) > 1:
        loss = float(functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))
    numbers = uniforms(settings.seed or 0, [0], max(1, settings.max_tokens))[0]
    detokenizer = model_detokenizer(recordable)
    for token in ids:
        detokenizer.push(token)
    pieces: list[str] = []
    ends = end_tokens(recordable)
    deadline = time.monotonic() + seconds
    longest = context_length(recordable)
    room = settings.max_tokens if longest is None else min(settings.max_tokens, longest - len(ids) + 1)
    for n in range(room):
        token = int(logits[-1].argmax())
        if settings.samples:
            token = int(draw(logits[-1:], settings, numbers[n : n + 1])[0])
        if token in ends:
            break
        pieces.append(detokenizer.push(token))
        if n + 1 == room or time.monotonic() > deadline:
            break
        logits = steps.send(token)
    steps.close()
    found = zip(best.tolist(), p.tolist(), strict=True)
    return {
        "next": [{"id": i, "text": token_text(recordable.tokenizer, i), "p": round(q, 6)} for i, q in found],
        "loss": loss,
        "tokens": pieces,
        "text": "".join(pieces),
    }


def _steps(recordable: RecordableModel, ids: list[int], change: Guard, guard: Guard) -> Generator[Tensor, int, None]:
    """Yields the logits [T,N] of the text, and then those of each further token, which is sent to the generator.

    A model of regard's reads the whole text again at each step, because its heads are removed from whole sequences
    only.
    """
    model = recordable.model
    device = next(model.parameters()).device
    cache = None
    new = ids
    while True:
        with guard(), torch.inference_mode(), evaluation_mode(model), change():
            if isinstance(model, Model):
                logits = model(torch.tensor([ids], device=device))[0]
            else:
                out = model(input_ids=torch.tensor([new], device=device), past_key_values=cache, use_cache=True)
                logits, cache = out.logits[0], out.past_key_values
        token = yield logits.float().cpu()
        ids = [*ids, token]
        new = [token]


def logit_contributions(recordable: RecordableModel, ids: Sequence[int], position: Any, text: Any) -> dict[str, Any]:
    """Returns what each head adds to the logit of a token after the token at a position.

    The result has "id", "token", "logit", "p", "heads" (a list a block) and "rest" (the embeddings, each block's MLP
    with its biases, and a constant), which add up to the logit.
    """
    if type(position) is not int or not 0 <= position < len(ids) or not isinstance(text, str):
        raise OptionError('expected {"position": the number of a token, "token": "text of the next"}')
    token = token_of(recordable.tokenizer, text)
    stream = read_stream(recordable.model, list(ids[: position + 1]))
    if stream.why:
        raise OptionError(f"no contributions of heads in this model: {stream.why}")
    candidates = torch.full((position + 1, 1), token)
    heads, rest = direct_contributions(stream, candidates)
    last = stream.logits[-1]
    return {
        "id": token,
        "token": token_text(recordable.tokenizer, token),
        "logit": float(last[token]),
        "p": float(last.softmax(-1)[token]),
        "heads": [x[-1, 0].tolist() for x in heads],
        "rest": rest[-1, 0].tolist(),
    }
