"""Prompts as token ids that a model can read, and as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.errors import LengthError, RegardError
from regard.generate.settings import Settings
from regard.models import Decoder

Ids = Sequence[int] | Int[Tensor, " T"]


class PromptError(RegardError, ValueError):
    """A prompt that cannot be continued."""


def read_prompts(
    prompt: Any, model: Decoder[Any], settings: Settings, tokenizer: Tokenizer | None
) -> tuple[list[list[int]], bool]:
    """Returns the token ids of each prompt, and whether a single prompt was given rather than a list."""
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Integral))
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise PromptError("no prompt: give a text or a list of token ids")
    encoded = [_encode(p, n, tokenizer) for n, p in enumerate(prompts)]
    return [_fit_to_model(ids, model, settings) for ids in encoded], single


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Returns prompts as one tensor, padded on the left, and which tokens are visible; None: all."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    if all(len(ids) == longest for ids in prompts):
        return tokens, None
    padding = torch.tensor([longest - len(ids) for ids in prompts], device=device)
    return tokens, torch.arange(longest, device=device) >= padding[:, None]


def _encode(prompt: Any, n: int, tokenizer: Tokenizer | None) -> list[int]:
    """Returns the ids of the n-th prompt, which is a text or a list of ids."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("a prompt of text needs a tokenizer: set model.tokenizer, or give token ids")
        prompt = tokenizer.encode(prompt)
    ids = [int(i) for i in prompt]
    if not ids:
        raise PromptError(f"prompt {n} is empty: give at least one token to continue")
    return ids


def _fit_to_model(ids: list[int], model: Decoder[Any], settings: Settings) -> list[int]:
    """Returns the tokens of a prompt that the model reads: all, or the last if windows slide; else raises an error."""
    # The vocabulary of a Seq2Seq's source is not that of its embedding, which is the target's.
    vocabulary = getattr(model.config, "vocabulary", model.embedding.num_embeddings)
    for place, i in enumerate(ids):
        if not 0 <= i < vocabulary:
            raise PromptError(
                f"token {i} at position {place} of the prompt: this model's vocabulary is 0 to {vocabulary - 1}. "
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
