"""Recording Hugging Face models: one pass over a whole text, or step by step in generate()."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.hub.attention import HubError, calls_interface, recording_attention
from regard.hub.fetching import display_name
from regard.hub.memories import memory_layers
from regard.lens.recording.capture import GradientTaps, ModelCapture
from regard.lens.recording.hub_inputs import (
    HubText,
    Places,
    append_generated,
    check_length,
    generate_ids,
    is_encoder_decoder,
    lacks_target,
    model_inputs,
    settings_for_own_target,
    target_ids,
    text_config,
)
from regard.lens.recording.hub_tokens import hub_tokens, image_tokens, numbered_tokens
from regard.lens.recording.losses import (
    hub_masked_losses,
    is_encoder_of_vectors,
    is_masked_model,
    next_token_labels,
    require_language_head,
    require_mask_token,
)
from regard.lens.recording.maps import evaluation_mode
from regard.lens.recording.outputs import records_contributions
from regard.lens.recording.overview import add_overview
from regard.lens.recording.projections import record_from_output_attentions
from regard.lens.recording.regard_models import Gradient
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Card, RecordedAttention, Recording

_NO_INTERFACE = (
    "{} makes its attention itself and not through transformers' interface, so its attention could not be recorded. "
    "Without generate and gradient it may still work."
)


def record_hub_model(
    model: Any,
    text: HubText,
    *,
    pair: str | None = None,
    tokenizer: Any = None,
    target: str | Sequence[int] | None = None,
    generate: Mapping[str, Any] | None = None,
    gradient: Gradient = False,
    contributions: bool | None = None,
    name: str = "text",
    card: Card | None = None,
) -> Recording:
    """Records one text, token ids, or ready-made inputs with a Hugging Face model; see `record`."""
    inputs, places = model_inputs(model, text, tokenizer, pair)
    check_length(model, inputs)
    if target is not None:
        inputs["decoder_input_ids"] = target_ids(model, target, tokenizer)
    elif generate is None and lacks_target(model, inputs):
        generate = settings_for_own_target(model, inputs)
    prompt = None  # length of the prompt, if tokens are generated
    if generate is not None:
        prompt = _prompt_length(model, inputs)
    masked = gradient is True and (is_masked_model(model) or is_encoder_of_vectors(model))
    # The masked-language-model loss has passes of its own, over masked copies, so the pass over the text needs no
    # gradient.
    text_gradient: Gradient = False if masked else gradient
    with evaluation_mode(model), torch.random.fork_rng(), torch.set_grad_enabled(bool(text_gradient)):
        seed = torch.seed()  # draws a seed and sets it, so that a second run can use the same random numbers
        if generate is not None and gradient:
            inputs = append_generated(model, inputs, generate)
            generate = None
        model_kwargs = inputs
        if masked:
            require_mask_token(tokenizer)
        elif gradient is True:
            model_kwargs = inputs | {"labels": _labels(model, inputs, prompt or 1)}
        capture = ModelCapture(bool(text_gradient))
        ids, loss = _run(model, model_kwargs, generate, text_gradient, capture)
        if capture.unexplained:  # run again with the same random numbers, and store the weights of these modules
            torch.manual_seed(seed)
            capture = ModelCapture(bool(text_gradient), capture.unexplained)
            _run(model, model_kwargs, generate, text_gradient, capture)
        if not capture.modules:
            if gradient or generate is not None:
                raise HubError(_NO_INTERFACE.format(type(model).__name__))
            sequence = None
            if ids:
                sequence = hub_tokens(tokenizer, ids[0], places)
            return record_from_output_attentions(model, inputs, sequence, name, card or hub_card(model))
        if masked:
            loss = _masked_gradient(model, inputs, tokenizer, capture)
    if records_contributions(contributions, max(module.keys for module in capture.modules.values())):
        capture.keep_projections()
    sequences = _sequences(model, inputs, ids, tokenizer, places, prompt)
    if not sequences:
        length = next(iter(capture.modules.values())).queries
        sequences.append(image_tokens(model, inputs, length))
    recording = Recording(name, card or hub_card(model), sequences, [], loss)
    for attended in _attentions(model, capture, sequences):
        recording.attentions.append(attended)
        add_overview(recording, attended)
    return recording


def hub_card(model: Any, name: str | None = None, trained: bool | None = None, note: str = "") -> Card:
    """Returns the card of a Hugging Face model; sizes that its config neither contains nor implies are 0."""
    config = text_config(model)
    heads = _config_number(config, "num_attention_heads", "num_heads")
    width = _config_number(config, "hidden_size", "d_model")
    key_width = _config_number(config, "head_dim", "d_kv") or (width // heads if heads else 0)
    return Card(
        name=name or display_name(getattr(config, "_name_or_path", "") or type(model).__name__),
        cls=type(model).__name__,
        home="transformers",
        parameters=sum(p.numel() for p in model.parameters()),
        layers=_config_number(config, "num_hidden_layers", "num_layers"),
        heads=heads,
        groups=_config_number(config, "num_key_value_heads") or heads,
        width=width,
        key_width=key_width,
        value_width=key_width,
        mechanisms=_mechanisms(model),
        signed=bool(memory_layers(model)),
        trained=trained,
        note=note,
    )


def _mechanisms(model: Any) -> tuple[str, ...]:
    """Returns the mechanisms of a model's layers: "softmax", and the names of gated and delta attention."""
    memories = memory_layers(model)
    if not memories or any(calls_interface(module) for module in model.modules()):
        return ("softmax", *dict.fromkeys(memories.values()))
    return tuple(dict.fromkeys(memories.values()))


