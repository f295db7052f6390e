"""The losses for gradients and for ablation.

For a causal language model the loss is the next-token cross entropy, computed in one pass. A masked language model
would see the token that it predicts, so each token is masked in turn, in its own copy of the text; the loss is the mean
cross entropy at the masked tokens (pseudo-log-likelihood; Salazar et al., 2020, arXiv:1910.14659). For an encoder that
predicts no tokens, each token is masked in turn too, and its loss is 1 − cos(a, b), where a is its final vector in the
masked text and b that in the text itself.
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

MAX_TOKENS_TOGETHER = 4096  # maximum number of tokens per batch of masked copies
IGNORED = -100  # label of tokens that transformers excludes from its loss
TOO_SHORT = "the next-token loss needs at least two tokens: give a longer text"
_LANGUAGE = re.compile(r"(CausalLM|LMHeadModel|MaskedLM|ConditionalGeneration)$")


def has_language_head(model: Any) -> bool:
    """Returns whether a Hugging Face model predicts tokens, judged by the name of its class."""
    return _LANGUAGE.search(type(model).__name__) is not None


def is_masked_model(model: Any) -> bool:
    """Returns whether a Hugging Face model is a masked (bidirectional) language model like BERT.

    The causal class of such a model, for example BertLMHeadModel, is bidirectional too unless config.is_decoder is set.
    """
    name = type(model).__name__
    if name.endswith("MaskedLM"):
        return True
    if not name.endswith(("CausalLM", "LMHeadModel")) or getattr(model.config, "is_decoder", False):
        return False
    return type(model.config) in import_transformers().MODEL_FOR_MASKED_LM_MAPPING


def is_encoder_of_vectors(model: Any) -> bool:
    """Returns whether a Hugging Face model is an encoder of the BERT kind without a head that predicts tokens."""
    config = model.config
    if has_language_head(model) or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return False
    return type(config) in import_transformers().MODEL_FOR_MASKED_LM_MAPPING


def require_language_head(model: Any) -> None:
    """Raises OptionError if a Hugging Face model does not predict tokens and so has no loss."""
    if not has_language_head(model):
        raise OptionError(
            f"{type(model).__name__} has no language model head, so it has no loss of its own: open a model that has "
            "one, such as BertForMaskedLM, or call regard.record with gradient=f, where f(output) is the number to "
            "differentiate"
        )


def next_token_labels(inputs: dict[str, Any], prompt_length: int = 1) -> Int[Tensor, "1 T"]:
    """Returns the labels of one text for a Hugging Face model, with the first `prompt_length` tokens ignored.

    The labels are the input ids, or for an encoder-decoder the decoder ids shifted left by one, as transformers
    expects.
    """
    if "decoder_input_ids" not in inputs:
        labels: Tensor = inputs["input_ids"].clone()
        labels[:, :prompt_length] = IGNORED
    else:
        # transformers does not shift the labels of an encoder-decoder, so they are shifted by one position here.
        ids = inputs["decoder_input_ids"]
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], 1)
        labels[:, : prompt_length - 1] = IGNORED
    if bool((labels == IGNORED).all()):
        raise OptionError(TOO_SHORT)
    return labels


def maskable_positions(ids: Sequence[int], special: Collection[int], visible: Sequence[int] | None = None) -> list[int]:
    """Returns the positions of the tokens to be masked and predicted: all but special tokens and padding."""
    positions = [n for n, token in enumerate(ids) if token not in special and (visible is None or visible[n])]
    if not positions:
        raise OptionError("the text has only special tokens, so none can be masked and predicted")
    return positions


def masked_losses(
    logits: Callable[[Int[Tensor, "N T"]], Float[Tensor, "N T W"]],
    ids: Int[Tensor, " T"],
    positions: Sequence[int],
    mask_id: int,
    seen: Float[Tensor, "T W"] | None = None,
) -> Iterator[Float[Tensor, ""]]:
    """Yields one term per batch of masked copies of the text; the terms add up to the mean loss.

    `logits` runs the model over a batch of copies; `mask_id` is the id of the mask token. For an encoder without a head
    `logits` gives its final vectors, and `seen` are those of the text without a mask.
    """
    batch = max(1, MAX_TOKENS_TOGETHER // len(ids))
    for at in torch.tensor(positions, device=ids.device).split(batch):
        rows = torch.arange(len(at), device=ids.device)
        copies = ids.repeat(len(at), 1)
        copies[rows, at] = mask_id
        predicted = logits(copies)[rows, at].float()
        if seen is None:
            loss = functional.cross_entropy(predicted, ids[at], reduction="sum")
        else:
            loss = (1 - functional.cosine_similarity(predicted, seen[at].float(), dim=-1)).sum()
        yield loss / len(positions)


def hub_masked_losses(model: Any, inputs: dict[str, Any], tokenizer: Any) -> Callable[[], Iterator[Float[Tensor, ""]]]:
    """Returns a function that yields the terms of the masked loss of a Hugging Face encoder, one per batch of copies.

    For an encoder without a head that predicts tokens, the final vectors of the unmasked text are computed here, once.
    """
    mask_id = require_mask_token(tokenizer)
    ids = inputs["input_ids"][0]
    visible = None
    if "attention_mask" in inputs:
        visible = inputs["attention_mask"][0].tolist()
    positions = maskable_positions(ids.tolist(), special_tokens(tokenizer), visible)
    others = {name: x for name, x in inputs.items() if name != "input_ids"}
    predicts = is_masked_model(model)

    def run(copies: Tensor) -> Tensor:
        expanded = {name: x.expand(len(copies), *x.shape[1:]) for name, x in others.items()}
        out: Tensor
        if predicts:
            out = model(input_ids=copies, **expanded).logits
        else:
            out = model(input_ids=copies, **expanded, output_hidden_states=True).hidden_states[-1]
        return out

    seen = None
    if not predicts:
        with torch.no_grad():
            seen = run(ids[None])[0]
    return lambda: masked_losses(run, ids, positions, mask_id, seen)


def mask_token(tokenizer: Any) -> int | None:
    """Returns the id of the mask token of a tokenizer (regard's or Hugging Face's); None if it has none."""
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "role"):
        token: int | None = tokenizer.role("mask")
        return token
    return getattr(tokenizer, "mask_token_id", None)


def require_mask_token(tokenizer: Any) -> int:
    """Returns the id of the mask token; raises OptionError if there is none."""
    token = mask_token(tokenizer)
    if token is None:
        raise OptionError(
            "the loss of a masked language model masks each token in turn, and no mask token is known: give a "
            "tokenizer that has one, such as [MASK], or gradient=f, with f(output) the number to differentiate"
        )
    return token


def special_tokens(tokenizer: Any) -> set[int]:
    """Returns the ids of all special tokens of a tokenizer (regard's or Hugging Face's)."""
    if tokenizer is None:
        return set()
    if hasattr(tokenizer, "role"):
        return {tokenizer.id(name) for name in tokenizer.special}
    return {int(i) for i in tokenizer.all_special_ids}
