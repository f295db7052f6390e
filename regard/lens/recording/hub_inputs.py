"""The inputs of a Hugging Face model: the tokens of a text, the target of a decoder, and generated tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import LengthError, OptionError
from regard.lens.recording.pairs import (
    BETWEEN,
    check_pair,
    segments_of,
    tokenizer_options,
    warn_about_typed_separator,
)
from regard.lens.recording.regard_models import MAX_OWN_TARGET_TOKENS, OwnTargetWarning
from regard.registry import accepted_options, accepts_any_keyword

HubText = str | Sequence[int] | Tensor | Mapping[str, Any]
CharacterSpans = list[tuple[int, int]]  # character span of each token


@dataclass(frozen=True)
class Places:
    """The text that a model read, the character span of each token, and of a pair which text each token belongs to.

    Each is None where it is not known; `text` holds both texts of a pair, one below the other.
    """

    text: str | None = None
    offsets: CharacterSpans | None = None
    segment: list[int] | None = None


def model_inputs(model: Any, text: HubText, tokenizer: Any, pair: str | None = None) -> tuple[dict[str, Any], Places]:
    """Returns the model's inputs on its device, and the character spans of the tokens in the text or pair of texts."""
    device = next(model.parameters()).device
    if pair is not None:
        check_pair(model, text, pair, tokenizer)
    if isinstance(text, Mapping):
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in text.items()}, Places()
    if not isinstance(text, str):
        if not isinstance(text, Tensor):
            text = torch.tensor(list(text), dtype=torch.long)
        return {"input_ids": text.long().reshape(1, -1).to(device)}, Places()
    if tokenizer is None:
        raise OptionError("text needs a tokenizer: give tokenizer=, or token ids instead of text")
    fast = bool(getattr(tokenizer, "is_fast", False))  # slow tokenizers do not return offsets
    options: dict[str, Any] = {"return_tensors": "pt", "return_offsets_mapping": fast, "verbose": False}
    if pair is None:
        warn_about_typed_separator(model, text, tokenizer)
        encoding = tokenizer(text, **options)
    else:
        encoding = tokenizer(text, pair, **options, **tokenizer_options(model))
    inputs = dict(encoding)
    places = _places(encoding, text, pair, tokenizer)
    inputs.pop("offset_mapping", None)
    inputs = taken_inputs(model, inputs)
    return {name: x.to(device) for name, x in inputs.items()}, places


def taken_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of a tokenizer's outputs that a model's forward names, or all where it names no token ids."""
    named = accepted_options(model.forward, inputs)
    if accepts_any_keyword(model.forward) and "input_ids" not in named:
        return dict(inputs)
    return named


def _places(encoding: Any, text: str, pair: str | None, tokenizer: Any) -> Places:
    """Returns the character spans of the tokens of a text, or of a pair of texts joined by BETWEEN."""
    offsets: CharacterSpans | None = None
    if "offset_mapping" in encoding:  # slow tokenizers do not return them
        offsets = [(int(a), int(b)) for a, b in encoding["offset_mapping"][0].tolist()]
    if pair is None:
        return Places(text, offsets)
    segment = segments_of(encoding, encoding["input_ids"][0].tolist(), text, tokenizer)
    if offsets is not None:
        shift = len(text) + len(BETWEEN)
        offsets = [(a + shift, b + shift) if s == 1 else (a, b) for (a, b), s in zip(offsets, segment, strict=True)]
    return Places(text + BETWEEN + pair, offsets, segment)


def check_length(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raises LengthError if a text has more tokens than the model supports."""
    limit = token_limit(model)
    if limit is None or "input_ids" not in inputs:
        return
    length = inputs["input_ids"].shape[-1]
    if length > limit:
        raise LengthError(f"{length} tokens, but this model was built for {limit}: shorten the text")


def text_config(model: Any) -> Any:
    """Returns the config of the text model; in a multimodal model it is a part of the whole config."""
    if hasattr(model.config, "get_text_config"):
        return model.config.get_text_config()
    return model.config


def token_limit(model: Any) -> int | None:
    """Returns the maximum number of input tokens of a model; None if its config states none."""
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None:
        return None
    if config.model_type in ("roberta", "xlm-roberta", "camembert"):
        # Positions of these models start at pad_token_id + 1.
        return int(limit) - int(config.pad_token_id or 0) - 1
    return int(limit)


