"""The cost of a model, part by part: parameters, FLOPs, bytes moved, bytes of state, bytes kept for gradients.

FLOPs of matrix products are exact (for the plain reference). Bytes moved are the minimum: each weight and each tensor
between two operations once. Element-wise FLOPs are rough: 7 a number for a norm, 8 for an activation, 1 for a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from regard.mechanisms import Cost
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import MaskedHead
from regard.models.seq2seq import Seq2Seq
from regard.models.stack import Stack
from regard.nn import Attention, Block

NOTHING = Cost(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Row:
    """The cost of one part of a model.

    `whole`: the forward pass over B sequences of T tokens; `gradient`: its backward pass; `step`: decoding the T-th
    token of each sequence; `activations`: bytes kept for gradients if attention is fused and keeps no weights.
    """

    part: str
    parameters: int = 0
    whole: Cost = NOTHING
    gradient: Cost = NOTHING
    step: Cost = NOTHING
    activations: int = 0

    @property
    def sequence(self) -> int:
        """Returns FLOPs of matrix products of the whole sequences."""
        return self.whole.matmul

    @property
    def token(self) -> int:
        """Returns FLOPs of matrix products for the T-th token of each sequence."""
        return self.step.matmul

    @property
    def state(self) -> int:
        """Returns the bytes of the decoding state after T tokens."""
        return self.step.state

    @property
    def training(self) -> Cost:
        """Returns the cost of forward and backward together."""
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
        """Returns the sum of all rows."""
        return _sum_rows("total", self.rows)

    @property
    def useful(self) -> int:
        """Returns the FLOPs of matrix products that whole sequences need: those of hidden pairs do not count."""
        return self.total.whole.useful

    @property
    def folded(self) -> tuple[Row, ...]:
        """Returns the rows, with consecutive equal layers summed into one row that says how many they are."""
        return tuple(_fold_layers(self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Returns the table as plain dicts and lists, for JSON."""

        def row_dict(row: Row) -> dict[str, Any]:
            return asdict(row) | {"sequence": row.sequence, "token": row.token, "state": row.state}

        sizes = {"model": self.title, "T": self.T, "B": self.B}
        return sizes | {"rows": [row_dict(r) for r in self.rows], "total": row_dict(self.total)}

    def __str__(self) -> str:
        head = ("", "parameters", f"FLOPs, T={self.T}", "FLOPs a token", "state bytes")
        lines = [head] + [
            (r.part, *(f"{n:,}" for n in (r.parameters, r.sequence, r.token, r.state)))
            for r in (*self.folded, self.total)
        ]
        widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
        table = []
        for name, *numbers in lines:
            aligned = (x.rjust(width) for x, width in zip(numbers, widths[1:], strict=True))
            table.append("  ".join([name.ljust(widths[0]), *aligned]))
        return "\n".join([self.title, *table])


def summarize(model: Model[Any], T: int | None = None, S: int | None = None, B: int = 1) -> Summary:
    """Returns the table of a model for B sequences of T tokens that read a source of S.

    T is by default the model's length, and S is T.
    """
    stack = model.stack
    assert isinstance(stack, Stack)
    if T is None:
        T = int(stack.config.length)
    if S is None:
        S = T
    rows = [_embedding_row(model, B * T, B * S)]
    prefix = ""
    if isinstance(model, Seq2Seq):
        rows += _stack_rows(model.encoder, B, S, S, "encoder ", decodes=False)
        prefix = "decoder "
    rows += _stack_rows(stack, B, T, S, prefix, decodes=isinstance(model, Decoder))
    return Summary(type(model).__name__, T, (*rows, _head_row(model, B, T)), B)


def _stack_rows(stack: Stack, B: int, T: int, S: int, prefix: str, decodes: bool) -> Iterator[Row]:
    """Yields a row for each block and one for the norms around them; `decodes`: decoding steps are counted."""
    for n, block in enumerate(stack.layers):
        row = _block_row(block, B, T, S, f"{prefix}layer {n} ({block.attention.mechanism.name})", decodes)
        if stack.config.checkpoint:
            row = _checkpointed_row(row, block, B * T)
        yield row
    outer = [m for m in (stack.embedding_norm, stack.final_norm) if m is not None]
    yield _sum_rows(prefix + "norm", [_norm_row(norm, B * T, B * decodes) for norm in outer])


