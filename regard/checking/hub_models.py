"""Checking Hugging Face models: the laws of whole models, and that each attention layer equals regard's reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.checking import edges
from regard.checking.models import MODEL_LAWS, ModelLaw, Trial, rounding_limit
from regard.errors import HubError
from regard.hub.attention import recording_attention
from regard.hub.calls import AttentionReplacement, Call
from regard.hub.masks import watching_for_documents
from regard.hub.replacement import places
from regard.kernels import plain
from regard.laws import DoesNotApply, Finding
from regard.laws.case import CouldNotBeAsked, difference, worst
from regard.mechanisms import Mechanism, Softmax
from regard.registry import Registry, accepts

_COPIES: WeakKeyDictionary[Any, dict[torch.dtype, Any]] = WeakKeyDictionary()


class HubSubject(Trial):
    """A trial of a Hugging Face model. The model itself stays as it is.

    The model reads tokens, or images in place of tokens, or, as an encoder-decoder, sound as the source of its tokens.
    """

    def __init__(self, model: Any, seed: int = 0, dtype: torch.dtype = torch.float32, B: int = 3, T: int = 11):
        self.input_name = getattr(model, "main_input_name", "input_ids")
        if self.input_name not in ("input_ids", "pixel_values", "input_features"):
            raise CouldNotBeAsked(
                f"{type(model).__name__} reads {self.input_name}; the laws are asked with tokens, images or sound"
            )
        self.model = _convert(model, dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.config = model.config
        if hasattr(model.config, "get_text_config"):
            self.config = model.config.get_text_config()
        self.two_sided = bool(getattr(model.config, "is_encoder_decoder", False))
        parts = {p.part for p in places(model)}
        self.is_decoder = self.two_sided or "decoder" in parts
        if not parts and not self.two_sided:  # its attention cannot be seen from outside
            self.is_decoder = model.can_generate()
        self.takes_positions = accepts(model.forward, "position_ids")
        # Some compute positions from the ids themselves. Others can be padded on the left only if they take positions.
        self.counts = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
        self.padding_sides = ("right",)
        self.cache_name = "past_key_values"
        if accepts(model.forward, "cache_params"):  # state-space models call it so, and have no positions
            self.cache_name = "cache_params"
        if self.counts or self.takes_positions or self.cache_name == "cache_params":
            self.padding_sides = ("left", "right")
        self.longest = _find_length(self.config)
        self.T = T
        self.source = None
        if self.input_name == "pixel_values":
            self.padding_sides = ()
            self.tokens = self._draw_images(B)
        else:
            self.tokens = self.draw_tokens(B, T)
        if self.two_sided:
            self.source = self.draw_tokens(B, T + 2)
            if self.input_name == "input_features":
                self.source = self._draw_sound(B)
        # Many compute norms and softmax in float32 anyway.
        self.limit = max(rounding_limit(dtype), rounding_limit(torch.float32))

    def compare(self, got: Tensor, want: Tensor, what: str) -> Finding:
        """Returns the Finding of two outputs: their difference, relative to the largest value, and its limit.

        If the difference exceeds the usual limit, the limit is raised to ten times the measured effect of rounding, as
        the depth of the model is not known.
        """
        error = difference(got, want)
        if error > self.limit:
            self.limit = max(self.limit, 10 * self.measure_sensitivity(self.tokens))
        return Finding(error, self.limit, what)

    def draw_tokens(self, *shape: int, source: bool = False) -> Tensor:
        if self.input_name == "pixel_values":
            raise DoesNotApply("it reads images and no tokens")
        special = {x for n in ("pad", "bos", "eos", "mask") for x in _ids(getattr(self.config, f"{n}_token_id", None))}
        known = [i for i in range(min(int(self.config.vocab_size), 4096)) if i not in special]
        picked = torch.randint(0, len(known), shape, generator=self.generator)
        return torch.tensor(known)[picked].to(self.model.device)

    def _draw_images(self, B: int) -> Tensor:
        """Returns random images [B,C,N,N] of the size that the model reads."""
        size = self.config.image_size
        return torch.randn(B, self.config.num_channels, size, size, generator=self.generator).to(self._dtype_device())

    def _draw_sound(self, B: int) -> Tensor:
        """Returns random spectra [B,M,N] of the length that the model reads: two frames for each position."""
        frames = 2 * self.config.max_source_positions
        return torch.randn(B, self.config.num_mel_bins, frames, generator=self.generator).to(self._dtype_device())

    def _dtype_device(self) -> Tensor:
        """Returns a parameter of the model, whose dtype and device its inputs take."""
        parameter: Tensor = next(self.model.parameters())
        return parameter

    def draw_padding(self, *shape: int, source: bool = False) -> Tensor:
        blank = [*_ids(getattr(self.config, "pad_token_id", None)), 0]
        return torch.full(shape, blank[0], device=self.model.device)

    def cut_padded(self, n: int) -> list[int]:
        """Returns the sizes of a prompt, which padding belongs to, and of steps of one token each.

        In a step of one token, transformers' state-space models ignore the mask.
        """
        prompt = min(n, 3 + n // 2)
        return [prompt] + [1] * (n - prompt)

    @torch.no_grad()
    def run_whole(self, tokens: Tensor, visible: Tensor | None = None, rows: Tensor | slice = slice(None)) -> Tensor:
        if self.source is not None:
            return self._run(self.source[rows], decoder_input_ids=tokens, **_seen(visible, "decoder_attention_mask"))
        return self._run(tokens, **_seen(visible), **self._positions(tokens, visible))

    @torch.no_grad()
    def run_pieces(self, tokens: Tensor, sizes: list[int], visible: Tensor | None = None) -> Tensor:
        self.require_decoder()
        if self.source is not None:
            return self._run_cached(tokens, sizes, visible, *self._encode(self.source, None))
        return self._run_cached(tokens, sizes, visible)

    @torch.no_grad()
    def run_continuation(self, prompt: Tensor, visible: Tensor | None, new: Tensor) -> Tensor:
        if self.two_sided:
            start = getattr(self.config, "decoder_start_token_id", None) or 0
            tokens = torch.cat([torch.full_like(new[:, :1], start), new], 1)
            return self._run_cached(tokens, [1] * tokens.shape[1], None, *self._encode(prompt, visible))
        shown = None
        if visible is not None:
            if "left" not in self.padding_sides:
                raise DoesNotApply("it cannot be told positions, so prompts cannot be padded on the left")
            shown = torch.cat([visible, torch.ones_like(new).bool()], 1)
        tokens = torch.cat([prompt, new], 1)
        out = self._run_cached(tokens, [prompt.shape[1]] + [1] * new.shape[1], shown)
        return out[:, prompt.shape[1] - 1 :]

    def _run_cached(
        self, tokens: Tensor, sizes: list[int], visible: Tensor | None, source: Any = None, seen: Any = None
    ) -> Tensor:
        """Returns the vectors of some tokens, piece by piece through the model's cache.

        `source` is what the encoder made of an encoder-decoder's source, `seen` the mask of that source.
        """
        out: list[Tensor] = []
        cache = None
        start = 0
        positions = self._positions(tokens, visible)
        for part in tokens.split(sizes, 1):
            stop = start + part.shape[1]
            so_far = None
            if visible is not None:
                so_far = visible[:, :stop]
            if source is None:
                options = _seen(so_far) | {n: x[:, start:stop] for n, x in positions.items()} | {"input_ids": part}
            else:
                options = _seen(so_far, "decoder_attention_mask") | (seen or {})
                options |= {"encoder_outputs": source, "decoder_input_ids": part}
            found = self.model(**options, **{self.cache_name: cache}, use_cache=True)
            cache = getattr(found, self.cache_name)
            start = stop
            out.append(_vectors(found))
        return torch.cat(out, 1)

    def _encode(self, source: Tensor, visible: Tensor | None) -> tuple[Any, dict[str, Any]]:
        """Returns what the encoder makes of a source, and the mask of that source as an option."""
        seen = _seen(visible)
        return self.model.get_encoder()(source, **seen), seen

    def _run(self, tokens: Tensor, **more: Any) -> Tensor:
        """Returns one vector for each token that was asked for, from a whole pass."""
        found = self.model(**{self.input_name: tokens}, **more)
        out = _vectors(found)
        asked = more.get("decoder_input_ids", tokens)
        if out.dim() == 3 and (out.shape[1] == asked.shape[1] or self.input_name == "pixel_values"):
            return out
        # The head gives one vector for a whole text or image: its base model gives one for each token.
        base = self.model.base_model
        return _vectors(base(**{self.input_name: tokens}, **more))

    @torch.no_grad()
    def run_packed(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.source is not None or not self.is_decoder or not self.takes_positions:
            raise DoesNotApply("it cannot be told where a document begins, so it reads one document a row")
        positions = edges.restart_positions(lengths, len(tokens), tokens.device)
        with watching_for_documents() as separated:
            # Transformers looks for documents only in a call without a cache.
            out = self._run(tokens, position_ids=positions, use_cache=False)
        if not separated:
            raise DoesNotApply("it does not look for documents in position_ids, so it reads one document a row")
        return out

    def edges(self) -> dict[int, str]:
        if self.input_name == "pixel_values":
            raise DoesNotApply("it reads images and no tokens")
        found = {edges.CHUNK: f"{edges.CHUNK} tokens"}
        for name in ("chunk_size", "attention_chunk_size"):
            n = getattr(self.config, name, None)
            if isinstance(n, int):
                found[n] = f"the chunk of {n}"
        for name in ("conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv"):
            n = getattr(self.config, name, None)
            if isinstance(n, int):
                found[n] = f"the convolution of {n}"
        found |= {w: f"the window of {w}" for _, _, w in self.windows() if w is not None}
        return edges.choose_edges(found, self.longest)

    def windows(self) -> list[tuple[str, nn.Module, int | None]]:
        part = "decoder" if self.is_decoder else "encoder"
        layers = [p for p in places(self.model) if p.part == part]
        return [(p.name, p.module, _find_window(p.module, self.config)) for p in layers]

    def _positions(self, tokens: Tensor, visible: Tensor | None) -> dict[str, Tensor]:
        """Returns the positions of padded tokens, counted from the first visible one, for a model that takes them."""
        if self.counts or visible is None or not self.takes_positions:
            return {}
        return {"position_ids": (visible.long().cumsum(1) - 1).clamp(min=0)}

    @torch.no_grad()
    def compare_layers(self) -> list[LayerFindings]:
        """Returns how far each attention layer is from regard's reference, and its rows from a sum of one."""
        recorder = _LayerComparison(self.limit)
        with recording_attention(self.model, recorder):
            self.run_whole(self.tokens)
        if not recorder.found:
            raise DoesNotApply(f"{type(self.model).__name__} makes its attention itself, so it cannot be recorded")
        return recorder.found


