"""Ablating heads: the model with one head's output set to zero, compared with the whole model.

If the model predicts tokens, the cost of a head is the increase of the mean loss in nats; for a masked language model
each token is masked in turn. Otherwise (or without a mask token) it is the relative change (L2 norm) of the final
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import OptionError
from regard.hub import recording_attention
from regard.hub.attention import Call
from regard.lens.models import RecordableModel
from regard.lens.recording.losses import (
    has_language_head,
    is_masked_model,
    mask_token,
    maskable_positions,
    masked_losses,
    require_mask_token,
    special_tokens,
)
from regard.lens.recording.maps import evaluation_mode
from regard.models import Decoder, Encoder, Model, Seq2Seq, token_loss
from regard.models.encoder import MaskedHead
from regard.nn.capture import forward_hooks

Progress = Callable[[int, int], None]  # called with the number of layers done, and of all layers


@torch.no_grad()
def ablate(recordable: RecordableModel, texts: Sequence[Any], progress: Progress | None = None) -> dict[str, Any]:
    """Returns the cost of each self-attention head, ablated one at a time.

    The result has the keys "measure" ("loss" or "change"), "whole" (the loss of the whole model; None for "change") and
    "heads", with one dict per head: {"layer", "side", "name", "head", "cost"}.
    """
    model = recordable.model
    runs = [make_run(recordable, text) for text in texts]
    if not runs:
        raise OptionError("ablation needs at least one text")
    with evaluation_mode(model):
        layers = self_attention_layers(recordable, texts[0])
        whole = [run() for run in runs]
        costs = []
        for n, (layer, heads) in enumerate(layers):
            for head in range(heads):
                with without_heads(model, {layer["name"]: [head]}):
                    cost = sum(added_cost(run(), before) for run, before in zip(runs, whole, strict=True)) / len(runs)
                costs.append({**layer, "head": head, "cost": round(cost, 6)})
            if progress is not None:
                progress(n + 1, len(layers))
    if whole[0].dim() > 0:
        return {"measure": "change", "whole": None, "heads": costs}
    return {"measure": "loss", "whole": sum(float(x) for x in whole) / len(whole), "heads": costs}


def added_cost(now: Tensor, before: Tensor) -> float:
    """Returns the increase of a loss, or the relative change (L2 norm) of hidden states."""
    if now.dim() == 0:
        return float(now - before)
    return float((now - before).norm() / before.norm())


def make_run(recordable: RecordableModel, text: Any) -> Callable[[], Tensor]:
    """Returns a function that runs the model over a text, and returns its loss or its final hidden states [T,width]."""
    tokens = torch.tensor([recordable.ids(text)], device=next(recordable.model.parameters()).device)
    if isinstance(recordable.model, Model):
        return _make_regard_run(recordable.model, recordable.tokenizer, tokens)
    return _make_hub_run(recordable.model, recordable.tokenizer, tokens)


def _make_regard_run(model: Model[Any], tokenizer: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """Returns the function that `make_run` returns, for one of regard's models and tokens [1,T]."""
    if isinstance(model, Seq2Seq):
        start = tokens.new_full((1, 1), model.config.start)
        return lambda: token_loss(model(tokens, torch.cat([start, tokens[:, :-1]], 1)), tokens)
    if isinstance(model, Decoder):
        return lambda: token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert isinstance(model, Encoder)
    if isinstance(model.head, MaskedHead) and mask_token(tokenizer) is not None:
        return _masked_loss(model, tokenizer, tokens[0])
    return lambda: model.vectors(tokens)[0]


def _make_hub_run(model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """Returns the function that `make_run` returns, for a Hugging Face model and tokens [1,T]."""
    if is_masked_model(model):
        if mask_token(tokenizer) is not None:
            return _masked_loss(lambda copies: model(input_ids=copies).logits, tokenizer, tokens[0])
        return lambda: model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
    if has_language_head(model):
        return lambda: model(input_ids=tokens, labels=tokens).loss.detach()
    if getattr(model.config, "is_encoder_decoder", False):  # the target is the source, as in record_one
        return lambda: model(input_ids=tokens, decoder_input_ids=tokens).last_hidden_state[0]
    return lambda: model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]


def _masked_loss(logits: Callable[[Tensor], Tensor], tokenizer: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Returns a function that computes the loss of masked tokens, each masked in turn."""
    mask_id = require_mask_token(tokenizer)
    positions = maskable_positions(ids.tolist(), special_tokens(tokenizer))
    return lambda: torch.stack(list(masked_losses(logits, ids, positions, mask_id))).sum()


def self_attention_layers(recordable: RecordableModel, text: Any) -> list[tuple[dict[str, Any], int]]:
    """Returns ({"layer", "side", "name"}, number of heads) of each self-attention module."""
    attentions = [a for a in recordable.record_one(text).attentions if a.kind == "self"]
    return [({"layer": a.layer, "side": a.side, "name": a.name}, a.heads) for a in attentions]


@contextmanager
def without_heads(model: Any, heads: Mapping[str, Collection[int]]) -> Iterator[None]:
    """Sets the output of some heads of each attention module that is named to zero while the context lasts.

    Heads of a Hugging Face model are removed in transformers' attention interface; raises OptionError at the end if the
    model did not call it for one of the modules.
    """
    if not isinstance(model, Model):
        remover = _HeadRemover(heads)
        with recording_attention(model, remover):
            yield
        if remover.removed != set(heads):
            raise OptionError(f"{type(model).__name__} makes its attention itself, so no head of it can be removed")
        return

    removed_of: dict[nn.Module, Collection[int]] = {}
    for name, removed in heads.items():
        mechanism = model.get_submodule(name).mechanism
        assert isinstance(mechanism, nn.Module)
        removed_of[mechanism] = removed

    def remove(mechanism: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return _zero_heads(out, 1, removed_of[mechanism])

    with forward_hooks(removed_of, remove):
        yield


class _HeadRemover:
    """An `AttentionRecorder` that stores nothing, and sets some heads of the modules that `heads` names to zero."""

    def __init__(self, heads: Mapping[str, Collection[int]]) -> None:
        self.heads = heads
        self.removed: set[str] = set()

    def begin(self, call: Call) -> None:
        """Does nothing: the call is not changed."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Ignores the weights."""

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output [B,T,H,V]; in the chosen modules the chosen heads are set to zero."""
        if call.name not in self.heads:
            return out
        self.removed.add(call.name)
        return _zero_heads(out, 2, self.heads[call.name])


def _zero_heads(out: Tensor, dim: int, heads: Collection[int]) -> Tensor:
    return out.index_fill(dim, torch.tensor(list(heads), device=out.device), 0)