def _config_number(config: Any, *names: str) -> int:
    """Returns the first of these attributes of a config that is set and not 0; else 0."""
    numbers = (getattr(config, name, None) for name in names)
    return next((int(number) for number in numbers if number), 0)


def _prompt_length(model: Any, inputs: dict[str, Any]) -> int:
    """Returns the number of tokens before the first generated one; for an encoder-decoder it is 1, the start token."""
    if is_encoder_decoder(model):
        return 1
    return int(inputs["input_ids"].shape[-1]) if "input_ids" in inputs else 0


def _run(
    model: Any,
    inputs: dict[str, Any],
    generate: Mapping[str, Any] | None,
    gradient: Gradient,
    capture: ModelCapture,
) -> tuple[list[list[int]], float | None]:
    """Runs the model, and returns the ids of each sequence (input, then decoder input if there is one) and the loss.

    If `gradient` is set, the gradients are stored in the modules of `capture`; otherwise the loss is None.
    """
    with recording_attention(model, capture), capture.projections.watching(model):
        if generate is not None:
            generated = generate_ids(model, inputs, generate)
            if is_encoder_decoder(model) and "input_ids" in inputs:
                return [inputs["input_ids"][0].tolist(), generated], None
            return [generated], None
        out = model(**inputs, **({} if gradient else _fewest_logits(model)))
    ids = [inputs[n][0].tolist() for n in ("input_ids", "decoder_input_ids") if n in inputs]
    if not gradient or not capture.modules:
        return ids, None
    loss = gradient(out) if callable(gradient) else out.loss
    taps = [module.grad_tap for module in capture.modules.values() if module.grad_tap is not None]
    grads = torch.autograd.grad(loss, taps, materialize_grads=True)
    for module, g in zip(capture.modules.values(), grads, strict=True):
        module.output_grad = g
    return ids, float(loss.detach())