def _checkpointed_row(row: Row, block: Block, tokens: int) -> Row:
    """Returns the row of a block of which only the input is kept for gradients.

    The backward pass computes the rest once more, up to the last tensor that gradients need.
    """
    last = [m.weight for m in (block.mlp or block.attention.out).modules() if isinstance(m, nn.Linear)][-1]
    spared = 0
    if block.before:
        # The last product feeds only a sum, whose gradient needs no values; a norm after it would need them.
        spared = 2 * tokens * last.numel()
    again = replace(row.whole, state=0, matmul=row.whole.matmul - spared, useful=row.whole.useful - spared)
    kept = tokens * block.attention.width * last.dtype.itemsize
    return replace(row, gradient=row.gradient + again, activations=kept)


def _block_row(block: Block, B: int, T: int, S: int, name: str, decodes: bool) -> Row:
    """Returns the row of a block: its norms, MLP and attention, of which cross-attention has S keys."""
    norms = [n for n in (block.attention_norm, block.cross_norm, block.mlp_norm) if n is not None]
    parts = [_norm_row(norm, B * T, B * decodes) for norm in norms]
    if block.mlp is not None:
        linears = [m for m in block.mlp.modules() if isinstance(m, nn.Linear)]
        parts.append(_linears_row(linears, B * T, B * decodes))
    for attention, keys in ((block.attention, T), (block.cross, S)):
        if attention is not None:
            parts.append(_attention_row(attention, B, T, keys, decodes))
    # Parameters are counted on the whole block, which may have some that are in none of these parts.
    return replace(_sum_rows(name, parts), parameters=_count(block))


def _attention_row(attention: Attention, B: int, T: int, S: int, decodes: bool) -> Row:
    """Returns the row of attention from T queries to S keys.

    Kept for gradients: its input, queries, keys, values, the output, and one number for each row of the weights. A
    convolution keeps its inputs and its sums, a norm of heads its inputs, and a gate its value and its inputs.
    """
    size = attention.size
    lengths = {"q": T, "k": S, "v": S}
    projected = sum(lengths[n] * width for n, width in zip(attention.needs, attention.widths, strict=True))
    kept = T * (attention.width + size.H * size.V) + projected
    if attention.convolution is not None:
        kept += 2 * projected
    kept += T * size.H * size.V * ((attention.head_norm is not None) + 2 * (attention.gate is not None))
    step = NOTHING
    if decodes:
        step = attention.cost(1, S, "recurrent", B)
    return Row(
        "attention",
        _count(attention),
        attention.cost(T, S, B=B),
        attention.gradient_cost(T, S, B),
        step,
        B * (attention.out.weight.dtype.itemsize * kept + 4 * size.H * T),
    )


def _norm_row(norm: nn.Module, tokens: int, steps: int) -> Row:
    """Returns the row of a norm. Kept for gradients: its input, and its mean and deviation in float32."""
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    D = weight.numel()
    itemsize = weight.dtype.itemsize

    def cost(n: int) -> Cost:
        if n == 0:
            return NOTHING
        # 8 FLOPs a number: 7, and the residual sum before or after it.
        return Cost(0, 0, 8 * n * D, itemsize * (_count(norm) + 2 * n * D), 0)

    whole = cost(tokens)
    return Row("norm", _count(norm), whole, _gradient_cost(whole), cost(steps), tokens * (itemsize * D + 8))


