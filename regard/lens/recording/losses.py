"""The losses that gradients and ablations are taken of.

A language model that reads from left to right predicts each token from those before it, in one pass. A masked language
model sees the token that it is to predict unless it is hidden: each token is masked in turn, in a copy of the text of
its own, and the loss is the mean cross entropy at the masked tokens (Salazar et al., 2020, arXiv:1910.14659).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import OptionError
from regard.hub.attention import import_transformers

TOKENS = 4096  # of masked copies that are read together
IGNORED = -100  # the label of a token that transformers leaves out of its loss
TOO_SHORT = "the loss of the next token needs two tokens at least"
_LANGUAGE = re.compile(r"(CausalLM|LMHeadModel|MaskedLM|ConditionalGeneration)$")


def has_language_head(model: Any) -> bool:
    """Returns whether a Hugging Face model predicts tokens: the name of its class says so."""
    return _LANGUAGE.search(type(model).__name__) is not None


def is_masked_model(model: Any) -> bool:
    """Returns whether a Hugging Face model predicts masked tokens from both sides, as BERT does.

    An encoder that is built as a causal model, but not told to be a decoder, looks at both sides too.
    """
    name = type(model).__name__
    if name.endswith("MaskedLM"):
        return True
    if not name.endswith(("CausalLM", "LMHeadModel")) or getattr(model.config, "is_decoder", False):
        return False
    return type(model.config) in import_transformers().MODEL_FOR_MASKED_LM_MAPPING


def require_language_head(model: Any) -> None:
    """Raises an error that says what is needed where a Hugging Face model has no loss of its own."""
    if not has_language_head(model):
        raise OptionError(
            f"{type(model).__name__} has no language model head, so it has no loss of its own: open a model that has "
            "one, such as BertForMaskedLM, or call regard.record with gradient=f, where f(output) is the number to "
            "differentiate"
        )


def next_token_labels(inputs: dict[str, Any], prompt: int = 1) -> Int[Tensor, "1 T"]:
    """Returns the labels of one text for a Hugging Face model: those of its decoder, or of its only stack.

    The loss counts the tokens behind the first `prompt`.
    """
    if "decoder_input_ids" not in inputs:
        labels: Tensor = inputs["input_ids"].clone()
        labels[:, :prompt] = IGNORED
    else:
        # An encoder-decoder does not shift its labels: each stands where it is predicted, one place earlier.
        given = inputs["decoder_input_ids"]
        labels = torch.cat([given[:, 1:], torch.full_like(given[:, :1], IGNORED)], 1)
        labels[:, : prompt - 1] = IGNORED
    if bool((labels == IGNORED).all()):
        raise OptionError(TOO_SHORT)
    return labels


def maskable(ids: Sequence[int], special: Collection[int], visible: Sequence[int] | None = None) -> list[int]:
    """Returns the places of tokens that a masked language model is asked for: all but special and padded ones."""
    places = [n for n, token in enumerate(ids) if token not in special and (visible is None or visible[n])]
    if not places:
        raise OptionError("the text has only special tokens, so none can be masked and predicted")
    return places


def masked_losses(
    logits: Callable[[Int[Tensor, "N T"]], Float[Tensor, "N T W"]],
    ids: Int[Tensor, " T"],
    places: Sequence[int],
    mask: int,
) -> Iterator[Float[Tensor, ""]]:
    """Yields the parts of the masked language model's loss, some copies at a time; their sum is the mean.

    `logits` runs the model over copies of the text; `mask` is the id of the mask token.
    """
    together = max(1, TOKENS // len(ids))
    for at in torch.tensor(places, device=ids.device).split(together):
        rows = torch.arange(len(at), device=ids.device)
        copies = ids.repeat(len(at), 1)
        copies[rows, at] = mask
        predicted = logits(copies)[rows, at].float()
        yield functional.cross_entropy(predicted, ids[at], reduction="sum") / len(places)


def mask_token(tokenizer: Any) -> int | None:
    """Returns the id of the mask token of regard's or of Hugging Face's tokenizers; None where there is none."""
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "role"):
        token: int | None = tokenizer.role("mask")
        return token
    return getattr(tokenizer, "mask_token_id", None)


def require_mask_token(tokenizer: Any) -> int:
    """Returns the id of the mask token, or raises an error that says what is needed."""
    token = mask_token(tokenizer)
    if token is None:
        raise OptionError(
            "the loss of a masked language model masks each token in turn, and no mask token is known: give a "
            "tokenizer that has one, such as [MASK], or gradient=f, with f(output) the number to differentiate"
        )
    return token


def special_tokens(tokenizer: Any) -> set[int]:
    """Returns the ids of all special tokens of regard's or of Hugging Face's tokenizers."""
    if tokenizer is None:
        return set()
    if hasattr(tokenizer, "role"):
        return {tokenizer.id(name) for name in tokenizer.special}
    return {int(i) for i in tokenizer.all_special_ids}