def is_encoder_decoder(model: Any) -> bool:
    """Returns whether a model is an encoder-decoder, as its config says."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def target_ids(model: Any, target: str | Sequence[int], tokenizer: Any) -> Tensor:
    """Returns decoder_input_ids [1,T]: the decoder start token, if the config has one, followed by the target."""
    if not is_encoder_decoder(model):
        raise OptionError(f"a {type(model).__name__} has no target: leave it out, or append it to the text")
    if isinstance(target, str):
        if tokenizer is None:
            raise OptionError("text needs a tokenizer: give tokenizer=, or token ids as target")
        target = tokenizer(text_target=target)["input_ids"]
    ids = list(target)
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is not None:
        ids.insert(0, start)
    return torch.tensor([ids], device=next(model.parameters()).device)


def lacks_target(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the model is an encoder-decoder and `inputs` has no input for its decoder."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
    return is_encoder_decoder(model) and not any(name in inputs for name in names)


def settings_for_own_target(model: Any, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the settings for generating a target because none was given, and warns.

    Returns None if the model cannot generate. The decoder's only input, which is added to `inputs`, is then its start
    token.
    """
    start = _start_token(model)
    if model.can_generate():
        warnings.warn(
            f"no target was given, so the decoder wrote its own, at most {MAX_OWN_TARGET_TOKENS} tokens",
            OwnTargetWarning,
            stacklevel=4,
        )
        return {"max_new_tokens": MAX_OWN_TARGET_TOKENS}
    warnings.warn(
        f"no target was given, and {type(model).__name__} has no head to write one with, so the decoder read its start "
        "token alone",
        OwnTargetWarning,
        stacklevel=4,
    )
    inputs["decoder_input_ids"] = torch.tensor([[start]], device=next(model.parameters()).device)
    return None


def _start_token(model: Any) -> int:
    """Returns the token that a decoder begins with; the padding token, as in T5, if the configs name no other."""
    configs = (getattr(model, "generation_config", None), model.config)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    tokens = (getattr(config, name, None) for name in names for config in configs)
    found = next((int(token) for token in tokens if token is not None), None)
    if found is None:
        raise OptionError(f"{type(model).__name__} has no start token: give what its decoder reads as target")
    return found


def generate_ids(model: Any, inputs: dict[str, Any], settings: Mapping[str, Any]) -> list[int]:
    """Returns the ids of the prompt and the generated tokens; for an encoder-decoder, start token and generated tokens.

    One extra token is generated, and the last token is dropped: it is never fed to the model, so it has no row of
    weights.
    """
    if not model.can_generate():
        raise OptionError(f"a {type(model).__name__} generates nothing; leave out generate")
    options = dict(settings)
    if options.get("num_beams", 1) != 1 or options.get("num_return_sequences", 1) != 1:
        raise OptionError("one output is recorded, without beams: leave out num_beams and num_return_sequences")
    max_new_tokens = int(options.pop("max_new_tokens", 20))
    limit = token_limit(model)
    if limit is not None and "input_ids" in inputs and not is_encoder_decoder(model):
        max_new_tokens = min(max_new_tokens, limit - inputs["input_ids"].shape[-1])
    pad = model.generation_config.pad_token_id
    if pad is None:
        pad = model.generation_config.eos_token_id
    if isinstance(pad, list):
        pad = pad[0]
    options = {"do_sample": False, "pad_token_id": pad} | options
    if is_encoder_decoder(model):
        options.setdefault("decoder_start_token_id", _start_token(model))
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=max_new_tokens + 1, num_beams=1, **options)
    ids: list[int] = out[0].tolist()
    return ids[:-1]


def append_generated(model: Any, inputs: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Generates, and returns inputs with which one pass reads the prompt and the generated tokens.

    For an encoder-decoder, the generated tokens become `decoder_input_ids`.
    """
    device = next(model.parameters()).device
    ids = generate_ids(model, inputs, settings)
    if is_encoder_decoder(model):
        prompt = 1
        longer = inputs | {"decoder_input_ids": torch.tensor([ids], device=device)}
    else:
        prompt = int(inputs["input_ids"].shape[1])
        longer = inputs | {"input_ids": torch.tensor([ids], device=device)}
        for name in ("attention_mask", "token_type_ids"):
            if name in inputs:
                last = inputs[name][:, -1:].expand(-1, len(ids) - prompt)
                longer[name] = torch.cat([inputs[name], last], 1)
    if len(ids) <= prompt:
        raise OptionError(
            "the model generated no token that can be scored, so there is no loss: give a target, or leave out generate"
        )
    return longer
