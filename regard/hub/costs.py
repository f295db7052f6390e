"""What a Hugging Face model costs, counted without its weights: it runs on tensors that have shapes and no numbers."""

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
    """B sequences of T tokens. `forward`: FLOPs of matrix products of all of them; `step`: of one more token of each;
    `cache`: bytes that the cache of all had before it; `a_token`: bytes that it adds for one sequence. Without a cache
    the last three are None; so are FLOPs where the tokens choose their experts, which are not counted."""

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
    """Costs of a folder, of a model downloaded before, or of a kind such as 'llama' as its config comes."""
    from torch.utils.flop_counter import FlopCounterMode  # it loads triton where there is one, which takes its time

    model = model_on_meta(name, download).to(dtype)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise HubError(f"{name} reads no text but {model.main_input_name}, so its cost for T tokens is not known")
    model.set_attn_implementation("eager")  # products that the counter sees
    with _counted(name), torch.no_grad(), FlopCounterMode(display=False) as whole:
        past = _run(model, B, T)
    step = cache = a_token = None
    if past is not None:
        cache = sum(x.nbytes for x in _tensors(past))
        with _counted(name), torch.no_grad(), FlopCounterMode(display=False) as one:
            past = _run(model, B, 1, past)
        step = one.get_total_flops()
        a_token = (sum(x.nbytes for x in _tensors(past)) - cache) // B
    chosen = any(("expert" in key and "num" in key) or key == "n_routed_experts" for key in model.config.to_dict())
    parameters = list(model.parameters())
    return HubModelCost(
        name=display_name(name),
        kind=str(model.config.model_type),
        parameters=sum(p.numel() for p in parameters),
        weights=sum(p.nbytes for p in parameters),
        B=B,
        T=T,
        forward=None if chosen else whole.get_total_flops(),
        step=None if chosen else step,
        cache=cache,
        a_token=a_token,
    )


def _run(model: Any, B: int, T: int, past: Any = None) -> Any:
    """The cache after T more tokens; None where there is none."""
    tokens = torch.zeros(B, T, dtype=torch.long, device="meta")
    given: dict[str, Any] = {"use_cache": True} if past is None else {"use_cache": True, "past_key_values": past}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = tokens
        if past is not None:  # the source has been read
            width = model.config.hidden_size
            given["encoder_outputs"] = (torch.zeros(B, T, width, device="meta", dtype=model.dtype),)
    with torch.device("meta"):
        out = model(tokens, **given)
    return getattr(out, "past_key_values", None)


def _tensors(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that a cache holds, whatever its classes are."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.dim() > 2:  # and not a count of tokens
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
def _counted(name: str | Path) -> Iterator[None]:
    """Inside, what a model cannot do without numbers becomes an error that says so."""
    with quiet(import_transformers()):
        try:
            yield
        except Exception as error:  # anything that its code asks of numbers that are not there
            first = str(error).strip().partition("\n")[0][:200]
            raise HubError(f"{name} cannot be counted without its weights: {first}") from error
