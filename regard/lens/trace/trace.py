"""A trace in memory: what a model attended to, kept as queries, keys, values and a normaliser a row.

    weight(i, j) = sign_i · a(i, j) · exp(e(i, j) − n_i)

with e the score and a = 1 for softmax, a the product of features for kernel attention. Weights are computed when asked
for, some rows at a time; no matrix over all tokens is ever kept, but for attention that has no such form (`Dense`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import OptionError
from regard.lens.trace.arrays import TraceError
from regard.lens.trace.formulas import Dense, Feature, Formula, OneHot, SoftmaxFormula
from regard.lens.trace.rules import REASONS, Rules
from regard.lens.trace.tokens import Tokens

CELLS = 1 << 21  # weights computed together


@dataclass
class Attended:
    """One attention of a model, all heads. T queries, S keys, H heads, G key/value heads; float32 on the CPU."""

    layer: int
    side: str  # "encoder" or "decoder"
    kind: str  # "self" or "cross"
    name: str  # of the module
    mechanism: str
    queries: int  # the number of the sequence that they are of
    keys: int
    heads: int
    groups: int
    formula: Formula
    rules: Rules = field(default_factory=Rules)
    signed: bool = False
    q: Float[Tensor, "H T K"] | None = None
    k: Float[Tensor, "G S K"] | None = None
    v: Float[Tensor, "G S V"] | None = None
    n: Float[Tensor, "H T"] | None = None  # logarithm of the normaliser
    sign: Float[Tensor, "H T"] | None = None  # of the normaliser
    choice: Int[Tensor, "H T"] | None = None  # the one key of a row; −1 for none
    w: Float[Tensor, "F K"] | None = None  # of random features
    # Logarithms that stored features were divided by.
    cq: Float[Tensor, "H T"] | None = None
    ck: Float[Tensor, "G S"] | None = None
    slopes: Float[Tensor, " H"] | None = None
    offsets: Float[Tensor, "H N"] | None = None
    g: Float[Tensor, "H T V"] | None = None  # gradient of the loss with respect to the output
    overview: Float[Tensor, "H r c"] | None = None
    figures: dict[str, list[float] | None] = field(default_factory=dict)
    error: list[float] = field(default_factory=list)  # of the stored weights of each head, at most


@dataclass(frozen=True)
class Card:
    """What a model is, in a few words and numbers."""

    name: str
    cls: str
    home: str
    parameters: int
    layers: int
    heads: int
    groups: int
    width: int
    key_width: int
    value_width: int
    mechanisms: tuple[str, ...]
    signed: bool = False
    trained: bool | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry of a trace's header."""
        known = asdict(self)
        known["class"] = known.pop("cls")
        return known | {"mechanisms": list(self.mechanisms)}