class LayerFindings(NamedTuple):
    """How far the output of a layer is from the reference, and how far the sums of its rows are from one.

    `sums` is None if rows need not sum to one: the layer has sinks, or its mechanism does not divide by a sum.
    """

    output: Finding
    sums: Finding | None


class _LayerComparison:
    """A recorder that compares each call with regard's own mechanism on the same q, k and v."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.sums = 0.0
        self.found: list[LayerFindings] = []

    def begin(self, call: Call) -> None:
        self.sums = 0.0

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        sums = weights.double().sum(-1)
        self.sums = max(self.sums, difference(sums, torch.ones_like(sums)))

    def end(self, call: Call, out: Tensor) -> Tensor:
        own = call.replacement
        mechanism: Mechanism = Softmax()
        if own is not None:
            mechanism = copy.deepcopy(own.mechanism)
        reference = AttentionReplacement(plain(mechanism), call.name, call.cross)
        if own is not None:
            reference.made = own.made
        try:
            want, _ = reference(call)
        except HubError as reason:
            raise DoesNotApply(str(reason)) from None
        apart = Finding(difference(out, want), self.limit, f"{call.name}, its output on its own q, k and v")
        sums = None
        if call.kwargs.get("s_aux") is None and mechanism.normalised:
            sums = Finding(self.sums, self.limit, f"{call.name}, sums of rows")
        self.found.append(LayerFindings(apart, sums))
        return out


def layers_are_the_reference(trial: Trial) -> Finding:
    """each attention layer = regard's reference on the q, k and v that the layer was given"""
    assert isinstance(trial, HubSubject)
    return worst(found.output for found in trial.compare_layers())


