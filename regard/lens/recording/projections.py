"""Models that make their attention themselves: their weights by `output_attentions`, their q, k, v by the projections.

Only what such a model gives out can be kept: its weights as they are, and the vectors as they leave the projections,
before any rotation.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from regard.hub.attention import HubError
from regard.lens.recording.capture import TILE
from regard.lens.recording.overview import overview
from regard.lens.trace.arrays import packed
from regard.lens.trace.formulas import Dense
from regard.lens.trace.rules import Rules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Attended, Card, Recording

_NAMES = {
    "q": ("query", "q_proj", "query_proj", "q_lin", "q", "wq"),
    "k": ("key", "k_proj", "key_proj", "k_lin", "k", "wk"),
    "v": ("value", "v_proj", "value_proj", "v_lin", "v", "wv"),
}


def record_projections(model: Any, inputs: dict[str, Any], sequence: Tokens | None, name: str, card: Card) -> Recording:
    """One text through a model that gives its attention only when asked for it."""
    found = _projections(model)
    given: dict[str, dict[str, Tensor]] = {parent: {} for parent in found}
    before = model.config._attn_implementation_internal
    with ExitStack() as hooks:
        hooks.callback(setattr, model.config, "_attn_implementation_internal", before)
        model.config._attn_implementation_internal = "eager"
        for parent, parts in found.items():
            for letter, part in parts.items():
                hooks.callback(part.register_forward_hook(_keeper(given[parent], letter)).remove)
        out = model(**inputs, output_attentions=True)
    maps = [x for x in (getattr(out, "attentions", None) or ()) if isinstance(x, Tensor) and x.dim() == 4]
    if not maps:
        raise HubError(
            f"{type(model).__name__} makes its attention itself and gives none when asked with output_attentions: "
            "record a model that uses transformers' attention interface"
        )
    T = maps[0].shape[2]
    if sequence is None or len(sequence) != T:
        sequence = Tokens("tokens", "", [str(i) for i in range(T)])
    made = Recording(name, card, [sequence], [])
    parents = [p for p in found if len(given[p]) == 3]
    for layer, weights in enumerate(maps):
        where = parents[layer] if len(parents) == len(maps) else ""
        made.attentions.append(_attended(layer, where, weights[0].detach().float().cpu(), given.get(where, {})))
        overview(made, made.attentions[-1])
    return made


def _projections(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Modules that project to queries, keys and values, by the module that they belong to."""
    found: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        parent, _, own = name.rpartition(".")
        for letter, names in _NAMES.items():
            if own in names and isinstance(getattr(module, "weight", None), Tensor):
                found.setdefault(parent, {})[letter] = module
    return {parent: parts for parent, parts in found.items() if len(parts) == 3}


def _keeper(into: dict[str, Tensor], letter: str) -> Any:
    def keep(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        into.setdefault(letter, out[0].detach().float().cpu())

    return keep


def _attended(layer: int, name: str, weights: Tensor, given: dict[str, Tensor]) -> Attended:
    H, T, S = weights.shape
    causal = T == S and not bool(weights.triu(1).any())
    vectors = {
        letter: x.view(x.shape[0], H, -1).transpose(0, 1).contiguous()
        for letter, x in given.items()
        if x.dim() == 2 and x.shape[1] % H == 0 and x.shape[0] == T
    }
    rules = Rules(causal=causal)
    side = "decoder" if causal else "encoder"
    made = Attended(layer, side, "self", name, "softmax", 0, 0, H, H, Dense(TILE, []), rules)
    made.q, made.k, made.v = (vectors.get(letter) for letter in "qkv")
    made.error = (weights - weights.half().float()).abs().amax((1, 2)).tolist()
    made.formula = Dense(TILE, [[packed(rows, "f16") for rows in head.split(TILE)] for head in weights])
    return made