def _fewest_logits(model: Any) -> dict[str, int]:
    """Returns the argument that makes a language model compute the last token's logits only; {} if it takes none.

    A recording uses no logits, and for 2,048 tokens of GPT-2 they are a third of what its pass computes.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return {"logits_to_keep": 1}
    return {}


def _labels(model: Any, inputs: dict[str, Any], prompt_length: int) -> Tensor:
    """Returns the labels [1,T] of the next-token loss; raises OptionError if the model has no such loss."""
    require_language_head(model)
    if "input_ids" not in inputs and "decoder_input_ids" not in inputs:
        raise OptionError(
            f"{type(model).__name__} was given no token ids, so it has no loss of its own: give gradient=f, with "
            "f(output) the number to differentiate"
        )
    return next_token_labels(inputs, prompt_length)


def _masked_gradient(model: Any, inputs: dict[str, Any], tokenizer: Any, capture: ModelCapture) -> float:
    """Stores, for each module, the gradient of the loss of masked tokens, and returns the loss.

    The gradient is taken with respect to the heads' outputs, before the output projection. The loss is a mean over the
    masked copies of the text, which run in batches. `GradientTaps` adds zeros to the heads' outputs, and all copies of
    a batch share them, so that their gradient is already the sum over the batch; the batches are added up here.
    """
    losses = hub_masked_losses(model, inputs, tokenizer)
    taps = GradientTaps()
    totals: dict[str, Tensor] = {}
    loss = 0.0
    with torch.enable_grad(), recording_attention(model, taps):
        for part in losses():
            grads = torch.autograd.grad(part, list(taps.taps.values()), materialize_grads=True)
            for name, g in zip(taps.taps, grads, strict=True):
                totals[name] = totals[name] + g if name in totals else g
            loss += float(part.detach())
    for name, module in capture.modules.items():
        module.output_grad = totals[name]
    return loss


def _sequences(
    model: Any,
    inputs: dict[str, Any],
    ids: list[list[int]],
    tokenizer: Any,
    places: Places,
    prompt: int | None,
) -> list[Tokens]:
    """Returns the tokens of each sequence of `ids`: the text, or source and target; none for inputs without ids."""
    names = ("text", "text")
    masks = ("attention_mask", "decoder_attention_mask")
    if is_encoder_decoder(model):
        names = ("source", "target")
    elif prompt is not None:  # the text is only the beginning of the sequence
        places = Places(segment=places.segment)
    sequences = []
    for n, sequence_ids in enumerate(ids):
        tokens = hub_tokens(tokenizer, sequence_ids, places, names[n])
        sequences.append(_with_padding(tokens, inputs.get(masks[n])))
        places = Places()  # they belong to the first sequence only
    if prompt is not None:
        sequences[-1].mark_generated(prompt)
    return sequences


def _with_padding(tokens: Tokens, mask: Tensor | None) -> Tokens:
    """Returns the tokens, with padding marked where the mask [1,T] is 0; a mask of another shape is ignored."""
    if mask is None or mask.dim() != 2 or mask.shape[1] != len(tokens) or bool(mask.bool().all()):
        return tokens
    # Positions are left out: they are counted anew, without padding.
    return replace(tokens, visible=mask[0].int().tolist(), positions=[])


def _attentions(model: Any, capture: ModelCapture, sequences: list[Tokens]) -> list[RecordedAttention]:
    """Returns the `RecordedAttention` of all captured modules; layers are counted separately for each side and kind.

    For a sequence that has no token ids, such as audio frames, numbered tokens are appended to `sequences`.
    """
    attentions = []
    layers: dict[tuple[str, bool], int] = {}
    for module in capture.modules.values():
        side = _side_of(module.name, module.cross)
        wanted = 0
        if is_encoder_decoder(model) and side == "decoder":
            wanted = len(sequences) - 1
        queries = _find_sequence(sequences, wanted, module.queries)
        keys = _find_sequence(sequences, 0 if module.cross else wanted, module.keys)
        layer = layers.get((side, module.cross), 0)
        layers[side, module.cross] = layer + 1
        attended = module.to_recorded(layer, side, queries, keys, sequences)
        if not is_encoder_decoder(model) and not module.cross:
            # In a model with one stack, a module belongs to an encoder if it is bidirectional, that is, if its mask is
            # neither causal nor one that no rule describes.
            rules = attended.rules
            attended.side = "decoder" if rules.causal or rules.hidden is not None else "encoder"
        attentions.append(attended)
    return attentions


def _side_of(name: str, cross: bool) -> str:
    """Returns "decoder" for cross-attention; otherwise "encoder" or "decoder", judged by the module's name."""
    parts = name.split(".")
    if "encoder" in parts and "decoder" not in parts and not cross:
        return "encoder"
    return "decoder"


def _find_sequence(sequences: list[Tokens], wanted: int, length: int) -> int:
    """Returns the index of a sequence with `length` tokens: `wanted` if that one fits, else the first that fits.

    If none fits, numbered tokens are appended to `sequences`, and their index is returned.
    """
    candidates: list[int] = [wanted, *range(len(sequences))]
    for n in candidates:
        if len(sequences[n]) == length:
            return n
    sequences.append(numbered_tokens(length))
    return len(sequences) - 1
