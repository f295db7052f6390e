"""What a model costs, part by part: parameters, FLOPs, bytes of state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder, MaskedHead
from regard.models.seq2seq import Seq2Seq
from regard.models.stack import Stack
from regard.nn import Block


@dataclass(frozen=True)
class Row:
    """One part. `sequence`: FLOPs of matrix products for a whole sequence of T tokens; `token`: for the T-th token,
    with a state; `state`: bytes that the state of one sequence then has; `spared`: FLOPs of the sequence that go into
    pairs which causality hides."""

    part: str
    parameters: int
    sequence: int
    token: int
    state: int
    spared: int = 0


@dataclass(frozen=True)
class Summary:
    """A table of a model's parts and their total; `print` it, or take `as_dict()`."""

    title: str
    T: int
    rows: tuple[Row, ...]

    @property
    def total(self) -> Row:
        sums = (sum(getattr(r, n) for r in self.rows) for n in ("parameters", "sequence", "token", "state"))
        return Row("total", *sums)

    @property
    def useful(self) -> int:
        """FLOPs of matrix products that a whole sequence needs: of causal pairs only half count."""
        return self.total.sequence - sum(r.spared for r in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.title, "T": self.T, "rows": [asdict(r) for r in self.rows], "total": asdict(self.total)}

    def __str__(self) -> str:
        head = ("", "parameters", f"FLOPs, T={self.T}", "FLOPs a token", "state bytes")
        lines = [head] + [
            (r.part, *(f"{n:,}" for n in (r.parameters, r.sequence, r.token, r.state)))
            for r in (*_folded(self.rows), self.total)
        ]
        widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
        table = [
            "  ".join(x.ljust(w) if n == 0 else x.rjust(w) for n, (x, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        return "\n".join([self.title, *table])


def summarize(model: Model[Any], T: int | None = None, S: int | None = None) -> Summary:
    """The table of a model for sequences of T tokens (its length unless said) that read a source of S (T unless
    said)."""
    config = model.config.decoder if isinstance(model, Seq2Seq) else model.config
    T = int(config.length) if T is None else T
    S = T if S is None else S
    rows = [Row("embedding", _embeddings(model), 0, 0, 0)]
    if isinstance(model, Seq2Seq):
        rows += _stack_rows(model.encoder, S, S, "encoder ", decodes=False)
    stack = model.stack
    assert isinstance(stack, Stack)
    prefix = "decoder " if isinstance(model, Seq2Seq) else ""
    rows += _stack_rows(stack, T, S, prefix, decodes=isinstance(model, Decoder))
    return Summary(type(model).__name__, T, (*rows, _head_row(model, T)))


def _stack_rows(stack: Stack, T: int, S: int, prefix: str, decodes: bool) -> Iterator[Row]:
    for n, block in enumerate(stack.layers):
        yield _block_row(block, T, S, f"{prefix}layer {n} ({block.attention.mechanism.name})", decodes)
    outer = [m for m in (stack.embedding_norm, stack.final_norm) if m is not None]
    yield Row(prefix + "norm", sum(map(_count, outer)), 0, 0, 0)


def _block_row(block: Block, T: int, S: int, name: str, decodes: bool) -> Row:
    mlp = 2 * sum(m.weight.numel() for m in block.mlp.modules() if isinstance(m, nn.Linear))
    sequence, token, state, spared = T * mlp, mlp if decodes else 0, 0, 0
    for attention, keys in ((block.attention, T), (block.cross, S)):
        if attention is None:
            continue
        whole = attention.cost(T, keys)
        sequence, spared = sequence + whole.matmul, spared + whole.matmul - whole.useful
        if decodes:
            step = attention.cost(1, keys, "recurrent")
            token, state = token + step.matmul, state + step.state
    return Row(name, _count(block), sequence, token, state, spared)


def _head_row(model: Model[Any], T: int) -> Row:
    if isinstance(model, Encoder):
        flops = 2 * sum(m.weight.numel() for m in model.head.modules() if isinstance(m, nn.Linear))
        if isinstance(model.head, MaskedHead):
            flops = T * (flops + (2 * model.embedding.weight.numel() if model.head.table is None else 0))
        return Row("head", _count(model.head), flops, 0, 0)
    assert isinstance(model, Decoder)
    flops = 2 * model.embedding.weight.numel()
    return Row("head", 0 if model.head is None else _count(model.head), T * flops, flops, 0)


def _embeddings(model: Model[Any]) -> int:
    tables = [model.embedding, getattr(model, "source_embedding", None), getattr(model, "types", None)]
    stacks = [s for s in (model.stack, getattr(model, "encoder", None)) if isinstance(s, Stack)]
    return sum(_count(m) for m in (*tables, *(s.positions for s in stacks)) if isinstance(m, nn.Module))


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _folded(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Layers that are alike, as one row that says how many."""
    alike: list[Row] = []
    for row in (*rows, None):
        if alike and (row is None or _key(row) != _key(alike[0]) or "layer" not in row.part):
            first, n = alike[0], len(alike)
            yield first if n == 1 else Row(f"{first.part} ×{n}", *(n * x for x in _key(first)[1:]))
            alike = []
        if row is not None:
            alike.append(row)


def _key(row: Row) -> tuple[Any, ...]:
    name = row.part.split(" (")[-1]
    return name, row.parameters, row.sequence, row.token, row.state