def rows_sum_to_one(trial: Trial) -> Finding:
    """the weights of every query sum to one over the keys"""
    assert isinstance(trial, HubSubject)
    sums = [found.sums for found in trial.compare_layers() if found.sums is not None]
    if not sums:
        raise DoesNotApply("a sink takes a share of every row, or the mechanism divides by no sum")
    return worst(sums)


HUB_LAWS: Registry[ModelLaw] = Registry("law")
HUB_LAWS.update({**MODEL_LAWS, "reference": layers_are_the_reference, "rows": rows_sum_to_one})


def _find_window(module: nn.Module, config: Any) -> int | None:
    """Returns the window of an attention layer: how many tokens it sees, its own included, or None for all of them."""
    if hasattr(module, "sliding_window"):
        window: Any = module.sliding_window
    elif getattr(config, "layer_types", None):
        window = None
        if config.layer_types[int(getattr(module, "layer_idx", 0))] == "sliding_attention":
            window = config.sliding_window
    else:
        window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def _find_length(config: Any) -> int | None:
    """Returns the most tokens that a model reads, by its config; None: any number."""
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    lengths = [n for n in (getattr(config, name, None) for name in names) if isinstance(n, int)]
    if not lengths:
        return None
    return lengths[0] - 4  # some begin to count positions after the number of their padding token


def from_transformers(thing: Any) -> bool:
    """Returns whether something is a model of transformers, without importing it."""
    known = "transformers.modeling_utils.PreTrainedModel"
    return any(f"{c.__module__}.{c.__name__}" == known for c in type(thing).__mro__)


def _convert(model: Any, dtype: torch.dtype) -> Any:
    """Returns the model in this dtype, in evaluation mode; a copy is made once, and kept for the model's lifetime."""
    if model.dtype == dtype and not model.training:
        return model
    copies = _COPIES.setdefault(model, {})
    if dtype not in copies:
        copies[dtype] = copy.deepcopy(model).to(dtype).eval()
    return copies[dtype]


def _seen(visible: Tensor | None, name: str = "attention_mask") -> dict[str, Any]:
    """Returns a mask as the option that transformers' models take, or no option."""
    if visible is None:
        return {}
    return {name: visible.long()}


def _vectors(found: Any) -> Tensor:
    """Returns the logits of a model's output, or its last vectors where it has none."""
    logits: Tensor | None = getattr(found, "logits", None)
    if logits is not None:
        return logits
    vectors: Tensor = found.last_hidden_state
    return vectors


def _ids(x: Any) -> list[int]:
    """Returns the token ids of a config's field, which holds none, one, or several."""
    if x is None:
        return []
    if isinstance(x, list | tuple):
        return [int(i) for i in x]
    return [int(x)]
