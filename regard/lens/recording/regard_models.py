"""Recording regard's own models, with any mechanism: a whole sequence at once, or step by step while generating.

The inputs of each layer's mechanism are captured while the model runs. When it runs step by step with a state (KV cache
or recurrent), q, k and v of all steps are concatenated. Queries and keys are in token order, so the weights are the
same matrix that a single pass would give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.tokenizers import Tokenizer
from regard.errors import OptionError
from regard.generate import Settings
from regard.generate import generate as generate_tokens
from regard.lens.recording.losses import (
    TOO_SHORT,
    maskable_positions,
    masked_losses,
    require_mask_token,
    special_tokens,
)
from regard.lens.recording.maps import evaluation_mode
from regard.lens.recording.mechanism_formulas import LayerInputs, derive_formula, first_example
from regard.lens.recording.memories import describe_memory
from regard.lens.recording.outputs import records_contributions, regard_head_matrices, value_lengths
from regard.lens.recording.overview import add_overview
from regard.lens.trace.formulas import OneHot
from regard.lens.trace.rules import MaskRules
from regard.lens.trace.tokens import tokens_of
from regard.lens.trace.trace import Card, RecordedAttention, Recording
from regard.mechanisms.base import without_autocast
from regard.mechanisms.recurrence import Recurrence
from regard.models import Decoder, Encoder, Model, Seq2Seq, Stack, token_loss
from regard.models.encoder import MaskedHead
from regard.nn import Attention
from regard.nn.capture import capture_attention, forward_hooks
from regard.nn.merges import LooksAheadError
from regard.shapes import Mask

Gradient = bool | Callable[[Any], Tensor]
MAX_OWN_TARGET_TOKENS = 20  # limit for a decoder that generates its own target because none was given


class OwnTargetWarning(UserWarning):
    """No target was given, so the decoder wrote one itself, or read its start token alone."""


class LayerCapture:
    """The captured inputs of one attention layer (first example of the batch), and a gradient.

    The gradient is that of the loss with respect to the heads' outputs, before the output projection.
    """

    def __init__(self, layer: int, side: str, kind: str, name: str, attention: Attention) -> None:
        self.layer = layer
        self.side = side
        self.kind = kind
        self.name = name
        self.attention = attention
        self.parts: dict[str, list[Tensor]] = {name: [] for name in ("q", "k", "v", "a", "b", "out")}
        self.mask = Mask()
        self.grad_tap: Tensor | None = None  # zeros added to the heads' outputs; they receive the gradient
        self.output_grad: Tensor | None = None

    def add(self, q: Tensor | None, k: Tensor | None, v: Tensor | None, mask: Mask | None, **gates: Tensor) -> None:
        """Stores the inputs of one call."""
        for name, x in (("q", q), ("k", k), ("v", v), *gates.items()):
            if x is not None:
                self.parts[name].append(x[:1].detach())
        if mask is not None:
            self.mask = mask

    def add_output(self, out: Tensor) -> None:
        """Stores the output of gated or delta attention, with which the weights of the trace are compared."""
        if isinstance(self.attention.mechanism, Recurrence):
            self.parts["out"].append(out[:1].detach())

    def concatenated(self, name: str) -> Tensor | None:
        """Returns "q", "k", "v", "a", "b" or "out" of all calls, [1,heads,tokens,…]; None if there is none."""
        parts = self.parts[name]
        return torch.cat(parts, 2) if parts else None

    def add_grad_tap(self, mechanism: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Forward hook: adds zeros [1,H,T,V] to the heads' outputs [B,H,T,V], shared by all examples of the batch.

        The gradient of the loss with respect to the zeros is that with respect to the heads' outputs, summed over the
        examples. The zeros require grad, so the gradient exists even if no parameter requires grad.
        """
        self.grad_tap = torch.zeros_like(out[:1], requires_grad=True)
        return out + self.grad_tap


