"""Recording models that bypass transformers' attention interface.

Their weights come from `output_attentions`, and q, k, v from forward hooks on the projections, before any rotary
embedding. The weights themselves are stored (dense, in float16).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.hub.attention import HubError
from regard.lens.recording.hub_tokens import numbered_tokens
from regard.lens.recording.mechanism_formulas import TILE_ROWS
from regard.lens.recording.overview import add_overview
from regard.lens.trace.arrays import pack
from regard.lens.trace.formulas import Dense
from regard.lens.trace.rules import MaskRules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Card, RecordedAttention, Recording
from regard.nn.capture import forward_hooks

# Names that models of transformers give to these projections.
_NAMES = {
    "q": ("query", "q_proj", "query_proj", "q_lin", "q", "wq"),
    "k": ("key", "k_proj", "key_proj", "k_lin", "k", "wk"),
    "v": ("value", "v_proj", "value_proj", "v_lin", "v", "wv"),
}


def record_from_output_attentions(
    model: Any, inputs: dict[str, Any], sequence: Tokens | None, name: str, card: Card
) -> Recording:
    """Records one text with a model that returns its weights only through `output_attentions`."""
    projections = _find_projections(model)
    vectors: dict[str, dict[str, Tensor]] = {parent: {} for parent in projections}
    before = model.config._attn_implementation_internal
    with ExitStack() as undo:
        undo.callback(setattr, model.config, "_attn_implementation_internal", before)
        model.config._attn_implementation_internal = "eager"  # other implementations return no weights
        for parent, modules in projections.items():
            for letter, module in modules.items():
                undo.enter_context(forward_hooks([module], partial(_keep_first, vectors[parent], letter)))
        out = model(**inputs, output_attentions=True)
    maps = [x for x in (getattr(out, "attentions", None) or ()) if isinstance(x, Tensor) and x.dim() == 4]
    if not maps:
        raise HubError(
            f"{type(model).__name__} makes its attention itself and gives none when asked with output_attentions: "
            "record a model that uses transformers' attention interface"
        )
    T = maps[0].shape[2]
    if sequence is None or len(sequence) != T:
        sequence = numbered_tokens(T)
    recording = Recording(name, card, [sequence], [])
    parents = [parent for parent in projections if len(vectors[parent]) == 3]
    if len(parents) != len(maps):  # it is not known which projections belong to which weights
        parents = [""] * len(maps)
    for layer, weights in enumerate(maps):
        parent = parents[layer]
        attended = _build_recorded(layer, parent, weights[0].detach().float().cpu(), vectors.get(parent, {}))
        recording.attentions.append(attended)
        add_overview(recording, attended)
    return recording


def _find_projections(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Returns {name of the parent module: {"q", "k", "v": projection module}}, for parents that have all three."""
    modules: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        parent, _, own = name.rpartition(".")
        for letter, names in _NAMES.items():
            if own in names and isinstance(getattr(module, "weight", None), Tensor):
                modules.setdefault(parent, {})[letter] = module
    return {parent: parts for parent, parts in modules.items() if len(parts) == 3}


def _keep_first(
    vectors: dict[str, Tensor], letter: str, module: nn.Module, inputs: tuple[Any, ...], out: Tensor
) -> None:
    """Forward hook: stores the output [T,width] of the first call, for the first example of the batch."""
    vectors.setdefault(letter, out[0].detach().float().cpu())


def _build_recorded(
    layer: int, name: str, weights: Float[Tensor, "H T S"], vectors: dict[str, Tensor]
) -> RecordedAttention:
    """Returns the `RecordedAttention` of one layer.

    Leaves out q, k or v if its shape is not [T,width] with a width divisible by the number of heads.
    """
    H, T, S = weights.shape
    causal = T == S and not bool(weights.triu(1).any())
    per_head = {
        letter: x.view(x.shape[0], H, -1).transpose(0, 1).contiguous()
        for letter, x in vectors.items()
        if x.dim() == 2 and x.shape[1] % H == 0 and x.shape[0] == T
    }
    side = "decoder" if causal else "encoder"
    tiles = [[pack(rows, "f16") for rows in head.split(TILE_ROWS)] for head in weights]
    attended = RecordedAttention(
        layer, side, "self", name, "softmax", 0, 0, H, H, Dense(TILE_ROWS, tiles), MaskRules(causal=causal)
    )
    attended.q, attended.k, attended.v = (per_head.get(letter) for letter in "qkv")
    attended.error = (weights - weights.half().float()).abs().amax((1, 2)).tolist()
    return attended
