"""A trace in memory: recordings of models, whose weights are computed on request, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import OptionError
from regard.lens.trace.arrays import TraceError
from regard.lens.trace.attended import RecordedAttention as RecordedAttention
from regard.lens.trace.formulas import KernelFormula, RecurrenceFormula, SoftmaxFormula
from regard.lens.trace.memory import RecordedMemory
from regard.lens.trace.predictions import Predictions
from regard.lens.trace.rules import MAX_ENTRIES, REASONS
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.weighing import head_weights, kv_for_heads, memory_of, weigh


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

    def memory(self, layer: int, head: int, *, side: str | None = None) -> RecordedMemory:
        """Returns the memory of one head of gated or delta attention, which tells what it holds at each token."""
        found = self.attention(layer, "self", side)
        if not isinstance(found.formula, RecurrenceFormula):
            raise OptionError(
                f"layer {layer} is {found.mechanism}, which has no memory; gated and delta attention have one"
            )
        return memory_of(found, [_check_head(found, head)])

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
        S = len(self.sequences[attended.keys])
        for rows, weights in self.reached_chunks(attended, heads):
            yield rows, functional.pad(weights, (0, S - weights.shape[2])) if weights.shape[2] < S else weights

    def reached_chunks(
        self, attended: RecordedAttention, heads: Sequence[int] | None = None
    ) -> Iterator[tuple[Int[Tensor, " R"], Float[Tensor, "h R s"]]]:
        """Yields (row indices, weights [h,R,s]) as `chunks` does, without the last keys that a causal mask hides.

        s is the number of keys up to the last that a query of the chunk may attend to. Only weights that are computed
        from scores or features are shortened.
        """
        chosen = list(range(attended.heads) if heads is None else heads)
        weighed = isinstance(attended.formula, SoftmaxFormula | KernelFormula)
        sets_normalisers = weighed and heads is None and attended.n is None
        found: list[tuple[Tensor, Tensor | None]] = []
        for rows in self.row_chunks(attended, len(chosen)):
            if weighed:
                weights, n, sign = weigh(attended, *self.query_and_key_tokens(attended), chosen, rows)
                found.append((n, sign))
            else:
                weights = self.head_weights(attended, chosen, rows)
            yield rows, weights
        if found and sets_normalisers:
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

    def memory(self, layer: int, head: int, *, side: str | None = None, recording: int = 0) -> RecordedMemory:
        """Returns the memory of one head of gated or delta attention, which tells what it holds at each token."""
        return self.recordings[recording].memory(layer, head, side=side)

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


def _check_head(attended: RecordedAttention, head: int) -> int:
    if not -attended.heads <= head < attended.heads:
        raise OptionError(f"head {head}: there are {attended.heads}, 0 to {attended.heads - 1}")
    return head % attended.heads