def _linears_row(linears: list[nn.Linear], tokens: int, steps: int, last: Tensor | None = None) -> Row:
    """Returns the row of linear layers one after the other, with an activation between two.

    `last` is one more matrix, which is a parameter of another part. Kept for gradients: the input, and the input and
    output of each activation.
    """
    weights: list[Tensor] = [m.weight for m in linears]
    own = sum(map(_count, linears))
    read = own  # numbers of parameters that are read
    if last is not None:
        weights.append(last)
        read += last.numel()
    if not weights:
        return Row("linear")
    width_in = weights[0].shape[1]
    width_out = weights[-1].shape[0]
    width_between = sum(w.shape[0] for w in weights[:-1])
    itemsize = weights[0].dtype.itemsize

    def cost(n: int) -> Cost:
        if n == 0:
            return NOTHING
        flops = 2 * n * sum(w.numel() for w in weights)
        moved = itemsize * (read + n * (width_in + width_out + width_between))
        return Cost(flops, flops, 8 * n * width_between, moved, 0)

    whole = cost(tokens)
    kept = itemsize * tokens * (width_in + 2 * width_between)
    return Row("linear", own, whole, _gradient_cost(whole), cost(steps), kept)


def _head_row(model: Model[Any], B: int, T: int) -> Row:
    """Returns the row of the head. Kept for gradients: what its layers keep, and the log-probabilities."""
    layers: list[nn.Linear] = []
    own = 0
    if isinstance(model.head, nn.Module):
        layers = [m for m in model.head.modules() if isinstance(m, nn.Linear)]
        own = _count(model.head)
    tokens = B * T
    steps = 0
    tied = False
    if isinstance(model, Decoder):
        steps = B
        tied = model.head is None
    elif isinstance(model.head, MaskedHead):
        tied = model.head.table is None
    else:
        tokens = B  # one class for each whole text
    assert isinstance(model.embedding, nn.Embedding)
    embedding = model.embedding.weight
    if tied:
        row = _linears_row(layers, tokens, steps, embedding)
        width_out = embedding.shape[0]
    else:
        row = _linears_row(layers, tokens, steps)
        width_out = sum(m.out_features for m in layers[-1:])
    kept = tokens * width_out * embedding.dtype.itemsize
    return replace(row, part="head", parameters=own, activations=row.activations + kept)


def _embedding_row(model: Model[Any], tokens: int, source: int) -> Row:
    """Returns the row of all embeddings: each vector is read and written once. Kept for gradients: token ids."""
    tables = [model.embedding, getattr(model, "source_embedding", None), getattr(model, "types", None)]
    read = [(model.stack, tokens)]
    if isinstance(model, Seq2Seq):
        read.append((model.encoder, source))
    stacks = [(s, n) for s, n in read if isinstance(s, Stack)]
    modules = [m for m in (*tables, *(s.positions for s, _ in stacks)) if isinstance(m, nn.Module)]
    numbers = sum(n * s.config.width for s, n in stacks)
    whole = Cost(0, 0, numbers, 2 * numbers * next(model.parameters()).dtype.itemsize, 0)
    ids = sum(n for _, n in stacks)  # of 8 bytes each
    return Row("embedding", sum(map(_count, modules)), whole, _gradient_cost(whole), NOTHING, 8 * ids)


def _gradient_cost(cost: Cost) -> Cost:
    """Returns the cost of the gradients of inputs and weights: twice that of the forward pass."""
    return replace(cost + cost, state=0)


def _sum_rows(part: str, rows: Iterable[Row]) -> Row:
    """Returns the sum of rows under one name."""
    total = Row(part)
    for row in rows:
        total = Row(
            part,
            total.parameters + row.parameters,
            total.whole + row.whole,
            total.gradient + row.gradient,
            total.step + row.step,
            total.activations + row.activations,
        )
    return total


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _fold_layers(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Yields the rows, with consecutive equal layers summed into one row that says how many they are."""
    for _, group in groupby(enumerate(rows), lambda item: _layer_key(*item)):
        alike = [row for _, row in group]
        if len(alike) == 1:
            yield alike[0]
        else:
            yield _sum_rows(f"{alike[0].part} ×{len(alike)}", alike)


def _layer_key(n: int, row: Row) -> tuple[Row, int]:
    """Returns a key that layers share if their rows are equal but for the number; other rows have one of their own."""
    mechanism = row.part.split(" (")[-1]
    number = -1 if "layer" in row.part else n
    return replace(row, part=mechanism), number
