"""What a head is worth: the model with the head's output set to zero, against the whole model.

Where a model predicts tokens, the cost is the rise of the mean loss in nats; a masked language model is asked for each
token in turn, masked. Where a model predicts none, or has no mask token, the cost is how far its last vectors move, as
a part of their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from regard.lens.trace.formulas import Dense
from regard.models import Decoder, Encoder, Model, Seq2Seq, token_loss
from regard.models.encoder import MaskedHead
from regard.nn.capture import forward_hooks

Progress = Callable[[int, int], None]  # how many layers are done, and of how many


@torch.no_grad()
def ablate(recordable: RecordableModel, texts: Sequence[Any], progress: Progress | None = None) -> dict[str, Any]:
    """Returns the cost of each head of self-attention, one removed at a time.

    The result is {"measure": "loss" or "change", "whole": the loss of the whole model, "heads": [{…, "cost"}]}.
    """
    model = recordable.model
    runs = [_run(recordable, text) for text in texts]
    if not runs:
        raise OptionError("ablation needs at least one text")
    with evaluation_mode(model):
        layers = _layers(recordable, texts[0])
        whole = [run() for run in runs]
        costs = []
        for n, (layer, heads) in enumerate(layers):
            for head in range(heads):
                with _without(model, layer["name"], head):
                    cost = sum(_cost(run(), before) for run, before in zip(runs, whole, strict=True)) / len(runs)
                costs.append({**layer, "head": head, "cost": round(cost, 6)})
            if progress is not None:
                progress(n + 1, len(layers))
    if whole[0].dim() > 0:
        return {"measure": "change", "whole": None, "heads": costs}
    return {"measure": "loss", "whole": sum(float(x) for x in whole) / len(whole), "heads": costs}


def _cost(now: Tensor, before: Tensor) -> float:
    """Returns the rise of a loss, or how far vectors moved as a part of their length."""
    if now.dim() == 0:
        return float(now - before)
    return float((now - before).norm() / before.norm())


def _run(recordable: RecordableModel, text: Any) -> Callable[[], Tensor]:
    """Returns a function that computes the loss of a text, or the vectors of its tokens, each time it is called."""
    tokens = torch.tensor([recordable.ids(text)], device=next(recordable.model.parameters()).device)
    if isinstance(recordable.model, Model):
        return _run_regard(recordable.model, recordable.tokenizer, tokens)
    return _run_hub(recordable.model, recordable.tokenizer, tokens)


def _run_regard(model: Model[Any], tokenizer: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """Returns the function of `_run` for one of regard's models and tokens [1,T]."""
    if isinstance(model, Seq2Seq):
        start = tokens.new_full((1, 1), model.config.start)
        return lambda: token_loss(model(tokens, torch.cat([start, tokens[:, :-1]], 1)), tokens)
    if isinstance(model, Decoder):
        return lambda: token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert isinstance(model, Encoder)
    if isinstance(model.head, MaskedHead) and mask_token(tokenizer) is not None:
        return _masked_loss(model, tokenizer, tokens[0])
    return lambda: model.vectors(tokens)[0]


def _run_hub(model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """Returns the function of `_run` for a Hugging Face model and tokens [1,T]."""
    if is_masked_model(model):
        if mask_token(tokenizer) is not None:
            return _masked_loss(lambda copies: model(input_ids=copies).logits, tokenizer, tokens[0])
        return lambda: model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
    if has_language_head(model):
        return lambda: model(input_ids=tokens, labels=tokens).loss.detach()
    if getattr(model.config, "is_encoder_decoder", False):  # it writes what it reads, as when it is recorded
        return lambda: model(input_ids=tokens, decoder_input_ids=tokens).last_hidden_state[0]
    return lambda: model(input_ids=tokens).last_hidden_state[0]


def _masked_loss(logits: Callable[[Tensor], Tensor], tokenizer: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Returns a function that computes the loss of masked tokens, each masked in turn."""
    mask = require_mask_token(tokenizer)
    places = maskable_positions(ids.tolist(), special_tokens(tokenizer))
    return lambda: torch.stack(list(masked_losses(logits, ids, places, mask))).sum()


def _layers(recordable: RecordableModel, text: Any) -> list[tuple[dict[str, Any], int]]:
    """Returns where each self-attention is, and how many heads it has."""
    attentions = [a for a in recordable.record_one(text).attentions if a.kind == "self"]
    if any(isinstance(a.formula, Dense) and a.q is None for a in attentions):
        raise OptionError(f"{recordable.card.cls} makes its attention itself, so no head of it can be removed")
    return [({"layer": a.layer, "side": a.side, "name": a.name}, a.heads) for a in attentions]


@contextmanager
def _without(model: Any, name: str, head: int) -> Iterator[None]:
    """Sets the output of one head to zero while the context lasts."""
    if not isinstance(model, Model):
        with recording_attention(model, _HeadRemover(name, head)):
            yield
        return

    def remove(mechanism: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return _zero_head(out, 1, head)

    mechanism = model.get_submodule(name).mechanism
    assert isinstance(mechanism, nn.Module)
    with forward_hooks([mechanism], remove):
        yield


class _HeadRemover:
    """A recorder that keeps nothing and sets one head of one module to zero."""

    def __init__(self, name: str, head: int) -> None:
        self.name = name
        self.head = head

    def begin(self, call: Call) -> None:
        """Leaves the call as it is."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Keeps no weights."""

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output [B,T,H,V], without the head where it is the module's."""
        return _zero_head(out, 2, self.head) if call.name == self.name else out


def _zero_head(out: Tensor, dim: int, head: int) -> Tensor:
    return out.index_fill(dim, torch.tensor([head], device=out.device), 0)
