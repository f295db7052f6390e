"""The letters of every shape, the sizes of one attention call, and who may see whom.

    B batch        T queries      S keys         H query heads   G key/value heads
    K key width    V value width  D model width  F features      C chunk

Heads come second: `q [B,H,T,K]`, `k [B,G,S,K]`, `v [B,G,S,V]`, `out [B,H,T,V]`, and query head h uses
key/value head `h // (H/G)`. True in a mask means "may be seen". A position is the number of visible tokens
before it, so padding never shifts anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import MaskError, ShapeError

Queries = Float[Tensor, "B H T K"]
Keys = Float[Tensor, "B G S K"]
Values = Float[Tensor, "B G S V"]
Outputs = Float[Tensor, "B H T V"]
Weights = Float[Tensor, "B H T S"]
Visible = Bool[Tensor, "B S"]
# What positions add to scores [#B,H,T,S], given how many positions each query stands after each key [#B,T,S].
RelativeBias = Callable[[Tensor], Tensor]
# Fields of a mask that change scores before their softmax.
SCORE_FIELDS = ("bias", "slopes", "relative", "softcap", "sinks")


class Chunks(NamedTuple):
    """The counts of a sequence that is taken chunk by chunk."""

    pairs: int  # pairs of tokens within the same chunk
    causal: int  # those of them that are causal
    first: int  # tokens of the first chunk
    last: int  # tokens of the last chunk


@dataclass(frozen=True)
class Size:
    """The sizes of one call. For a state, S is its capacity; for a recurrent cost, S counts the T new tokens too.

    `window` is that of the mask, with which costs are counted; None: no window.
    """

    B: int = 1
    T: int = 1
    S: int = 1
    H: int = 1
    G: int = 1
    K: int = 64
    V: int = 64
    causal: bool = True
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    window: int | None = None

    @staticmethod
    def of(q: Tensor | None, k: Tensor | None, v: Tensor, causal: bool = True) -> Size:
        """Returns the sizes of a call from its tensors; those that a mechanism does without may be None."""
        B, G, S, V = v.shape
        # Without q there are as many queries as keys; without k, too, keys are as wide as values.
        H = G
        T = S
        K = V
        if k is not None:
            K = k.shape[3]
        if q is not None:
            H = q.shape[1]
            T = q.shape[2]
            K = q.shape[3]
        return Size(B, T, S, H, G, K, V, causal, v.dtype, v.device)

    @property
    def e(self) -> int:
        """Returns the bytes of a number."""
        return self.dtype.itemsize

    def itemsize_at_least(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a number that is at least as precise as `dtype`."""
        return torch.promote_types(self.dtype, dtype).itemsize

    def chunk_counts(self, C: int, tokens: int | None = None) -> Chunks:
        """Returns the counts of the T tokens, or of so many, in chunks of C."""
        if tokens is None:
            tokens = self.T
        whole, rest = divmod(tokens, C)
        pairs = whole * C * C + rest * rest
        return Chunks(pairs, (pairs + tokens) // 2, min(C, tokens), rest or min(C, tokens))


class Rows(NamedTuple):
    """The place of each query among the keys."""

    position: Int[Tensor, "B T"]  # the number of visible keys before it
    limit: Int[Tensor, "B T"]  # the number of visible keys at or before it: a causal query sees positions below this


@dataclass(frozen=True, eq=False)
class Mask:
    """Who may see whom, as rules rather than as a matrix.

    `causal` and T < S: the queries are the last T keys. `documents` marks packed documents: a change of number starts a
    new one, and nothing is seen across. `window=w`: only keys fewer than w positions away. `bias` is added to the
    scores, `slopes` (ALiBi) adds −slope·distance, `softcap` bends scores to cap·tanh(scores/cap) first. `relative` is a
    function of distances that gives what is added to the scores, as relative positions do. `sinks` [H] are scores of an
    extra key without a value, one a query head: exp(sink) joins the denominator of the softmax, so that the weights of
    a row sum to less than one. A sink of 0 gives the softmax with the denominator 1 + Σ exp(score). `rows` and
    `size_override` are filled in by states and by mechanisms that do without q or k: `rows` has the positions of the
    queries if they are not the last T keys, `size_override` is (T, S) if there are no tensors of these lengths, and
    `start` is the position of the first visible key if tokens before it are forgotten.
    """

    causal: bool = False
    visible: Visible | None = None
    window: int | None = None
    documents: Int[Tensor, "B S"] | None = None
    bias: Float[Tensor, "..."] | None = None
    slopes: Float[Tensor, " H"] | None = None
    softcap: float | None = None
    rows: Rows | None = None
    size_override: tuple[int, int] | None = None
    relative: RelativeBias | None = None
    start: Int[Tensor, "#B"] | None = None
    sinks: Float[Tensor, " H"] | None = None

    def but(self, **changes: object) -> Mask:
        """Returns this mask with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def without_idle_rules(self, T: int, S: int) -> Mask:
        """Returns this mask without the rules that change nothing in a call of T queries and S keys.

        They are a window that no pair exceeds, and a softcap of infinity. States and configs keep their rules.
        """
        mask = self
        # The largest position of a query is S − 1; that of a hidden query, or of one placed by `rows`, may be S.
        farthest = S - 1
        if self.visible is not None or self.rows is not None:
            farthest = S
        placed_freely = self.rows is not None and not self.causal
        if self.window is not None and self.window > farthest and T <= S and not placed_freely:
            mask = mask.but(window=None)
        if self.softcap == math.inf:
            mask = mask.but(softcap=None)
        return mask

    @property
    def is_plain(self) -> bool:
        """Returns whether the mask has no rule other than `causal`."""
        rules = (self.visible, self.window, self.documents, self.rows)
        return not self.adjusts_scores and all(rule is None for rule in rules)

    @property
    def adjusts_scores(self) -> bool:
        """Returns whether the mask changes scores or their sum, and not only which of them count."""
        changes = (self.bias, self.slopes, self.softcap, self.relative, self.sinks)
        return any(change is not None for change in changes)

    @property
    def depends_on_heads(self) -> bool:
        """Returns whether slopes or relative positions are added to the scores, which may differ from head to head."""
        return self.slopes is not None or self.relative is not None

    def size(self, q: Tensor | None, k: Tensor | None) -> tuple[int, int]:
        """Returns (T, S): `size_override`, else the lengths of q and k; if one is None, the other gives both."""
        if self.size_override is not None:
            return self.size_override
        queries = q if q is not None else k
        keys = k if k is not None else q
        if queries is None or keys is None:
            raise ShapeError("weights of a mechanism without q and k: give the size by Mask(size_override=(T, S))")
        return queries.shape[2], keys.shape[2]

    def document_ids(self) -> Int[Tensor, "B S"] | None:
        """Returns the number of the packed document that each key belongs to, from 0 and growing, or None."""
        if self.documents is None:
            return None
        starts = torch.zeros_like(self.documents)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return starts.cumsum(1)

    def positions(self, S: int, device: torch.device) -> Int[Tensor, "#B S"]:
        """Returns the position of each key: the number of visible tokens before it in its own document."""
        if self.visible is not None:
            before = self.visible.cumsum(1) - self.visible.long()
        else:
            before = torch.arange(S, device=device)[None]
        if self.start is not None:
            before = before + self.start[:, None]
        ids = self.document_ids()
        if ids is None:
            return before
        # Each document counts from its own first token: subtract the count at which it began.
        before = before.expand(ids.shape)
        starts = torch.zeros_like(before)
        starts[:, 1:] = torch.where(ids[:, 1:] != ids[:, :-1], before[:, 1:], 0)
        return before - starts.cummax(1).values

    def query_positions(self, T: int, S: int, device: torch.device) -> Rows:
        """Returns the places of the queries: `rows`, else those of the last T keys."""
        if self.rows is not None:
            return self.rows
        if T > S or (T < S and not self.causal):
            raise MaskError(
                f"{T} queries over {S} keys: a causal mask needs T ≤ S (the queries are the last T keys), and a "
                "window, slopes or documents without causal need T = S, or Mask(rows=Rows(position, limit))"
            )
        position = self.positions(S, device)[:, S - T :]
        if self.visible is None:
            return Rows(position, position + 1)
        return Rows(position, position + self.visible[:, S - T :].long())

    def allowed(self, T: int, S: int, device: torch.device) -> Bool[Tensor, "#B 1 #T S"] | None:
        """Returns the matrix of what may be seen, or None where everything may."""
        rules = []  # each [B|1,T|1,S]; all of them must hold
        if self.visible is not None:
            rules.append(self.visible[:, None, :])
        if self.causal or self.window is not None or self.documents is not None:
            keys = self.positions(S, device)[:, None, :]
            rows = self.query_positions(T, S, device)
            if self.causal:
                rules.append(keys < rows.limit[:, :, None])
            if self.window is not None:
                rules.append((rows.position[:, :, None] - keys).abs() < self.window)
            ids = self.document_ids()
            if ids is not None:
                rules.append(ids[:, S - T :, None] == ids[:, None, :])
        if not rules:
            return None
        return reduce(torch.logical_and, rules)[:, None]

    def zero_hidden(self, x: Float[Tensor, "B G S X"]) -> Float[Tensor, "B G S X"]:
        """Returns x with zeros at keys that are not visible, so that even NaN there changes neither outputs nor
        gradients."""
        if self.visible is None:
            return x
        return x.masked_fill(~self.visible[:, None, :, None], 0)

    def adjusted_scores(self, scores: Float[Tensor, "#B #H T S"]) -> Weights:
        """Returns the scores after softcap, slopes, relative bias and bias."""
        T, S = scores.shape[2:]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.depends_on_heads:
            position = self.query_positions(T, S, scores.device).position
            distance = position[:, :, None] - self.positions(S, scores.device)[:, None, :]
            if self.slopes is not None:
                scores = scores - self.slopes.to(scores.dtype)[None, :, None, None] * distance.abs()[:, None]
            if self.relative is not None:
                scores = scores + self.relative(distance).to(scores.dtype)
        if self.bias is not None:
            bias = self.bias.to(scores.dtype)
            if self.visible is not None:
                # A bias may hold anything, NaN too, at keys that are not visible.
                bias = torch.where(~self.visible[:, None, None, :], 0, bias)
            scores = scores + bias
        return scores

    def softmax(self, scores: Float[Tensor, "#B #H T S"]) -> Weights:
        """Returns the softmax over the keys that each query may see; zeros where it may see none."""
        allowed = self.allowed(scores.shape[2], scores.shape[3], scores.device)
        scores = self.adjusted_scores(scores)
        if self.sinks is not None:
            return self._softmax_with_sinks(scores, allowed)
        if scores.shape[-1] == 0 or (allowed is None and self.bias is None):
            return scores.softmax(-1)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        # A row with nothing to see is filled with zeros first: −inf throughout would make its gradient NaN.
        blind = scores.amax(-1, keepdim=True) == float("-inf")
        return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)

    def normalise(self, similarities: Float[Tensor, "#B #H T S"]) -> Weights:
        """Returns similarities divided by their sum over the keys that each query may see: weights that are no softmax.

        Hidden keys get zero, and so does a row whose sum is zero.
        """
        for field in SCORE_FIELDS:
            if getattr(self, field) is not None:
                raise MaskError(
                    f"'{field}' changes scores, and similarities that are divided by their sum have none. Leave it "
                    "out, or make weights by `mask.softmax`."
                )
        similarities = self.hide(similarities)
        total = similarities.sum(-1, keepdim=True)
        zero = total.abs() < torch.finfo(total.dtype).tiny / torch.finfo(total.dtype).eps
        return (similarities / total.masked_fill(zero, 1)).masked_fill(zero, 0)

    def hide(self, similarities: Float[Tensor, "#B #H T S"]) -> Weights:
        """Returns similarities with zeros at the keys that each query may not see."""
        allowed = self.allowed(similarities.shape[2], similarities.shape[3], similarities.device)
        if allowed is None:
            return similarities
        return similarities.masked_fill(~allowed, 0)

    def _softmax_with_sinks(self, scores: Float[Tensor, "#B #H T S"], allowed: Tensor | None) -> Weights:
        """Returns the weights [B,H,T,S] of a softmax with sinks: zeros for a query that may see no key."""
        assert self.sinks is not None
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        B, _, T, S = scores.shape
        H = len(self.sinks)
        sinks = self.sinks.to(scores.dtype)[None, :, None, None].expand(B, H, T, 1)
        return torch.cat([sinks, scores.expand(B, H, T, S)], -1).softmax(-1)[..., 1:]


def default_scale(K: int) -> float:
    """Returns 1/√K, the factor of the scores q·k of keys of width K unless a mechanism has its own."""
    return 1 / math.sqrt(K)


def upcast_half(x: Tensor) -> Tensor:
    """Returns x in float32 if it is in half precision, else x itself: sums and states are kept in this precision."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x


def check_sizes(
    q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask, new: bool = False, heads: int | None = None
) -> Size:
    """Returns the sizes of a call, or raises an error that names the shapes.

    `new`: the keys and the queries are the same new tokens, so that there are as many of each. `heads`: the query heads
    that a mechanism was built for, which count where there is no q.
    """
    for name, x, shape in (("q", q, "[B,H,T,K]"), ("k", k, "[B,G,S,K]"), ("v", v, "[B,G,S,V]")):
        if x is not None and not isinstance(x, Tensor):
            raise ShapeError(
                f"{name} is of type {type(x).__name__}, expected a tensor {shape}, as in torch.tensor({name})"
            )
        if x is not None and x.dim() != 4:
            raise ShapeError(f"{name} has {x.dim()} dimensions, expected 4: {shape}. {_describe_shapes(q, k, v)}")
        if x is not None and not x.is_floating_point():
            raise ShapeError(f"{name} is {x.dtype}, expected floating-point numbers {shape}, as in {name}.float()")
    size = Size.of(q, k, v, mask.causal)
    if q is None and heads is not None:
        size = replace(size, H=heads)
    if (q is not None and q.shape[0] != size.B) or (k is not None and k.shape[:3] != v.shape[:3]):
        raise ShapeError(
            "batch, key/value heads and keys must agree in q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]. "
            f"{_describe_shapes(q, k, v)}"
        )
    if q is not None and k is not None and q.shape[3] != k.shape[3]:
        raise ShapeError(f"q and k need the same width K. {_describe_shapes(q, k, v)}")
    if size.H % size.G:
        raise ShapeError(
            f"G = {size.G} key/value heads do not divide H = {size.H} query heads. {_describe_shapes(q, k, v)}"
        )
    if new and size.T != size.S:
        raise ShapeError(
            "extend takes as many queries as keys (T = S); to query a written state use read. "
            f"{_describe_shapes(q, k, v)}"
        )
    check_mask(mask, size)
    return size


def _describe_shapes(q: Tensor | None, k: Tensor | None, v: Tensor) -> str:
    shapes = (f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)) if x is not None)
    return f"Given: {', '.join(shapes)}."


