"""Hugging Face models before the laws: those of whole models, and that each attention layer is regard's reference."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.checking.models import MODEL_LAWS, ModelLaw, Trial, allowed
from regard.errors import HubError, OptionError
from regard.hub.attention import recording_attention, replacement_in
from regard.hub.calls import AttentionReplacement, Call
from regard.hub.replacement import places
from regard.kernels import plain
from regard.laws import DoesNotApply, Finding
from regard.laws.case import difference, worst
from regard.mechanisms import Softmax
from regard.registry import accepts

_COPIES: WeakKeyDictionary[Any, dict[torch.dtype, Any]] = WeakKeyDictionary()


class HubSubject(Trial):
    """A trial of a Hugging Face model that reads tokens. The model itself stays as it is."""

    def __init__(self, model: Any, seed: int = 0, dtype: torch.dtype = torch.float32, B: int = 3, T: int = 11):
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            raise OptionError(f"{type(model).__name__} reads {model.main_input_name}; the laws are asked with tokens")
        self.model, self.draw = _converted(model, dtype), torch.Generator().manual_seed(seed)
        self.config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.two_sided = bool(getattr(model.config, "is_encoder_decoder", False))
        parts = {p.part for p in places(model)}
        self.writes = self.two_sided or ("decoder" in parts if parts else model.can_generate())
        self.takes_positions = accepts(model.forward, "position_ids")
        # Some count positions from the ids themselves; of the rest, those that cannot be told them know one side only.
        self.counts = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
        self.sides = ("left", "right") if self.counts or self.takes_positions else ("right",)
        self.T = T
        self.tokens = self.random(B, T)
        self.source = self.random(B, T + 2) if self.two_sided else None
        self.limit = max(allowed(dtype), allowed(torch.float32))  # many compute norms and softmax in float32 anyway

    def finding(self, got: Tensor, want: Tensor, what: str) -> Finding:
        """Its depth is not known: before more than usual is called wrong, rounding is measured."""
        error = difference(got, want)
        if error > self.limit:
            self.limit = max(self.limit, 10 * self.sensitivity())
        return Finding(error, self.limit, what)

    def random(self, *shape: int, source: bool = False) -> Tensor:
        special = {x for n in ("pad", "bos", "eos", "mask") for x in _ids(getattr(self.config, f"{n}_token_id", None))}
        known = [i for i in range(min(int(self.config.vocab_size), 4096)) if i not in special]
        picked = torch.randint(0, len(known), shape, generator=self.draw)
        return torch.tensor(known)[picked].to(self.model.device)

    def padding(self, *shape: int, source: bool = False) -> Tensor:
        blank = _ids(getattr(self.config, "pad_token_id", None))
        return torch.full(shape, blank[0] if blank else 0, device=self.model.device)

    @torch.no_grad()
    def whole(self, tokens: Tensor, visible: Tensor | None = None, rows: Tensor | slice = slice(None)) -> Tensor:
        if self.source is not None:
            return self._run(self.source[rows], decoder_input_ids=tokens, **_seen(visible, "decoder_attention_mask"))
        return self._run(tokens, **_seen(visible), **self._positions(tokens, visible))

    @torch.no_grad()
    def pieces(self, tokens: Tensor, sizes: list[int], visible: Tensor | None = None) -> Tensor:
        self.must_write()
        if self.source is not None:
            return self._written(tokens, sizes, visible, *self._read(self.source, None))
        return self._written(tokens, sizes, visible)

    @torch.no_grad()
    def continued(self, prompt: Tensor, visible: Tensor | None, new: Tensor) -> Tensor:
        if self.two_sided:
            start = getattr(self.config, "decoder_start_token_id", None) or 0
            tokens = torch.cat([torch.full_like(new[:, :1], start), new], 1)
            return self._written(tokens, [1] * tokens.shape[1], None, *self._read(prompt, visible))
        shown = None if visible is None else torch.cat([visible, torch.ones_like(new).bool()], 1)
        if shown is not None and "left" not in self.sides:
            raise DoesNotApply("it cannot be told positions, so prompts cannot be padded on the left")
        tokens = torch.cat([prompt, new], 1)
        out = self._written(tokens, [prompt.shape[1]] + [1] * new.shape[1], shown)
        return out[:, prompt.shape[1] - 1 :]

    def _written(
        self, tokens: Tensor, sizes: list[int], visible: Tensor | None, source: Any = None, seen: Any = None
    ) -> Tensor:
        """The vectors of some tokens, piece by piece through the model's cache."""
        out: list[Tensor] = []
        cache, start = None, 0
        name = "attention_mask" if source is None else "decoder_attention_mask"
        for part in tokens.split(sizes, 1):
            stop = start + part.shape[1]
            more: dict[str, Any] = _seen(None if visible is None else visible[:, :stop], name)
            if source is None:
                more |= {n: x[:, start:stop] for n, x in self._positions(tokens, visible).items()} | {"input_ids": part}
            else:
                more |= {"encoder_outputs": source, "decoder_input_ids": part} | (seen or {})
            found = self.model(**more, past_key_values=cache, use_cache=True)
            cache, start = found.past_key_values, stop
            out.append(_vectors(found))
        return torch.cat(out, 1)

    def _read(self, source: Tensor, visible: Tensor | None) -> tuple[Any, dict[str, Any]]:
        seen = _seen(visible)
        return self.model.get_encoder()(source, **seen), seen

    def _run(self, tokens: Tensor, **more: Any) -> Tensor:
        found = self.model(input_ids=tokens, **more)
        out = _vectors(found)
        asked = more.get("decoder_input_ids", tokens)
        if out.dim() == 3 and out.shape[1] == asked.shape[1]:
            return out
        return _vectors(self.model.base_model(input_ids=tokens, **more))  # one answer for a text: look beneath it

    def _positions(self, tokens: Tensor, visible: Tensor | None) -> dict[str, Tensor]:
        if self.counts or visible is None or not self.takes_positions:
            return {}
        return {"position_ids": (visible.long().cumsum(1) - 1).clamp(min=0)}

    @torch.no_grad()
    def heard(self) -> list[tuple[str, Finding, Finding]]:
        """For each attention layer: how far its output is from the reference, and its rows' sums from one."""
        ear = _Comparing(self.limit)
        with recording_attention(self.model, ear):
            self.whole(self.tokens)
        if not ear.found:
            raise DoesNotApply(f"{type(self.model).__name__} makes its attention itself: nothing can be heard")
        return ear.found