@dataclass
class Recording:
    """One text through one model."""

    name: str
    model: Card
    sequences: list[Tokens]
    attentions: list[Attended]
    loss: float | None = None
    labels: list[dict[str, Any]] | None = None

    def attention(self, layer: int, kind: str = "self", side: str | None = None) -> Attended:
        """Returns the attention of a layer; in an encoder-decoder say which side's."""
        found = [a for a in self.attentions if a.layer == layer and a.kind == kind and side in (None, a.side)]
        if len(found) > 1 and side is None:
            raise OptionError(f"layer {layer} is on both sides: say side='encoder' or side='decoder'")
        if not found:
            there = ", ".join(f"{a.side} {a.kind} {a.layer}" for a in self.attentions)
            of_side = f" of the {side}" if side else ""
            raise OptionError(f"no {kind}-attention of layer {layer}{of_side}; there is {there}")
        return found[0]

    def weights(
        self,
        layer: int,
        head: int,
        rows: Iterable[int] | None = None,
        *,
        kind: str = "self",
        side: str | None = None,
    ) -> Float[Tensor, "R S"]:
        """Returns the weights of some queries, or of all, over all keys."""
        found = self.attention(layer, kind, side)
        return self.cells(found, [_head(found, head)], self._rows(found, rows))[0]

    def gradient(
        self, layer: int, head: int, rows: Iterable[int] | None = None, *, kind: str = "self", side: str | None = None
    ) -> Float[Tensor, "R S"]:
        """Returns the gradient of the loss with respect to each weight, g_i·v_j, where it was recorded.

        Hidden cells have none.
        """
        found = self.attention(layer, kind, side)
        if found.g is None or found.v is None:
            raise OptionError("no gradient was recorded; ask for it with record(…, gradient=True)")
        at = self._rows(found, rows)
        h = _head(found, head)
        products = found.g[h][at] @ of_heads(found.v, [h], found.heads)[0].T
        return products * found.rules.seen(*self.read(found), at)

    def reason(self, layer: int, i: int, j: int, *, kind: str = "self", side: str | None = None) -> str | None:
        """Returns why query i may not see key j, or None where it may."""
        found = self.attention(layer, kind, side)
        number = int(found.rules.reasons(*self.read(found), self._rows(found, [i]))[0, j])
        return None if number == 0 else REASONS[number - 1]

    def read(self, attended: Attended) -> tuple[Tokens, Tokens]:
        """Returns the sequences of the queries and of the keys."""
        return self.sequences[attended.queries], self.sequences[attended.keys]

    def cells(self, attended: Attended, heads: Sequence[int], rows: Int[Tensor, " R"]) -> Float[Tensor, "h R S"]:
        """Returns the weights of some heads and rows."""
        queries, keys = self.read(attended)
        return cells(attended, queries, keys, heads, rows)

    def tiles(
        self, attended: Attended, heads: Sequence[int] | None = None
    ) -> Iterator[tuple[Int[Tensor, " R"], Float[Tensor, "h R S"]]]:
        """Yields all weights, some rows at a time.

        A pass over all heads fills in normalisers that are not known yet.
        """
        chosen = list(range(attended.heads) if heads is None else heads)
        S = len(self.sequences[attended.keys])
        fills = heads is None and attended.n is None and isinstance(attended.formula, SoftmaxFormula | Feature)
        found: list[tuple[Tensor, Tensor | None]] = []
        for rows in self.spans(attended, len(chosen)):
            if fills:
                weights, n, sign = weigh(attended, *self.read(attended), chosen, rows)
                weights = functional.pad(weights, (0, S - weights.shape[2]))
                found.append((n, sign))
            else:
                weights = self.cells(attended, chosen, rows)
            yield rows, weights
        if found:
            attended.n = torch.cat([n for n, _ in found], 1)
            if attended.signed:
                attended.sign = torch.cat([x for _, x in found if x is not None], 1)

    def spans(self, attended: Attended, heads: int) -> tuple[Int[Tensor, " R"], ...]:
        """Returns all queries, as many together as may be looked at for so many heads."""
        T, S = (len(x) for x in self.read(attended))
        together: tuple[Tensor, ...] = torch.arange(T).split(max(1, CELLS // max(1, heads * S)))
        return together

    def _rows(self, attended: Attended, rows: Iterable[int] | None) -> Int[Tensor, " R"]:
        T = len(self.sequences[attended.queries])
        if rows is None:
            return torch.arange(T)
        given = torch.tensor(list(rows), dtype=torch.long)
        if len(given) and not -T <= int(given.min()) <= int(given.max()) < T:
            raise OptionError(f"rows {int(given.min())} to {int(given.max())}: there are {T} queries, 0 to {T - 1}")
        return given % max(T, 1)


class Trace:
    """Recordings to look at and to compare. A trace of one text answers for it directly."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        if not recordings:
            raise TraceError("a trace without recordings: expected at least one")
        self.recordings = list(recordings)

    @classmethod
    def joined(cls, *traces: Trace) -> Trace:
        """Returns one trace of several: models, checkpoints or texts to compare."""
        return cls([recording for trace in traces for recording in trace.recordings])

    def weights(
        self,
        layer: int,
        head: int,
        rows: Iterable[int] | None = None,
        *,
        kind: str = "self",
        side: str | None = None,
        recording: int = 0,
    ) -> Float[Tensor, "R S"]:
        """Returns the weights of some queries, or of all, over all keys."""
        return self.recordings[recording].weights(layer, head, rows, kind=kind, side=side)

    def gradient(
        self,
        layer: int,
        head: int,
        rows: Iterable[int] | None = None,
        *,
        kind: str = "self",
        side: str | None = None,
        recording: int = 0,
    ) -> Float[Tensor, "R S"]:
        """Returns the gradient of the loss with respect to each weight, where it was recorded."""
        return self.recordings[recording].gradient(layer, head, rows, kind=kind, side=side)

    @property
    def tokens(self) -> list[str]:
        """The tokens of the first recording's last sequence: what was read, or what was written."""
        return self.recordings[0].sequences[-1].tokens

    def save(self, path: str | Path) -> int:
        """Writes a .trace file and says how many bytes it has."""
        from regard.lens.trace.format import save

        return save(self, path)

    def __repr__(self) -> str:
        parts = (
            f"{r.name}: {r.model.name}, {len(r.attentions)} attentions over {len(r.sequences[-1])} tokens"
            for r in self.recordings
        )
        return f"Trace({'; '.join(parts)})"


def cells(
    attended: Attended, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> Float[Tensor, "h R S"]:
    """Returns the weights of some heads and rows of one attention."""
    T = len(queries)
    S = len(keys)
    formula = attended.formula
    if isinstance(formula, Dense):
        if not len(rows):
            return torch.zeros(len(heads), 0, S)
        low = int(rows.min())
        high = int(rows.max()) + 1
        return torch.stack([formula.rows(h, low, high, T, S)[rows - low] for h in heads])
    if isinstance(formula, OneHot):
        assert attended.choice is not None
        column = attended.choice[list(heads)][:, rows, None]
        weights = torch.zeros(len(heads), len(rows), S).scatter_(2, column.clamp(min=0), 1.0)
        return weights.masked_fill(column < 0, 0)
    weights = weigh(attended, queries, keys, heads, rows)[0]
    return functional.pad(weights, (0, S - weights.shape[2]))


def weigh(
    attended: Attended, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> tuple[Float[Tensor, "h R s"], Float[Tensor, "h R"], Float[Tensor, "h R"] | None]:
    """Returns weights of softmax or kernel attention, the logarithm of each row's normaliser, and its sign if any.

    The normaliser is the one that was recorded, or else the sum of the row. Keys behind all that these rows may see are
    left out: s is the reach of the rows.
    """
    keys = keys.until(attended.rules.reach(queries, keys, rows))
    a, e = terms(attended, queries, keys, heads, rows)
    e = e.expand(len(heads), len(rows), len(keys)).masked_fill(~attended.rules.seen(queries, keys, rows), -torch.inf)
    if attended.n is not None:
        return _weigh_by_normaliser(attended, a, e, heads, rows)
    # The largest exponent is taken out, so that exp does not overflow; a row that sees nothing has none.
    peak = e.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    share = torch.exp(e - peak)
    if a is not None:
        share = a * share
    total = share.sum(-1)
    n = (total.abs().log() + peak[..., 0]).float()
    weights = (share / total.masked_fill(total == 0, 1)[..., None]).float()
    return weights, n, total.sign().float() if attended.signed else None


def _weigh_by_normaliser(
    attended: Attended, a: Tensor | None, e: Tensor, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> tuple[Float[Tensor, "h R s"], Float[Tensor, "h R"], Float[Tensor, "h R"] | None]:
    """Returns what `weigh` does where normalisers were recorded."""
    assert attended.n is not None
    n = attended.n[list(heads)][:, rows]
    blind = n[..., None] == -torch.inf
    weights = torch.exp((e - n[..., None].to(e.dtype)).masked_fill_(blind, -torch.inf))
    if a is not None:
        weights = a * weights
    if attended.sign is None:
        return weights.float(), n, None
    sign = attended.sign[list(heads)][:, rows]
    return (weights * sign[..., None]).float(), n, sign


def terms(
    attended: Attended, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> tuple[Tensor | None, Tensor]:
    """Returns (a, e) of each cell, hidden or not: a weight is a·exp(e) over the sum of its row. a None means 1."""
    assert attended.q is not None and attended.k is not None
    q = attended.q[list(heads)][:, rows]
    k = of_heads(attended.k, heads, attended.heads)[:, : len(keys)]
    if isinstance(attended.formula, SoftmaxFormula):
        scores = attended.formula.scores(q, k)
        if has_bias(attended):
            scores = scores + bias(attended, queries, keys, heads, rows)
        return None, scores
    assert isinstance(attended.formula, Feature)
    a, cq, ck = attended.formula.similar(q, k, attended.w)
    if attended.cq is not None:
        cq = attended.cq[list(heads)][:, rows].double()
    if attended.ck is not None:
        ck = of_heads(attended.ck, heads, attended.heads)[:, : len(keys)].double()
    e = torch.zeros(len(heads), len(rows), len(keys), dtype=torch.float64)
    if cq is not None:
        e = e + cq[:, :, None]
    if ck is not None:
        e = e + ck[:, None, :]
    return a, e


def has_bias(attended: Attended) -> bool:
    """Returns whether something is added to scores."""
    return attended.slopes is not None or attended.offsets is not None


def bias(
    attended: Attended, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> Float[Tensor, "#h #R #S"]:
    """Returns what is added to scores: −slope·distance (ALiBi), and an offset for each distance j − i."""
    total = torch.zeros(1, 1, 1)
    if attended.slopes is not None:
        distance = (queries.places[rows][:, None] - keys.places[None]).abs()
        total = total - attended.slopes[list(heads), None, None] * distance
    if attended.offsets is not None:
        column = torch.arange(len(keys))[None] - rows[:, None] + len(queries) - 1
        total = total + attended.offsets[list(heads)][:, column]
    return total


def of_heads(x: Tensor, heads: Sequence[int], H: int) -> Tensor:
    """Returns those of the key/value heads x [G,…] that query heads use."""
    G = x.shape[0]
    if list(heads) == list(range(G)) == list(range(H)):
        return x  # every head has its own: nothing is copied
    return x[[h * G // H for h in heads]]


def _head(attended: Attended, head: int) -> int:
    if not -attended.heads <= head < attended.heads:
        raise OptionError(f"head {head}: there are {attended.heads}, 0 to {attended.heads - 1}")
    return head % attended.heads