def check_state(kept: Size, k: Tensor | None, v: Tensor) -> None:
    """Raises where tokens do not fit a state: without this, one row or head would be written to all of them."""
    key_width = kept.K
    if k is not None:
        key_width = k.shape[3]
    if (*v.shape[:2], key_width, v.shape[3]) != (kept.B, kept.G, kept.K, kept.V):
        raise ShapeError(
            f"the state was made for B = {kept.B}, G = {kept.G}, key width K = {kept.K}, value width V = {kept.V}. "
            f"{_describe_shapes(None, k, v)}"
        )


def check_mask(mask: Mask, size: Size) -> None:
    """Raises where a field of the mask has the wrong shape or dtype for a call of this size, or an impossible value."""
    for name, x in (("visible", mask.visible), ("documents", mask.documents)):
        if x is not None and tuple(x.shape) != (size.B, size.S):
            raise ShapeError(f"{name} has shape {list(x.shape)}, expected [B,S] = [{size.B}, {size.S}].")
    check_visible(mask.visible)
    if mask.causal and mask.rows is None and size.T > size.S:
        raise ShapeError(
            f"causal attention of T = {size.T} queries over S = {size.S} keys: the queries are the last T keys, "
            "so T ≤ S."
        )
    if mask.window is not None and (mask.window < 1 or isinstance(mask.window, float)):
        raise MaskError(f"window = {mask.window}, expected a whole number of at least 1 (1 sees only itself).")
    if mask.softcap is not None and mask.softcap <= 0:
        raise MaskError(f"softcap = {mask.softcap}, expected a positive number.")
    for name, x in (("slopes", mask.slopes), ("sinks", mask.sinks)):
        if x is not None and tuple(x.shape) != (size.H,):
            raise ShapeError(f"{name} have shape {list(x.shape)}, expected one a query head: [{size.H}].")
    full = (size.B, size.H, size.T, size.S)
    if mask.bias is not None and not _broadcasts(tuple(mask.bias.shape), full):
        raise ShapeError(
            f"bias has shape {list(mask.bias.shape)}, expected one that broadcasts to [B,H,T,S] = {list(full)}."
        )


def check_visible(visible: Tensor | None) -> None:
    """Raises a ShapeError if `visible` is not a tensor of booleans."""
    if visible is not None and visible.dtype != torch.bool:
        raise ShapeError(
            f"visible has dtype {visible.dtype}, expected bool; True means 'may be seen'. Use visible.bool()."
        )


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Returns whether a tensor of this shape broadcasts to exactly the full shape."""
    if len(shape) > len(full):
        return False
    return all(own in (1, whole) for own, whole in zip(reversed(shape), reversed(full), strict=False))