def record_regard_model(
    model: Model[Any],
    ids: Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    text: str | None = None,
    target: Sequence[int] | None = None,
    generate: Settings | None = None,
    gradient: Gradient = False,
    contributions: bool | None = None,
    name: str = "text",
    card: Card | None = None,
) -> Recording:
    """Records one sequence of token ids with one of regard's models; see `record`."""
    tokens = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    if tokens.shape[1] == 0:
        raise OptionError("nothing to record: the text has no tokens")
    if target is not None and generate is not None:
        raise OptionError("a target is given, and one is to be generated: leave out target or generate")
    if target is None and generate is None and isinstance(model, Seq2Seq):
        generate = _settings_for_own_target(model)
    layers = [LayerCapture(*layer) for layer in attention_layers(model)]
    cross = isinstance(model, Seq2Seq)
    prompt_length = 1 if cross else len(ids)
    loss = None
    # decoder_ids: the decoder's input for a Seq2Seq; for other models the tokens generated after the prompt, if any.
    with evaluation_mode(model), torch.set_grad_enabled(bool(gradient)):
        if generate is None:
            decoder_ids = _decoder_ids(model, target)
            loss = _run_whole(model, tokens, decoder_ids, layers, gradient, tokenizer)
        else:
            decoder_ids = _generate(model, tokens, generate)
            new = decoder_ids[1:] if cross else decoder_ids
            if gradient and not new:
                raise OptionError(
                    "the model generated no token that can be scored, so there is no loss: leave out generate"
                )
            if not gradient:
                _run_steps(model, tokens, new, layers)
            elif cross:
                loss = _run_whole(model, tokens, decoder_ids, layers, gradient, tokenizer)
            else:
                whole = torch.cat([tokens, tokens.new_tensor([new])], 1)
                loss = _run_whole(model, whole, [], layers, gradient, tokenizer, prompt_length)
    if cross:
        sequences = [tokens_of(tokenizer, ids, text, "source"), tokens_of(tokenizer, decoder_ids, None, "target")]
    elif generate is None:
        sequences = [tokens_of(tokenizer, ids, text)]
    else:
        sequences = [tokens_of(tokenizer, [*ids, *decoder_ids])]
    if generate is not None:
        sequences[-1].mark_generated(prompt_length)
    recording = Recording(name, card or regard_card(model), sequences, [], loss)
    for layer in layers:
        attended = _build_recorded(layer, recording)
        if records_contributions(contributions, max(map(len, sequences))):
            _add_lengths(attended, layer.attention)
        recording.attentions.append(attended)
        add_overview(recording, attended)
    return recording


def regard_card(model: Model[Any], name: str | None = None, trained: bool | None = None, note: str = "") -> Card:
    """Returns the card of one of regard's models: its name, sizes and mechanisms."""
    stack = model.stack
    assert isinstance(stack, Stack)
    size = stack.layers[0].attention.size
    mechanisms = [block.attention.mechanism for block in stack.layers]
    mechanisms += [block.cross.mechanism for block in stack.layers if block.cross is not None]
    return Card(
        name=name or type(model).__name__,
        cls=type(model).__name__,
        home="regard",
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(stack.layers),
        heads=size.H,
        groups=size.G,
        width=stack.config.width,
        key_width=size.K,
        value_width=size.V,
        mechanisms=tuple(dict.fromkeys(mechanism.name for mechanism in mechanisms)),
        signed=any(mechanism.signed for mechanism in mechanisms),
        trained=trained,
        note=note,
    )


def attention_layers(model: Model[Any]) -> Iterator[tuple[int, str, str, str, Attention]]:
    """Yields (layer, side, kind, name, module) of each attention module, in the order in which they run."""
    stacks: list[tuple[str, Any]] = [("decoder", model.stack)]
    if isinstance(model, Seq2Seq):
        stacks.insert(0, ("encoder", model.encoder))
    elif isinstance(model, Encoder):
        stacks = [("encoder", model.stack)]
    names = {module: name for name, module in model.named_modules()}
    for side, stack in stacks:
        assert isinstance(stack, Stack)
        for layer, block in enumerate(stack.layers):
            for kind, attention in (("self", block.attention), ("cross", block.cross)):
                if attention is not None:
                    yield layer, side, kind, names[attention], attention


def _decoder_ids(model: Model[Any], target: Sequence[int] | None) -> list[int]:
    """Returns the decoder's input for a Seq2Seq, the start token and the target; [] for other models."""
    if isinstance(model, Seq2Seq):
        return [model.config.start, *(int(i) for i in target or ())]
    if target is not None:
        raise OptionError(f"a {type(model).__name__} has no target: leave it out, or append it to the text")
    return []