class _Comparing:
    """A recorder that compares each call with regard's own mechanism on the same q, k and v."""

    def __init__(self, limit: float) -> None:
        self.limit, self.sums = limit, 0.0
        self.found: list[tuple[str, Finding, Finding]] = []

    def begin(self, call: Call) -> None:
        self.sums = 0.0

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        sums = weights.double().sum(-1)
        self.sums = max(self.sums, difference(sums, torch.ones_like(sums)))

    def end(self, call: Call, out: Tensor) -> Tensor:
        own = replacement_in(call.module)
        reference = plain(Softmax() if own is None else copy.deepcopy(own.mechanism))
        try:
            want, _ = AttentionReplacement(reference, call.name, call.cross)(call)
        except HubError as reason:
            raise DoesNotApply(str(reason)) from None
        apart = Finding(difference(out, want), self.limit, f"{call.name}, its output on its own q, k and v")
        self.found.append((call.name, apart, Finding(self.sums, self.limit, f"{call.name}, sums of rows")))
        return out


def layers_are_the_reference(subject: Trial) -> Finding:
    """each attention layer = regard's reference on the q, k and v that the layer was given"""
    assert isinstance(subject, HubSubject)
    return worst(found for _, found, _ in subject.heard())


def rows_sum_to_one(subject: Trial) -> Finding:
    """the weights of every query sum to one over the keys"""
    assert isinstance(subject, HubSubject)
    return worst(found for _, _, found in subject.heard())


HUB_LAWS: dict[str, ModelLaw] = {**MODEL_LAWS, "reference": layers_are_the_reference, "rows": rows_sum_to_one}


def from_transformers(thing: Any) -> bool:
    """Whether something is a model of transformers, without importing it."""
    known = "transformers.modeling_utils.PreTrainedModel"
    return any(f"{c.__module__}.{c.__name__}" == known for c in type(thing).__mro__)


def _converted(model: Any, dtype: torch.dtype) -> Any:
    """The model in that precision; a copy is made once and kept as long as the model is."""
    if model.dtype == dtype and not model.training:
        return model
    copies = _COPIES.setdefault(model, {})
    if dtype not in copies:
        copies[dtype] = copy.deepcopy(model).to(dtype).eval()
    return copies[dtype]


def _seen(visible: Tensor | None, name: str = "attention_mask") -> dict[str, Any]:
    return {} if visible is None else {name: visible.long()}


def _vectors(found: Any) -> Tensor:
    out: Tensor = found.logits if getattr(found, "logits", None) is not None else found.last_hidden_state
    return out


def _ids(x: Any) -> list[int]:
    return [] if x is None else [int(i) for i in x] if isinstance(x, list | tuple) else [int(x)]
