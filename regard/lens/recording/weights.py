"""A trace made from weights alone, so that the lens draws any attention: `regard.weights_of(f, q, k)`, for example."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from regard.errors import OptionError, ShapeError
from regard.lens.recording.mechanism_formulas import TILE_ROWS
from regard.lens.recording.overview import add_overview
from regard.lens.trace.arrays import pack
from regard.lens.trace.formulas import Dense
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Card, RecordedAttention, Recording, Trace


def trace_of_weights(
    weights: Float[Tensor, "*B H T S"],
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    name: str = "weights",
) -> Trace:
    """Returns a trace of attention weights [H,T,S], or of the first example of a batch [B,H,T,S].

    `tokens` are the names of the queries, numbers unless given; `keys` those of the keys, the same unless given.
    """
    if weights.dim() not in (3, 4) or weights.numel() == 0:
        raise ShapeError(f"weights {list(weights.shape)}: expected [H,T,S] or [B,H,T,S], none of them empty")
    if weights.dim() == 4:
        weights = weights[0]
    weights = weights.detach().float().cpu()
    if not bool(weights.isfinite().all()):
        raise OptionError("weights: some are NaN or infinite, and cannot be drawn; look at the function that gave them")
    H, T, S = weights.shape
    sequences = [_name_tokens(tokens, T, "tokens")]
    if keys is not None or S != T:
        sequences.append(_name_tokens(keys, S, "keys"))
    tiles = [[pack(rows, "f16") for rows in head.split(TILE_ROWS)] for head in weights]
    attended = RecordedAttention(
        layer=0,
        side="decoder",
        kind="self" if len(sequences) == 1 else "cross",
        name=name,
        mechanism=name,
        queries=0,
        keys=len(sequences) - 1,
        heads=H,
        groups=H,
        formula=Dense(TILE_ROWS, tiles),
        signed=bool((weights < 0).any()),
        error=(weights - weights.half().float()).abs().amax((1, 2)).tolist(),
    )
    note = "weights alone: there are no queries, keys and values behind them"
    card = Card(name, "function", "regard", 0, 1, H, H, 0, 0, 0, (name,), signed=attended.signed, note=note)
    recording = Recording(name, card, sequences, [attended])
    add_overview(recording, attended)
    return Trace([recording])


def _name_tokens(names: Sequence[str] | None, n: int, what: str) -> Tokens:
    """Returns n tokens with these names, or with numbers."""
    if names is None:
        names = [str(i) for i in range(n)]
    if len(names) != n:
        raise OptionError(f"{what}: {len(names)} names for {n}, expected one for each")
    return Tokens(what, " ".join(names), list(names))
