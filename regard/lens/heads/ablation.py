"""Ablating heads: the model with one head's output set to zero, compared with the whole model.

If the model predicts tokens, the cost of a head is the increase of the mean loss in nats. No loss is of tokens that the
model sees: for a masked language model each token is masked in turn. For an encoder-decoder it is the loss of the
target; if none is given, the whole model writes one, and the labels are its own likeliest tokens at each position of
it. If the model predicts no tokens (or has no mask token), the cost is the relative change (L2 norm) of its final
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
from regard.hub.memories import MemoryCall
from regard.lens.models import RecordableModel, Sample, as_sample
from regard.lens.recording.hub_inputs import is_encoder_decoder
from regard.lens.recording.losses import (
    has_language_head,
    hub_masked_losses,
    is_masked_model,
    mask_token,
    next_token_labels,
)
from regard.lens.recording.maps import evaluation_mode
from regard.lens.recording.regard_models import encoder_masked_losses
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
    if not texts:
        raise OptionError("ablation needs at least one text")
    with evaluation_mode(model):
        runs = [make_run(recordable, text) for text in texts]
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


def add_costs(heads: Sequence[dict[str, Any]], ablation: dict[str, Any]) -> None:
    """Adds to the dict of each head, as `examine` returns them, its cost under the key "cost"."""
    costs = {(row["side"], row["layer"], row["head"]): row["cost"] for row in ablation["heads"]}
    for head in heads:
        head["cost"] = costs[head["side"], head["layer"], head["head"]]


def added_cost(now: Tensor, before: Tensor) -> float:
    """Returns the increase of a loss, or the relative change (L2 norm) of hidden states."""
    if now.dim() == 0:
        return float(now - before)
    return float((now - before).norm() / before.norm())


def make_run(recordable: RecordableModel, text: Any) -> Callable[[], Tensor]:
    """Returns a function that runs the model over a sample and returns its loss, or its last hidden states [T,D]."""
    sample = as_sample(text)
    if isinstance(recordable.model, Model):
        return _make_regard_run(recordable, recordable.model, sample)
    return _make_hub_run(recordable, recordable.model, sample)


def _make_regard_run(recordable: RecordableModel, model: Model[Any], sample: Sample) -> Callable[[], Tensor]:
    """Returns the function that `make_run` returns, for one of regard's models."""
    tokens = torch.tensor([recordable.ids(sample)], device=model.device)
    if isinstance(model, Seq2Seq):
        target = torch.tensor([_decoder_ids(recordable, sample)], device=model.device)
        if sample.target is not None:
            return lambda: token_loss(model(tokens, target[:, :-1]), target[:, 1:])
        written = model(tokens, target).argmax(-1)
        return lambda: token_loss(model(tokens, target), written)
    if isinstance(model, Decoder):
        return lambda: token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert isinstance(model, Encoder)
    if isinstance(model.head, MaskedHead) and mask_token(recordable.tokenizer) is not None:
        return _summed(encoder_masked_losses(model, tokens[0], recordable.tokenizer))
    return lambda: model.vectors(tokens)[0]


def _make_hub_run(recordable: RecordableModel, model: Any, sample: Sample) -> Callable[[], Tensor]:
    """Returns the function that `make_run` returns, for a Hugging Face model."""
    inputs, _ = recordable.inputs(sample)
    if is_masked_model(model):
        if mask_token(recordable.tokenizer) is not None:
            return _summed(hub_masked_losses(model, inputs, recordable.tokenizer))
        return lambda: model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    if not is_encoder_decoder(model):
        if has_language_head(model):
            labels = next_token_labels(inputs)
            return lambda: model(**inputs, labels=labels).loss.detach()
        return lambda: model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    inputs["decoder_input_ids"] = inputs["input_ids"].new_tensor([_decoder_ids(recordable, sample)])
    if not has_language_head(model):
        return lambda: model(**inputs).last_hidden_state[0]
    labels = model(**inputs).logits.argmax(-1)
    if sample.target is not None:
        labels = next_token_labels(inputs)
    return lambda: model(**inputs, labels=labels).loss.detach()


def _decoder_ids(recordable: RecordableModel, sample: Sample) -> list[int]:
    """Returns the decoder's input ids of an encoder-decoder: the start token, then the target or what it generates."""
    ids = recordable.record_one(sample).sequences[-1].ids
    assert ids is not None
    return ids


def _summed(losses: Callable[[], Iterator[Tensor]]) -> Callable[[], Tensor]:
    """Returns a function that computes the sum of the terms of a loss."""
    return lambda: torch.stack(list(losses())).sum()


def self_attention_layers(recordable: RecordableModel, text: Any) -> list[tuple[dict[str, Any], int]]:
    """Returns ({"layer", "side", "name"}, number of heads) of each self-attention module."""
    attentions = [a for a in recordable.record_one(text).attentions if a.kind == "self"]
    return [({"layer": a.layer, "side": a.side, "name": a.name}, a.heads) for a in attentions]


@contextmanager
def without_heads(model: Any, heads: Mapping[str, Collection[int]]) -> Iterator[None]:
    """Sets the output of some heads to zero while the context lasts; `heads` has their numbers by module name.

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
    with silenced(removed_of):
        yield


@contextmanager
def silenced(removed_of: Mapping[nn.Module, Collection[int]]) -> Iterator[None]:
    """Sets the output of heads of regard's layers to zero while the context lasts; mechanisms name the layers."""

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

    def memory(self, call: MemoryCall, out: Tensor) -> Tensor:
        """Returns the output of a layer with a memory, as `end` does."""
        return self.end(call, out)

    def end(self, call: Call | MemoryCall, out: Tensor) -> Tensor:
        """Returns the output [B,T,H,V]; in the chosen modules the chosen heads are set to zero."""
        if call.name not in self.heads:
            return out
        self.removed.add(call.name)
        return _zero_heads(out, 2, self.heads[call.name])


def _zero_heads(out: Tensor, dim: int, heads: Collection[int]) -> Tensor:
    return out.index_fill(dim, torch.tensor(list(heads), device=out.device), 0)
