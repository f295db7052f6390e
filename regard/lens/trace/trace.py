"""A trace in memory: for each head queries, keys and values, and for each query a log-normaliser n.

    weight(i, j) = sign_i · a(i, j) · exp(e(i, j) − n_i)

For softmax attention `e` is the score and `a` is 1; for kernel attention `a` · exp(`e`) is φ(q)·φ(k), and `sign_i` is
the sign of the normaliser. Weights are computed on request, a chunk of rows at a time. One-hot attention stores the
index of the attended key; other attention that has no such form stores the whole T×S matrix (`Dense`).
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
from regard.lens.trace.formulas import Dense, Formula, KernelFormula, OneHot, SoftmaxFormula
from regard.lens.trace.predictions import Predictions
from regard.lens.trace.rules import MAX_ENTRIES, REASONS, MaskRules
from regard.lens.trace.tokens import Tokens


@dataclass
class RecordedAttention:
    """What was recorded of one attention module, all heads; the tensors are on the CPU, float32 except `choice`.

    T queries, S keys, H heads, G key/value heads. `queries` and `keys` are indices into `Recording.sequences`. The
    names of the fields are keys of the trace format (docs/trace-format.md), where `formula` is "weights" and `rules` is
    "mask".
    """

    layer: int
    side: str  # "encoder" or "decoder"
    kind: str  # "self" or "cross"
    name: str  # the module's name in the model
    mechanism: str
    queries: int  # index of the sequence that the queries come from
    keys: int  # index of the sequence that the keys come from
    heads: int
    groups: int  # key/value heads
    formula: Formula
    rules: MaskRules = field(default_factory=MaskRules)
    signed: bool = False  # whether weights may be negative
    q: Float[Tensor, "H T K"] | None = None
    k: Float[Tensor, "G S K"] | None = None
    v: Float[Tensor, "G S V"] | None = None
    n: Float[Tensor, "H T"] | None = None  # log of the row's normaliser, −inf if the row is fully masked
    sign: Float[Tensor, "H T"] | None = None  # sign of the normaliser, if weights may be negative
    choice: Int[Tensor, "H T"] | None = None  # one-hot attention: index of the attended key, −1 for none
    w: Float[Tensor, "F K"] | None = None  # projection matrix of the random features
    # If q and k hold features, the features are q·exp(cq) and k·exp(ck).
    cq: Float[Tensor, "H T"] | None = None
    ck: Float[Tensor, "G S"] | None = None
    slopes: Float[Tensor, " H"] | None = None  # ALiBi
    offsets: Float[Tensor, "H N"] | None = None  # relative position bias, for j − i = 1 − T … S − 1
    g: Float[Tensor, "H T V"] | None = None  # gradient of the loss with respect to the heads' outputs
    vo: Float[Tensor, "H S"] | None = None  # length of each value after the output projection, ‖v · W_o‖
    overview: Float[Tensor, "H r c"] | None = None  # thumbnail of at most 32×32 (`add_overview`)
    figures: dict[str, list[float] | None] = field(default_factory=dict)  # summary statistics, one number per head
    # For each head: largest absolute error of its weights in the stored trace (kernel attention: in a sample of rows).
    error: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Card:
    """A summary of a model: its name, class and sizes."""

    name: str
    cls: str  # name of the model's class
    home: str  # library: "regard" or "transformers"
    parameters: int
    layers: int
    heads: int
    groups: int  # key/value heads
    width: int
    key_width: int
    value_width: int
    mechanisms: tuple[str, ...]
    signed: bool = False  # whether weights may be negative
    trained: bool | None = None  # None if unknown
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the card as a dict for the header of a trace."""
        entry = asdict(self)
        entry["class"] = entry.pop("cls")
        return entry | {"mechanisms": list(self.mechanisms)}


