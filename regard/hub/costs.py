"""What a Hugging Face model costs, counted by running it on the device "meta", where tensors have shapes only."""

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
    """The cost of B sequences of T tokens.

    `weights` is their size in bytes. `forward` counts the FLOPs of the matrix products of all tokens, `step` those of
    one more token of each sequence. `cache` is the size in bytes of the cache after T tokens, and `a_token` what one
    more token of one sequence adds to it. Without a cache the last three are None. The FLOPs are None in a mixture of
    experts, where they depend on the tokens.
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
    """Returns the cost of the model in a folder, of an id on the hub, or of a type such as 'llama' by its defaults."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, which is slow

    model = model_on_meta(name, download).to(dtype)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise HubError(f"{name} reads no text but {model.main_input_name}, so its cost for T tokens is not known")
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


def _run(model: Any, B: int, T: int, past: Any = None) -> Any:
    """Runs T more tokens of B sequences; returns the cache, or None where there is none."""
    tokens = torch.zeros(B, T, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"use_cache": True}
    if past is not None:
        inputs["past_key_values"] = past
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
        if past is not None:  # the source has been read, and is in the cache
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
    """Yields every tensor in a cache once, whatever its classes are; `seen` are the ids of what was looked at."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.dim() > 2:  # smaller ones count tokens
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
    """Raises any error of the model's code as a HubError: it needs values, which are not there."""
    with quiet(import_transformers()):
        try:
            yield
        except Exception as error:  # of any class: it depends on what the code does with a value
            first = str(error).strip().partition("\n")[0][:200]
            raise HubError(f"{name} cannot be counted without its weights: {first}") from error
