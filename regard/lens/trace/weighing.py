"""Computing the weights of one recorded attention module, for some heads and some rows, from its recorded arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.lens.trace.attended import RecordedAttention
from regard.lens.trace.formulas import Dense, KernelFormula, OneHot, RecurrenceFormula, SoftmaxFormula
from regard.lens.trace.memory import RecordedMemory
from regard.lens.trace.tokens import Tokens


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
    if isinstance(formula, RecurrenceFormula):
        allowed = attended.rules.allowed(queries, keys, rows)
        return memory_of(attended, heads).weights(rows).float().masked_fill(~allowed, 0)
    weights = weigh(attended, queries, keys, heads, rows)[0]
    return functional.pad(weights, (0, S - weights.shape[2]))


def as_shares(attended: RecordedAttention, weights: Float[Tensor, "h R S"]) -> Float[Tensor, "h R S"]:
    """Returns the weights as shares of each row: |w| / Σ|w| for a memory, whose weights are signed; else unchanged."""
    if not isinstance(attended.formula, RecurrenceFormula):
        return weights
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp(min=1e-30)


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
        ~attended.rules.allowed(queries, keys, rows), -torch.inf
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


def memory_of(attended: RecordedAttention, heads: Sequence[int]) -> RecordedMemory:
    """Returns the memories of the given heads, in float64."""
    formula = attended.formula
    assert isinstance(formula, RecurrenceFormula) and attended.q is not None
    assert attended.k is not None and attended.v is not None and attended.a is not None
    H = attended.heads
    k = kv_for_heads(attended.k, heads, H).double()
    b = torch.ones(k.shape[:2], dtype=torch.double)
    if attended.b is not None:
        b = kv_for_heads(attended.b, heads, H).double()
    skip = torch.zeros(len(heads), dtype=torch.double)
    if attended.skip is not None:
        skip = attended.skip[list(heads)].double()
    return RecordedMemory(
        attended.q[list(heads)].double(),
        k,
        kv_for_heads(attended.v, heads, H).double(),
        kv_for_heads(attended.a, heads, H).double(),
        b,
        skip,
        formula.scale,
        formula.erases,
    )
