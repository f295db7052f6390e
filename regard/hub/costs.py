"""The cost of a Hugging Face model, counted by running it on the device "meta": tensors have shapes but no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.hub.attention import HubError, import_transformers
from regard.hub.fetching import display_name, model_on_meta
from regard.hub.gate import quiet


@dataclass(frozen=True)
class HubModelCost:
    """The cost of B sequences of T tokens; an encoder-decoder gets T source tokens and T target tokens.

    `kind` is the model's `model_type` in transformers. `weights` is the size of the model's weights in bytes. `forward`
    counts the FLOPs of the matrix products for all tokens, and `step` the FLOPs for one more token of each sequence.
    `cache` is the size of the cache in bytes after T tokens, and `a_token` the number of bytes that one more token of
    one sequence adds to the cache. Without a cache `step`, `cache` and `a_token` are None. In a mixture of experts,
    where FLOPs depend on the tokens, `forward` and `step` are None.
    """

    name: str
    kind: str
    parameters: int
    weights: int
    B: int
    T: int
    forward: int | None
    step: int | None
    cache: int | None
    a_token: int | None


def hub_model_cost(
    name: str | Path, T: int = 1024, B: int = 1, dtype: torch.dtype = torch.bfloat16, download: bool = False
) -> HubModelCost:
    """Returns the cost of a model: a folder, an id on the hub, or a type such as 'llama' with its default config."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, which is slow

    model = model_on_meta(name, download).to(dtype)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise HubError(f"{name} reads no text but {model.main_input_name}, so its cost for T tokens is not known")
    _forget_padding(model)
    model.set_attn_implementation("eager")  # the counter does not see the products inside fused attention
    with _explain_errors(name), torch.no_grad(), FlopCounterMode(display=False) as counter:
        past = _run(model, B, T)
    forward: int | None = counter.get_total_flops()
    step = cache = a_token = None
    if past is not None:
        cache = _cache_bytes(past)
        with _explain_errors(name), torch.no_grad(), FlopCounterMode(display=False) as counter:
            past = _run(model, B, 1, past)
        step = counter.get_total_flops()
        a_token = (_cache_bytes(past) - cache) // B
    if _has_experts(model.config):
        forward = step = None
    parameters = list(model.parameters())
    return HubModelCost(
        name=display_name(name),
        kind=str(model.config.model_type),
        parameters=sum(p.numel() for p in parameters),
        weights=sum(p.nbytes for p in parameters),
        B=B,
        T=T,
        forward=forward,
        step=step,
        cache=cache,
        a_token=a_token,
    )


def _forget_padding(model: Any) -> None:
    """Takes the padding token out of the configs of a model: without a mask, models look for it among the tokens.

    Nothing is padded here, and on the device "meta" tokens have no values that could be looked at.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "pad_token_id", None) is not None:
            config.pad_token_id = None


def _run(model: Any, B: int, T: int, past: Any = None) -> Any:
    """Runs T more tokens of B sequences; returns the cache, or None if the model has none."""
    tokens = torch.zeros(B, T, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"use_cache": True}
    if past is not None:
        inputs["past_key_values"] = past
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
        if past is not None:
            # Cross-attention reads the keys and values of the source from the cache. The zeros only take the place of
            # the encoder's outputs, so that the encoder does not run again.
            width = model.config.hidden_size
            inputs["encoder_outputs"] = (torch.zeros(B, T, width, device="meta", dtype=model.dtype),)
    with torch.device("meta"):
        out = model(tokens, **inputs)
    return getattr(out, "past_key_values", None)


def _has_experts(config: Any) -> bool:
    """Tells whether a model is a mixture of experts, by the keys of its config."""
    return any(("expert" in key and "num" in key) or key == "n_routed_experts" for key in config.to_dict())


def _cache_bytes(cache: Any) -> int:
    """Returns the size of a cache in bytes."""
    return sum(x.nbytes for x in _tensors(cache, set()))


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields once each tensor in a cache, at any depth, that has more than 2 dimensions: keys, values and states.

    `seen` holds the ids of the objects visited so far.
    """
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.dim() > 2:  # the others are empty, or hold a number of tokens
            yield thing
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from _tensors(part, seen)
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _tensors(part, seen)
    elif type(thing).__module__.startswith("transformers.cache_utils"):
        yield from _tensors(vars(thing), seen)


@contextmanager
def _explain_errors(name: str | Path) -> Iterator[None]:
    """Silences transformers, and re-raises any error of the model as a HubError.

    Code that reads tensor values cannot run on the meta device.
    """
    with quiet(import_transformers()):
        try:
            yield
        except Exception as error:  # of any class, depending on what the model's code does with a value
            first = str(error).strip().partition("\n")[0][:200]
            raise HubError(f"{name} cannot be counted without its weights: {first}") from error