@dataclass
class Recording:
    """The attention of one model while it read one text.

    An encoder-decoder has two sequences, the source and the target.
    """

    name: str
    model: Card
    sequences: list[Tokens]
    attentions: list[RecordedAttention]
    loss: float | None = None
    labels: list[dict[str, Any]] | None = None  # what each head attends to (`HeadLabel.as_dict`)
    predictions: Predictions | None = None  # of a language model: what it would say next

    def attention(self, layer: int, kind: str = "self", side: str | None = None) -> RecordedAttention:
        """Returns the recorded attention of a layer; for an encoder-decoder `side` is "encoder" or "decoder"."""
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
        """Returns the weights [R,S] of one head over all keys, for the queries `rows` (by default all)."""
        found = self.attention(layer, kind, side)
        return self.head_weights(found, [_check_head(found, head)], self._row_indices(found, rows))[0]

    def gradient(
        self, layer: int, head: int, rows: Iterable[int] | None = None, *, kind: str = "self", side: str | None = None
    ) -> Float[Tensor, "R S"]:
        """Returns the gradient [R,S] of the loss with respect to the weights of one head, g_i·v_j.

        Masked entries are 0. Raises OptionError if no gradient was recorded.
        """
        found = self.attention(layer, kind, side)
        if found.g is None or found.v is None:
            raise OptionError("no gradient was recorded; ask for it with record(…, gradient=True)")
        at = self._row_indices(found, rows)
        h = _check_head(found, head)
        products = found.g[h][at] @ kv_for_heads(found.v, [h], found.heads)[0].T
        return products * found.rules.allowed(*self.query_and_key_tokens(found), at)

    def reason(self, layer: int, i: int, j: int, *, kind: str = "self", side: str | None = None) -> str | None:
        """Returns why query i may not attend to key j (one of `REASONS`), or None if it may."""
        found = self.attention(layer, kind, side)
        number = int(found.rules.reasons(*self.query_and_key_tokens(found), self._row_indices(found, [i]))[0, j])
        return None if number == 0 else REASONS[number - 1]

    def query_and_key_tokens(self, attended: RecordedAttention) -> tuple[Tokens, Tokens]:
        """Returns the tokens of the queries and the tokens of the keys."""
        return self.sequences[attended.queries], self.sequences[attended.keys]

    def head_weights(
        self, attended: RecordedAttention, heads: Sequence[int], rows: Int[Tensor, " R"]
    ) -> Float[Tensor, "h R S"]:
        """Returns the weights of the given heads and query rows over all keys."""
        queries, keys = self.query_and_key_tokens(attended)
        return head_weights(attended, queries, keys, heads, rows)

    def chunks(
        self, attended: RecordedAttention, heads: Sequence[int] | None = None
    ) -> Iterator[tuple[Int[Tensor, " R"], Float[Tensor, "h R S"]]]:
        """Yields (row indices, weights of these rows) until all rows were yielded, a chunk at a time.

        A complete pass over all heads also sets `attended.n` (and `sign`) if they are not known yet.
        """
        chosen = list(range(attended.heads) if heads is None else heads)
        S = len(self.sequences[attended.keys])
        sets_normalisers = (
            heads is None and attended.n is None and isinstance(attended.formula, SoftmaxFormula | KernelFormula)
        )
        found: list[tuple[Tensor, Tensor | None]] = []
        for rows in self.row_chunks(attended, len(chosen)):
            if sets_normalisers:
                weights, n, sign = weigh(attended, *self.query_and_key_tokens(attended), chosen, rows)
                weights = functional.pad(weights, (0, S - weights.shape[2]))
                found.append((n, sign))
            else:
                weights = self.head_weights(attended, chosen, rows)
            yield rows, weights
        if found:
            attended.n = torch.cat([n for n, _ in found], 1)
            if attended.signed:
                attended.sign = torch.cat([x for _, x in found if x is not None], 1)

    def row_chunks(self, attended: RecordedAttention, heads: int) -> tuple[Int[Tensor, " R"], ...]:
        """Returns all query indices in chunks, so that heads × rows × keys stays within MAX_ENTRIES."""
        T, S = (len(x) for x in self.query_and_key_tokens(attended))
        chunks: tuple[Tensor, ...] = torch.arange(T).split(max(1, MAX_ENTRIES // max(1, heads * S)))
        return chunks

    def _row_indices(self, attended: RecordedAttention, rows: Iterable[int] | None) -> Int[Tensor, " R"]:
        T = len(self.sequences[attended.queries])
        if rows is None:
            return torch.arange(T)
        given = torch.tensor(list(rows), dtype=torch.long)
        if len(given) and not -T <= int(given.min()) <= int(given.max()) < T:
            raise OptionError(f"rows {int(given.min())} to {int(given.max())}: there are {T} queries, 0 to {T - 1}")
        return given % max(T, 1)


class Trace:
    """One or more recordings; `weights` and `gradient` use the first unless `recording=` is given."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        if not recordings:
            raise TraceError("a trace without recordings: expected at least one")
        self.recordings = list(recordings)

    @classmethod
    def joined(cls, *traces: Trace) -> Trace:
        """Returns one trace with the recordings of several, to compare models, checkpoints or texts."""
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
        """Returns the weights [R,S] of one head over all keys, for the queries `rows` (by default all)."""
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
        """Returns the gradient [R,S] of the loss with respect to the weights of one head.

        Raises OptionError if no gradient was recorded.
        """
        return self.recordings[recording].gradient(layer, head, rows, kind=kind, side=side)

    @property
    def tokens(self) -> list[str]:
        """The tokens of the last sequence of the first recording: its text, or the target of an encoder-decoder."""
        return self.recordings[0].sequences[-1].tokens

    def save(self, path: str | Path) -> int:
        """Writes a .trace file and returns its size in bytes."""
        from regard.lens.trace.format import save

        return save(self, path)

    def __repr__(self) -> str:
        parts = (
            f"{r.name}: {r.model.name}, {len(r.attentions)} attentions over {len(r.sequences[-1])} tokens"
            for r in self.recordings
        )
        return f"Trace({'; '.join(parts)})"


def head_weights(
    attended: RecordedAttention, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> Float[Tensor, "h R S"]:
    """Returns the weights of the given heads and query rows of one attention module over all keys."""
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
    attended: RecordedAttention, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> tuple[Float[Tensor, "h R s"], Float[Tensor, "h R"], Float[Tensor, "h R"] | None]:
    """Returns the weights of softmax or kernel attention, and for each row log |normaliser| and the normaliser's sign.

    The sign is None if weights cannot be negative.

    The recorded normaliser is used if there is one, otherwise the sum of the row. If the mask is causal, the keys after
    the last one that any of these rows may attend to are dropped; s is the number of keys that are left.
    """
    keys = keys.prefix(attended.rules.reach(queries, keys, rows))
    a, e = factor_and_exponent(attended, queries, keys, heads, rows)
    # `e` was made for this call, so all that follows is done in place: these are passes over every cell of a trace.
    e = e.expand(len(heads), len(rows), len(keys)).masked_fill_(
        attended.rules.reasons(queries, keys, rows) != 0, -torch.inf
    )
    if attended.n is not None:
        return _weigh_by_normaliser(attended, a, e, heads, rows)
    # The largest exponent is subtracted, so that exp does not overflow; in a fully masked row it would be −inf.
    peak = e.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    unnormalised = e.sub_(peak).exp_()
    if a is not None:
        unnormalised = a * unnormalised
    total = unnormalised.sum(-1)
    n = (total.abs().log() + peak[..., 0]).float()
    weights = unnormalised.div_(total.masked_fill(total == 0, 1)[..., None]).float()
    return weights, n, total.sign().float() if attended.signed else None


def _weigh_by_normaliser(
    attended: RecordedAttention, a: Tensor | None, e: Tensor, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> tuple[Float[Tensor, "h R s"], Float[Tensor, "h R"], Float[Tensor, "h R"] | None]:
    """Returns the result of `weigh` from the recorded normalisers."""
    assert attended.n is not None
    n = attended.n[list(heads)][:, rows]
    # In a fully masked row n is −inf, and all weights are exp(−inf) = 0.
    shift = n.masked_fill(n == -torch.inf, torch.inf)
    weights = e.sub_(shift[..., None].to(e.dtype)).exp_()
    if a is not None:
        weights = a * weights
    if attended.sign is None:
        return weights.float(), n, None
    sign = attended.sign[list(heads)][:, rows]
    return (weights * sign[..., None]).float(), n, sign


def factor_and_exponent(
    attended: RecordedAttention, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> tuple[Tensor | None, Tensor]:
    """Returns factor `a` and exponent `e` of every entry, masked or not; `a` is None if it is 1 everywhere.

    The weight of an allowed entry is a·exp(e) divided by the normaliser of its row; that of a masked entry is 0.
    """
    assert attended.q is not None and attended.k is not None
    q = attended.q[list(heads)][:, rows]
    k = kv_for_heads(attended.k, heads, attended.heads)[:, : len(keys)]
    if isinstance(attended.formula, SoftmaxFormula):
        scores = attended.formula.scores(q, k)
        if has_bias(attended):
            scores = scores + bias(attended, queries, keys, heads, rows)
        return None, scores
    assert isinstance(attended.formula, KernelFormula)
    a, cq, ck = attended.formula.kernel_terms(q, k, attended.w)
    if attended.cq is not None:
        cq = attended.cq[list(heads)][:, rows].double()
    if attended.ck is not None:
        ck = kv_for_heads(attended.ck, heads, attended.heads)[:, : len(keys)].double()
    e = torch.zeros(len(heads), len(rows), len(keys), dtype=torch.float64)
    if cq is not None:
        e = e + cq[:, :, None]
    if ck is not None:
        e = e + ck[:, None, :]
    return a, e


def has_bias(attended: RecordedAttention) -> bool:
    """Returns whether a bias is added to the scores."""
    return attended.slopes is not None or attended.offsets is not None


def bias(
    attended: RecordedAttention, queries: Tokens, keys: Tokens, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> Float[Tensor, "#h #R #S"]:
    """Returns the bias of the scores: −slope·|distance| (ALiBi) plus a stored bias for each distance j − i."""
    total = torch.zeros(1, 1, 1)
    if attended.slopes is not None:
        distance = (queries.position_tensor[rows][:, None] - keys.position_tensor[None]).abs()
        total = total - attended.slopes[list(heads), None, None] * distance
    if attended.offsets is not None:
        column = torch.arange(len(keys))[None] - rows[:, None] + len(queries) - 1
        total = total + attended.offsets[list(heads)][:, column]
    return total


def kv_for_heads(x: Tensor, heads: Sequence[int], H: int) -> Tensor:
    """Returns for each of the given query heads (out of H) its key/value head from x [G,…]."""
    G = x.shape[0]
    if list(heads) == list(range(G)) == list(range(H)):
        return x  # every query head has its own key/value head: no copy is needed
    return x[[h * G // H for h in heads]]


def _check_head(attended: RecordedAttention, head: int) -> int:
    if not -attended.heads <= head < attended.heads:
        raise OptionError(f"head {head}: there are {attended.heads}, 0 to {attended.heads - 1}")
    return head % attended.heads