def _settings_for_own_target(model: Seq2Seq) -> Settings | None:
    """Returns the settings for generating the target that was not given, and warns.

    Returns None, with a warning as well, if the model has no state because its outputs depend on later tokens; its
    decoder is then given the start token alone.
    """
    try:
        model.empty(1, 1)  # an empty state, which a model that looks ahead does not have
    except LooksAheadError:
        warnings.warn(
            "no target was given, and this model looks ahead and cannot write one, so the decoder read its start token "
            "alone",
            OwnTargetWarning,
            stacklevel=5,
        )
        return None
    warnings.warn(
        f"no target was given, so the decoder wrote its own, at most {MAX_OWN_TARGET_TOKENS} tokens",
        OwnTargetWarning,
        stacklevel=5,
    )
    return Settings(max_tokens=MAX_OWN_TARGET_TOKENS)


def _run_whole(
    model: Model[Any],
    tokens: Tensor,
    decoder_ids: list[int],
    layers: list[LayerCapture],
    gradient: Gradient,
    tokenizer: Tokenizer | None,
    prompt_length: int = 1,
) -> float | None:
    """Runs the model once over the whole text, and captures the inputs of each layer in `layers`.

    With `gradient`, it also stores the gradients there and returns the loss; else it returns None.

    `decoder_ids` is the decoder's input for a Seq2Seq, and [] for other models. The next-token loss excludes the first
    `prompt_length` tokens. For the masked-language-model loss, the model also runs over masked copies of the text.
    """
    target = torch.tensor([decoder_ids], dtype=torch.long, device=model.device)
    masked = gradient is True and isinstance(model, Encoder)
    if masked:
        require_mask_token(tokenizer)
    with ExitStack() as captures:
        for layer in layers:
            captures.enter_context(capture_attention(layer.attention, layer.add, given=layer.add_output))
            if gradient:
                captures.enter_context(forward_hooks([layer.attention.mechanism], layer.add_grad_tap))
        out = model(tokens, target) if isinstance(model, Seq2Seq) else model(tokens)
    if not gradient:
        return None
    if masked:
        return _masked_gradient(model, tokens[0], layers, tokenizer)
    if callable(gradient):
        loss = gradient(out)
    else:
        loss = _next_token_loss(model, out, target if decoder_ids else tokens, prompt_length)
    taps = [layer.grad_tap for layer in layers if layer.grad_tap is not None]
    for layer, g in zip(layers, torch.autograd.grad(loss, taps, materialize_grads=True), strict=True):
        layer.output_grad = g
    return float(loss.detach())


def _masked_gradient(model: Model[Any], ids: Tensor, layers: list[LayerCapture], tokenizer: Tokenizer | None) -> float:
    """Stores, for each layer, the gradient of the loss of masked tokens, and returns the loss.

    The gradient is taken with respect to the heads' outputs, before the output projection. The loss is a mean over the
    masked copies of the text, which run in batches. `add_grad_tap` adds zeros to the heads' outputs, and all copies of
    a batch share them, so that their gradient is already the sum over the batch; the batches are added up here.
    """
    assert isinstance(model, Encoder)
    losses = encoder_masked_losses(model, ids, tokenizer)
    totals: list[Tensor] = []
    loss = 0.0
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(forward_hooks([layer.attention.mechanism], layer.add_grad_tap))
        for part in losses():
            taps = [layer.grad_tap for layer in layers if layer.grad_tap is not None]
            grads = torch.autograd.grad(part, taps)
            totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else list(grads)
            loss += float(part.detach())
    for layer, g in zip(layers, totals, strict=True):
        layer.output_grad = g
    return loss


def encoder_masked_losses(model: Encoder, ids: Tensor, tokenizer: Tokenizer | None) -> Callable[[], Iterator[Tensor]]:
    """Returns a function that yields the terms of the masked loss of one of regard's encoders, one per batch of copies.

    For an encoder without a head that predicts tokens, the final vectors of the unmasked text are computed here, once.
    """
    positions = maskable_positions(ids.tolist(), special_tokens(tokenizer))
    mask_id = require_mask_token(tokenizer)
    if isinstance(model.head, MaskedHead):
        return lambda: masked_losses(model, ids, positions, mask_id)
    with torch.no_grad():
        seen = model.vectors(ids[None])[0]
    return lambda: masked_losses(model.vectors, ids, positions, mask_id, seen)


