"""What a model costs, part by part: parameters, FLOPs, bytes moved, bytes of state, bytes kept for gradients.

Counts of matrix products are exact (on the plain reference). Bytes are the least: each weight and each tensor between
two operations once. Element-wise FLOPs are rough: 7 a number for a norm, 8 for an activation, 1 for a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from regard.mechanisms import Cost
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder, MaskedHead
from regard.models.seq2seq import Seq2Seq
from regard.models.stack import Stack
from regard.nn import Attention, Block

NOTHING = Cost(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Row:
    """One part. `whole`: of B sequences of T tokens; `gradient`: beside it in training; `step`: of the T-th token of
    each, with a state; `activations`: bytes kept for gradients where attention is fused and keeps no weights."""

    part: str
    parameters: int = 0
    whole: Cost = NOTHING
    gradient: Cost = NOTHING
    step: Cost = NOTHING
    activations: int = 0

    @property
    def sequence(self) -> int:
        """FLOPs of matrix products of the whole sequences."""
        return self.whole.matmul

    @property
    def token(self) -> int:
        """FLOPs of matrix products of the T-th token of each."""
        return self.step.matmul

    @property
    def state(self) -> int:
        """Bytes that the state then has."""
        return self.step.state

    @property
    def training(self) -> Cost:
        """Forward and backward."""
        return self.whole + self.gradient


@dataclass(frozen=True)
class Summary:
    """A table of a model's parts and their total; `print` it, or take `as_dict()`."""

    title: str
    T: int
    rows: tuple[Row, ...]
    B: int = 1

    @property
    def total(self) -> Row:
        return _total("total", self.rows)

    @property
    def useful(self) -> int:
        """FLOPs of matrix products that the whole sequences need: of causal pairs only half count."""
        return self.total.whole.useful

    @property
    def folded(self) -> tuple[Row, ...]:
        """The rows, with layers that are alike as one that says how many."""
        return tuple(_folded(self.rows))

    def as_dict(self) -> dict[str, Any]:
        def shown(row: Row) -> dict[str, Any]:
            return asdict(row) | {"sequence": row.sequence, "token": row.token, "state": row.state}

        sizes = {"model": self.title, "T": self.T, "B": self.B}
        return sizes | {"rows": [shown(r) for r in self.rows], "total": shown(self.total)}

    def __str__(self) -> str:
        head = ("", "parameters", f"FLOPs, T={self.T}", "FLOPs a token", "state bytes")
        lines = [head] + [
            (r.part, *(f"{n:,}" for n in (r.parameters, r.sequence, r.token, r.state)))
            for r in (*self.folded, self.total)
        ]
        widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
        table = [
            "  ".join(x.ljust(w) if n == 0 else x.rjust(w) for n, (x, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        return "\n".join([self.title, *table])


def summarize(model: Model[Any], T: int | None = None, S: int | None = None, B: int = 1) -> Summary:
    """The table of a model for B sequences of T tokens (its length unless said) that read a source of S (T unless
    said)."""
    config = model.config.decoder if isinstance(model, Seq2Seq) else model.config
    T = int(config.length) if T is None else T
    S = T if S is None else S
    rows = [_embedding_row(model, B * T, B * S)]
    if isinstance(model, Seq2Seq):
        rows += _stack_rows(model.encoder, B, S, S, "encoder ", decodes=False)
    stack = model.stack
    assert isinstance(stack, Stack)
    prefix = "decoder " if isinstance(model, Seq2Seq) else ""
    rows += _stack_rows(stack, B, T, S, prefix, decodes=isinstance(model, Decoder))
    return Summary(type(model).__name__, T, (*rows, _head_row(model, B, T)), B)


def _stack_rows(stack: Stack, B: int, T: int, S: int, prefix: str, decodes: bool) -> Iterator[Row]:
    for n, block in enumerate(stack.layers):
        row = _block_row(block, B, T, S, f"{prefix}layer {n} ({block.attention.mechanism.name})", decodes)
        yield _recomputed(row, block, B * T) if stack.config.checkpoint else row
    outer = [m for m in (stack.embedding_norm, stack.final_norm) if m is not None]
    yield _total(prefix + "norm", [_norm_row(norm, B * T, B * decodes) for norm in outer])


def _recomputed(row: Row, block: Block, tokens: int) -> Row:
    """A block of which only the input is kept: all is computed once more on the way back, up to the last tensor that
    gradients need."""
    last = [m.weight for m in block.mlp.modules() if isinstance(m, nn.Linear)][-1]
    spared = 2 * tokens * last.numel() if block.before else 0  # a norm after it would need its result
    again = replace(row.whole, state=0, matmul=row.whole.matmul - spared, useful=row.whole.useful - spared)
    kept = tokens * block.attention.width * last.dtype.itemsize
    return replace(row, gradient=row.gradient + again, activations=kept)


def _block_row(block: Block, B: int, T: int, S: int, name: str, decodes: bool) -> Row:
    norms = [n for n in (block.attention_norm, block.cross_norm, block.mlp_norm) if n is not None]
    parts = [_norm_row(norm, B * T, B * decodes) for norm in norms]
    parts.append(_linears_row([m for m in block.mlp.modules() if isinstance(m, nn.Linear)], B * T, B * decodes))
    for attention, keys in ((block.attention, T), (block.cross, S)):
        if attention is not None:
            parts.append(_attention_row(attention, B, T, keys, decodes))
    return replace(_total(name, parts), parameters=_count(block))


def _attention_row(attention: Attention, B: int, T: int, S: int, decodes: bool) -> Row:
    """Kept: its input, queries, keys, values, the output, and one number for each row of the weights."""
    D, e, size = attention.width, attention.out.weight.dtype.itemsize, attention.size
    given = sum((T if n == "q" else S) * w for n, w in zip(attention.needs, attention.widths, strict=True))
    kept = T * (D + size.H * size.V) + given
    return Row(
        "attention",
        _count(attention),
        attention.cost(T, S, B=B),
        attention.gradient_cost(T, S, B),
        attention.cost(1, S, "recurrent", B) if decodes else NOTHING,
        B * (e * kept + 4 * size.H * T),
    )


def _norm_row(norm: nn.Module, tokens: int, steps: int) -> Row:
    """Kept: its input, and its mean and deviation in float32."""
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    D, e = weight.numel(), weight.dtype.itemsize

    def cost(n: int) -> Cost:
        return Cost(0, 0, 8 * n * D, e * (_count(norm) + 2 * n * D) if n else 0, 0)  # with the sum before or after it

    return Row("norm", _count(norm), cost(tokens), _doubled(cost(tokens)), cost(steps), tokens * (e * D + 8))


def _linears_row(linears: list[nn.Linear], tokens: int, steps: int, last: Tensor | None = None) -> Row:
    """Linear layers one after the other; `last` is one more matrix, which is another part's parameter. Kept: the input,
    and before and after each activation what it takes and gives."""
    weights = [m.weight for m in linears] + ([] if last is None else [last])
    if not weights:
        return Row("linear")
    own, shared = sum(map(_count, linears)), 0 if last is None else last.numel()
    between = sum(w.shape[0] for w in weights[:-1])
    ends, e = weights[0].shape[1] + weights[-1].shape[0], weights[0].dtype.itemsize

    def cost(n: int) -> Cost:
        flops = 2 * n * sum(w.numel() for w in weights)
        return Cost(flops, flops, 8 * n * between, e * (own + shared + n * (ends + between)) if n else 0, 0)

    whole, kept = cost(tokens), e * tokens * (weights[0].shape[1] + 2 * between)
    return Row("linear", own, whole, _doubled(whole), cost(steps), kept)


def _head_row(model: Model[Any], B: int, T: int) -> Row:
    """Kept beside what its layers keep: the logarithms of the probabilities."""
    if isinstance(model, Encoder):
        masked = isinstance(model.head, MaskedHead)
        tied = model.embedding.weight if masked and model.head.table is None else None
        layers, tokens, steps = [m for m in model.head.modules() if isinstance(m, nn.Linear)], B * T if masked else B, 0
    else:
        assert isinstance(model, Decoder)
        tied = model.embedding.weight if model.head is None else None
        layers, tokens, steps = [] if model.head is None else [model.head], B * T, B
    row = _linears_row(layers, tokens, steps, tied)
    widest = [tied.shape[0]] if tied is not None else [m.out_features for m in layers[-1:]]
    kept = tokens * sum(widest) * model.embedding.weight.dtype.itemsize
    own = _count(model.head) if isinstance(model.head, nn.Module) else 0
    return replace(row, part="head", parameters=own, activations=row.activations + kept)


def _embedding_row(model: Model[Any], tokens: int, source: int) -> Row:
    """Rows looked up: read once, written once; kept are the numbers of the tokens."""
    tables = [model.embedding, getattr(model, "source_embedding", None), getattr(model, "types", None)]
    stacks = [s for s in (model.stack, getattr(model, "encoder", None)) if isinstance(s, Stack)]
    modules = [m for m in (*tables, *(s.positions for s in stacks)) if isinstance(m, nn.Module)]
    read = [(model.stack, tokens)] + ([(model.encoder, source)] if isinstance(model, Seq2Seq) else [])
    numbers = sum(n * s.config.width for s, n in read if isinstance(s, Stack))
    whole = Cost(0, 0, numbers, 2 * numbers * next(model.parameters()).dtype.itemsize, 0)
    rows = sum(n for _, n in read)
    return Row("embedding", sum(map(_count, modules)), whole, _doubled(whole), NOTHING, 8 * rows)


def _doubled(cost: Cost) -> Cost:
    """Gradients to what was read and to the weights: twice of everything."""
    return replace(cost + cost, state=0)


def _total(part: str, rows: Iterable[Row]) -> Row:
    total = Row(part)
    for r in rows:
        costs = total.whole + r.whole, total.gradient + r.gradient, total.step + r.step
        total = Row(part, total.parameters + r.parameters, *costs, total.activations + r.activations)
    return total


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _folded(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Layers that are alike, as one row that says how many."""
    alike: list[Row] = []
    for row in (*rows, None):
        if alike and (row is None or _key(row) != _key(alike[0]) or "layer" not in row.part):
            first, n = alike[0], len(alike)
            yield first if n == 1 else _total(f"{first.part} ×{n}", alike)
            alike = []
        if row is not None:
            alike.append(row)


def _key(row: Row) -> Row:
    return replace(row, part=row.part.split(" (")[-1])
