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
    maskable,
    masked_losses,
    require_mask_token,
    special_tokens,
)
from regard.lens.recording.maps import evaluating
from regard.lens.trace.formulas import Dense
from regard.models import Decoder, Encoder, Model, Seq2Seq, token_loss
from regard.models.encoder import MaskedHead

Told = Callable[[int, int], None]


@torch.no_grad()
def ablate(subject: RecordableModel, texts: Sequence[Any], told: Told | None = None) -> dict[str, Any]:
    """The cost of each head of self-attention, one removed at a time: {"measure", "whole", "heads": [{…, "cost"}]}."""
    model = subject.model
    runs = [_run(subject, text) for text in texts]
    if not runs:
        raise OptionError("ablation needs at least one text")
    with evaluating(model):
        places = _places(subject, texts[0])
        whole = [run() for run in runs]
        measure = "loss" if whole[0].dim() == 0 else "change"
        found = []
        for n, (place, heads) in enumerate(places):
            for head in range(heads):
                with _without(model, place["name"], head):
                    cost = sum(_cost(run(), before) for run, before in zip(runs, whole, strict=True)) / len(runs)
                found.append({**place, "head": head, "cost": round(cost, 6)})
            if told is not None:
                told(n + 1, len(places))
    total = sum(float(x) for x in whole) / len(whole) if measure == "loss" else None
    return {"measure": measure, "whole": total, "heads": found}


def _cost(now: Tensor, before: Tensor) -> float:
    return float(now - before) if now.dim() == 0 else float((now - before).norm() / before.norm())


def _run(subject: RecordableModel, text: Any) -> Callable[[], Tensor]:
    """Returns a function that computes the loss of a text, or the vectors of its tokens, each time it is called."""
    tokens = torch.tensor([subject.ids(text)], device=next(subject.model.parameters()).device)
    if isinstance(subject.model, Model):
        return _run_regard(subject.model, subject.tokenizer, tokens)
    return _run_foreign(subject.model, subject.tokenizer, tokens)


def _run_regard(model: Model[Any], tokenizer: Any, tokens: Tensor) -> Callable[[], Tensor]:
    if isinstance(model, Seq2Seq):
        start = tokens.new_full((1, 1), model.config.start)
        return lambda: token_loss(model(tokens, torch.cat([start, tokens[:, :-1]], 1)), tokens)
    if isinstance(model, Decoder):
        return lambda: token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert isinstance(model, Encoder)
    if isinstance(model.head, MaskedHead) and mask_token(tokenizer) is not None:
        return _masked_loss(model, tokenizer, tokens[0])
    return lambda: model.vectors(tokens)[0]


def _run_foreign(model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Tensor]:
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
    places = maskable(ids.tolist(), special_tokens(tokenizer))
    return lambda: torch.stack(list(masked_losses(logits, ids, places, mask))).sum()


def _places(subject: RecordableModel, text: Any) -> list[tuple[dict[str, Any], int]]:
    """Every self-attention: where it is, and how many heads it has."""
    found = [a for a in subject.read(text).attentions if a.kind == "self"]
    if any(isinstance(a.formula, Dense) and a.q is None for a in found):
        raise OptionError(f"{subject.card.cls} makes its attention itself, so no head of it can be removed")
    return [({"layer": a.layer, "side": a.side, "name": a.name}, a.heads) for a in found]


@contextmanager
def _without(model: Any, name: str, head: int) -> Iterator[None]:
    """The model without one head."""
    if isinstance(model, Model):

        def silence(mechanism: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
            return out.index_fill(1, torch.tensor([head], device=out.device), 0)

        mechanism = model.get_submodule(name).mechanism
        assert isinstance(mechanism, nn.Module)
        hook = mechanism.register_forward_hook(silence)
        try:
            yield
        finally:
            hook.remove()
        return

    class Remove(_Deaf):
        def end(self, call: Call, out: Tensor) -> Tensor:
            return out.index_fill(2, torch.tensor([head], device=out.device), 0) if call.name == name else out

    with recording_attention(model, Remove()):
        yield


class _Deaf:
    """A recorder that changes nothing."""

    def begin(self, call: Call) -> None:
        pass

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        pass

    def end(self, call: Call, out: Tensor) -> Tensor:
        return out