def _next_token_loss(model: Model[Any], out: Tensor, tokens: Tensor, prompt_length: int) -> Tensor:
    """Returns the mean next-token loss, without the first `prompt_length` tokens."""
    if not isinstance(model, Decoder):
        raise OptionError(
            "this model has no loss of its own: give gradient=f, with f(output) the number to differentiate"
        )
    if tokens.shape[1] < 2:
        raise OptionError(TOO_SHORT)
    return token_loss(out[:, prompt_length - 1 : -1], tokens[:, prompt_length:])


def _generate(model: Model[Any], tokens: Tensor, settings: Settings) -> list[int]:
    """Returns the ids that the model generates, at most `max_tokens`; for a Seq2Seq, the start token precedes them.

    The model reads them again while it is recorded, so a token beyond its context is left out.
    """
    if not isinstance(model, Decoder):
        raise OptionError(f"a {type(model).__name__} generates nothing; leave out generate")
    if settings.beams is not None or settings.n > 1 or settings.slide:
        raise OptionError("one output is recorded, without beams and without slide")
    with torch.no_grad():
        result = generate_tokens(model, tokens[0].tolist(), settings)
    read = 1 if isinstance(model, Seq2Seq) else tokens.shape[1]
    room = settings.max_tokens if model.limit is None else model.limit - read
    kept = result.tokens[:room]
    return [model.config.start, *kept] if isinstance(model, Seq2Seq) else kept


def _run_steps(model: Model[Any], tokens: Tensor, new: list[int], layers: list[LayerCapture]) -> None:
    """Runs the model over the prompt and then over each token of `new`, from its state, and captures layers' inputs.

    The prompt of a Seq2Seq is the source and the start token.
    """
    assert isinstance(model, Decoder)
    with torch.no_grad(), ExitStack() as captures:
        for layer in layers:
            # The encoder runs once over the source; only the decoder runs step by step.
            recurrent = layer.side == "decoder"
            captured = capture_attention(layer.attention, layer.add, recurrent=recurrent, given=layer.add_output)
            captures.enter_context(captured)
        _, state = model.prefill(tokens, None, len(new) + 1)
        for token in new:
            _, state = model.extend(tokens.new_tensor([[token]]), state, last=True)


def _build_recorded(layer: LayerCapture, recording: Recording) -> RecordedAttention:
    """Returns the `RecordedAttention` of one captured layer."""
    mechanism = layer.attention.mechanism
    size = layer.attention.size
    v = layer.concatenated("v")
    assert v is not None
    cross = layer.kind == "cross"
    queries = 0
    if layer.side == "decoder":
        queries = len(recording.sequences) - 1
    keys = 0 if cross else queries
    attended = RecordedAttention(
        layer.layer,
        layer.side,
        layer.kind,
        layer.name,
        mechanism.name,
        queries,
        keys,
        size.H,
        size.G,
        OneHot(),  # a placeholder; derive_formula below gives the formula
        MaskRules(causal=layer.mask.causal, window=layer.mask.window),
        mechanism.signed,
        v=first_example(v),
        g=first_example(layer.output_grad),
    )
    mask = layer.mask.but(visible=None, size_override=(len(recording.sequences[queries]), v.shape[2]))
    if isinstance(mechanism, Recurrence):
        describe_memory(attended, mechanism, {name: layer.concatenated(name) for name in layer.parts})
        return attended
    inputs = LayerInputs(layer.concatenated("q"), layer.concatenated("k"), v, mask, cross)
    with torch.no_grad(), without_autocast(v):
        attended.formula = derive_formula(attended, mechanism, inputs)
    return attended


def _add_lengths(attended: RecordedAttention, attention: Attention) -> None:
    """Adds the length of each value after the output projection, unless a gate, norm or merge stands before it."""
    matrices = regard_head_matrices(attention)
    if matrices is not None and attended.v is not None:
        attended.vo = value_lengths(attended.v, matrices)
