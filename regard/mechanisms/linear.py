"""Linear attention: similarities that are products of features, so that sums over keys can be kept instead of keys.

    out_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ Z_i,      S_i = Σ_{j≤i} φ(k_j) v_jᵀ,      Z_i = Σ_{j≤i} φ(k_j)

A mechanism of this family writes one method, `features`: φ(x) = eᶜ·ψ with ψ of moderate size and c a number for each
token (or None). The query's eᶜ cancels in the ratio. The keys' are kept relative to their running maximum m, and the
sums are rescaled by exp(m_old − m_new): nothing overflows, and no later key can touch an earlier output, as it would
with one maximum over the sequence or an epsilon in the denominator.

A causal sequence goes chunk by chunk: pairs within a chunk, the sums for all before it. Z is one more column of S.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import ShapeError, ZeroRowError
from regard.mechanisms.base import (
    Cost,
    Face,
    Mechanism,
    can_read,
    gradient_bytes,
    refuse,
    refuse_in_state,
    without_autocast,
)
from regard.mechanisms.cache import Cache, empty_cache, visible_counts, write_cache
from regard.mechanisms.nonfinite import mark_rows, replace_nonfinite, rows_of_documents, rows_that_see
from regard.mechanisms.pair_costs import attended_size, cache_bytes, pair_cost, pair_gradient_cost
from regard.mechanisms.pairwise import attend_by_weights, extend_cache, read_cache, zero_output
from regard.mechanisms.sums import (
    Sums,
    add_keys,
    compare,
    concatenate,
    keep_current_document,
    past_peak,
    scale_for_past,
    split_tokens,
)
from regard.shapes import (
    Keys,
    Mask,
    Outputs,
    Queries,
    Size,
    Values,
    Visible,
    Weights,
    check_sizes,
    check_state,
    upcast_half,
)

CHUNK = 128  # tokens of a causal chunk: pairs within it cost C·(F+V) a token, the sums F·V
BLOCK = 2048  # tokens whose features are held at once where nothing is causal


class Linear(Mechanism):
    """The family: `features` is the mechanism, everything else follows from it."""

    order = "N·F·(K+V)"
    memory = "G·F·(V+1)"
    training_memory = "N·F+F·V"
    accumulate: ClassVar[torch.dtype] = torch.float32  # features and sums are at least this precise
    maps_each_vector: ClassVar[bool] = False  # `features` is known not to ask which head a vector is of
    feature_work: ClassVar[int] = 3  # element-wise FLOPs behind a feature
    pair_work: ClassVar[int] = 2  # and behind a pair within a chunk: mask and sum

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "features" in vars(cls) and "maps_each_vector" not in vars(cls):  # what was known of another map
            cls.maps_each_vector = False

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict

    @abstractmethod
    def features(self, x: Float[Tensor, "B N T K"]) -> tuple[Float[Tensor, "B N T F"], Float[Tensor, "B N T"] | None]:
        """Returns (ψ, c) with φ(x) = eᶜ·ψ; c None means 0."""

    @abstractmethod
    def feature_count(self, K: int) -> int:
        """Returns F, the number of features of a vector of width K."""

    def has_unit_scale(self, k: Keys) -> bool:
        """Returns whether it is known that c is 0 for all of these keys, so that eᶜ need not be computed with."""
        return False

    def _needs_no_scale(self, k: Keys) -> bool:
        """Returns whether all eᶜ of these keys can be seen to be 1: asking another device would wait for it."""
        return k.device.type == "cpu" and can_read(k) and self.has_unit_scale(k)

    def feature_flops(self, K: int) -> int:
        """Returns the FLOPs of matrix products behind the features of one vector."""
        return 0

    def forward(self, q: Queries, k: Keys, v: Values, mask: Mask = Mask()) -> Outputs:  # type: ignore[override]
        size = check_sizes(q, k, v, mask)
        mask = mask.without_idle_rules(size.T, size.S)
        refuse(self, mask, "bias", "slopes", "relative", "softcap", "sinks")
        # A running sum cannot forget: these need the pairs themselves.
        documents_both_ways = mask.documents is not None and not mask.causal
        moved_queries = mask.causal and (size.T != size.S or mask.rows is not None)
        if mask.window is not None or documents_both_ways or moved_queries:
            return attend_by_weights(self, q, k, v, mask)
        self._check_similarities(q, k, mask)
        fast = self.select_kernel("forward", q, k, v, mask)
        if fast is not None:
            return functional.dropout(fast(self, q, k, v, mask), self.dropout, self.training)
        state = self._empty_sums(size)
        if mask.causal:
            out, _ = self._scan(q, k, v, state, mask.visible, mask.document_ids(), not self._needs_no_scale(k))
        else:
            out = self.read(q, self.write(state, k, v, mask.visible))
        return functional.dropout(out, self.dropout, self.training)

    def empty(self, size: Size, rules: Mask = Mask()) -> Sums | Cache:
        refuse(self, rules, "bias", "slopes", "relative", "softcap", "sinks")
        refuse_in_state(self, rules)
        if rules.window is not None:
            return empty_cache(self, size, rules)
        return self._empty_sums(size)

    def extend(  # type: ignore[override]
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        v: Float[Tensor, "B G T V"],
        state: Sums | Cache,
        visible: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Outputs, Sums | Cache]:
        if isinstance(state, Cache):
            return extend_cache(self, q, k, v, state, visible)
        mask = Mask(causal=True, visible=visible)
        check_sizes(q, k, v, mask, new=True)
        self._check_state(state, k, v)
        self._check_similarities(q, k, mask)
        if q.shape[2] == 0:
            return zero_output(self, q, v), state
        fast = self.select_kernel("extend", q, k, v, state, visible)
        if fast is not None:
            result: tuple[Tensor, Sums] = fast(self, q, k, v, state, visible)
            return result
        if q.shape[2] == 1:  # one token sees all that is written, itself included
            if visible is None:
                return self._add_token(q, k, v, state)
            state = self.write(state, k, v, visible)
            return self.read(q, state).to(v.dtype), state
        dtype = v.dtype
        if self._upcast(v).dtype != state.sums.dtype:  # a state made for another dtype decides how precise sums are
            q, k, v = (x.to(state.sums.dtype) for x in (q, k, v))
        out, state = self._scan(q, k, v, state, visible, None)
        return out.to(dtype), state

    def _add_token(self, q: Tensor, k: Tensor, v: Tensor, state: Sums) -> tuple[Tensor, Sums]:
        """Returns what a visible token reads [B,H,1,V], and the sums with it: `write`, then `read`, in fewer steps."""
        B, H = q.shape[:2]
        G = k.shape[1]
        with without_autocast(v):
            if self.maps_each_vector and q.dtype == k.dtype:
                mapped, c = self.features(self._upcast(torch.cat([q, k], 1)))
                queries, psi = mapped.split_with_sizes([H, G], 1)
                if c is not None:
                    c = c[:, H:]
            else:
                queries = self.features(self._upcast(q))[0]
                psi, c = self.features(self._upcast(k))
            state = add_keys(state, psi, c, functional.pad(v.to(psi.dtype), (0, 1), value=1.0), 1)
            # [B,G,H/G,F] @ [B,G,F,V+1]
            sums = queries.reshape(B, G, H // G, queries.shape[3]).to(state.sums.dtype) @ state.sums
            out = self._normalise(sums.view(B, H, 1, sums.shape[3]), state.tokens[:, None])
        return out.to(q.dtype).to(v.dtype), state

    def write(  # type: ignore[override]
        self, state: Sums | Cache, k: Keys, v: Values, visible: Visible | None = None
    ) -> Sums | Cache:
        check_sizes(None, k, v, Mask(visible=visible))
        if isinstance(state, Cache):
            return write_cache(state, k, v, visible)
        self._check_state(state, k, v)
        if k.shape[2] == 0:
            return state
        with without_autocast(v):
            for k_part, v_part, seen in split_tokens(BLOCK, k, v, visible):
                psi, c, values = self._map_keys(k_part, v_part, seen)
                state = add_keys(state, psi, c, values, visible_counts(v_part, seen).sum(1))
        return state

    def read(
        self,
        q: Queries,
        state: Sums | Cache,
        positions: Int[Tensor, "B T"] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Outputs:
        refuse(self, Mask(bias=bias), "bias")
        if isinstance(state, Cache):
            return read_cache(self, q, state, positions, None)
        B, G, F, columns = state.sums.shape
        if q.dim() != 4 or q.shape[0] != B or q.shape[1] % G or self.feature_count(q.shape[3]) != F:
            raise ShapeError(
                f"q {list(q.shape)} cannot read a state of B = {B}, G = {G}, F = {F} features: expected [B,H,T,K] "
                "with G dividing H and the width K of the keys written."
            )
        out = []
        with without_autocast(q):
            for part in q.split(BLOCK, 2):
                psi, _ = self.features(self._upcast(part))
                # [B,G,(H/G)·T,F] @ [B,G,F,V+1]
                sums = psi.reshape(B, G, psi.shape[1] // G * psi.shape[2], F).to(state.sums.dtype) @ state.sums
                out.append(self._normalise(sums.view(*psi.shape[:3], columns), state.tokens[:, None]).to(q.dtype))
        return concatenate(out)

    def weights(self, q: Queries, k: Keys, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        check_sizes(q, k, k, mask)
        refuse(self, mask, "bias", "slopes", "relative", "softcap", "sinks")
        self._check_similarities(q, k, mask)
        B, H, T, _ = q.shape
        S = k.shape[2]
        with without_autocast(q):
            allowed = mask.allowed(T, S, q.device)
            finite = replace_nonfinite(None, k, mask)
            queries = self._map_queries(q, k.shape[1])
            psi, c, _ = self._map_keys(finite.v, k, mask.visible)
            if self._needs_no_scale(mask.zero_hidden(finite.v)):
                c = None
            similarities, _ = compare(queries, psi, c, allowed, None)
            similarities = mark_rows(similarities.view(B, H, T, S), rows_that_see(finite.broken, mask, T))
            total = similarities.sum(-1, keepdim=True)
            seen = torch.ones_like(total[:, 0, :, 0], dtype=torch.bool)
            if allowed is not None:
                seen = allowed[:, 0].any(-1)
            return self._divide(similarities, total, seen).to(upcast_half(q).dtype)

    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        return _linear_cost(self, size, face)

    def gradient_cost(self, size: Size) -> Cost:
        return _linear_gradient_cost(self, size)

    def _check_similarities(self, q: Queries, k: Keys, mask: Mask) -> None:
        """Raises where `strict` and a similarity is negative; here none can be, or all signs are allowed."""

    def _upcast(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, self.accumulate))

    def _empty_sums(self, size: Size) -> Sums:
        dtype = torch.promote_types(size.dtype, self.accumulate)
        sums = torch.zeros(size.B, size.G, self.feature_count(size.K), size.V + 1, dtype=dtype, device=size.device)
        peak = torch.full((size.B, size.G), float("-inf"), dtype=dtype, device=size.device)
        return Sums(sums, peak, torch.zeros(size.B, dtype=torch.long, device=size.device))

    def _check_state(self, state: Sums, k: Keys, v: Values) -> None:
        B, G, F, columns = state.sums.shape
        check_state(Size(B=B, G=G, K=k.shape[3], V=columns - 1), k, v)
        if self.feature_count(k.shape[3]) != F:
            raise ShapeError(
                f"{self.name}: k of width {k.shape[3]} has {self.feature_count(k.shape[3])} features, "
                f"but the state was made for keys of {F}."
            )

    def _map_queries(self, q: Queries, G: int) -> Float[Tensor, "B G R T F"]:
        """Returns ψ(q), the R = H/G query heads of each group side by side. Its eᶜ would cancel in the ratio."""
        psi, _ = self.features(self._upcast(q))
        B, H, T, F = psi.shape
        return psi.reshape(B, G, H // G, T, F)

    def _map_keys(self, k: Keys, v: Values, visible: Visible | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns ψ(k) [B,G,S,F], c [B,G,S] or None, and [v, 1] [B,G,S,V+1]; invisible tokens add nothing to sums."""
        mask = Mask(visible=visible)
        psi, c = self.features(self._upcast(mask.zero_hidden(k)))
        values = mask.zero_hidden(v).to(psi.dtype)
        if c is not None and visible is not None:
            c = c.masked_fill(~visible[:, None], float("-inf"))
        return mask.zero_hidden(psi), c, torch.cat([values, torch.ones_like(values[..., :1])], -1)

    def _scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Sums,
        visible: Tensor | None,
        documents: Tensor | None,
        scaled: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Returns causal attention, computed chunk by chunk, and the sums after the last token.

        `documents` [B,T] are the ids of packed documents; the sums hold only the current one. Unless `scaled`, all eᶜ
        are 1 and are left out; the state must be empty then, and the sums are of no use afterwards.
        """
        outs = []
        current = None  # [B], the document that the sums hold
        finite = replace_nonfinite(k, v, Mask(visible=visible))
        with without_autocast(v):
            for chunk in split_tokens(CHUNK, q, finite.k, finite.v, visible, documents):
                out, state, current = self._scan_chunk(chunk, state, current, scaled)
                outs.append(out)
        # The sums hold what the last token has seen, so that what is not a number reaches all tokens to come.
        broken = rows_of_documents(finite.broken, documents, True, q.shape[2])
        if broken is None:
            return concatenate(outs), state
        state = state._replace(sums=mark_rows(state.sums, broken[..., -1:].any(-1, keepdim=True)))
        return mark_rows(concatenate(outs), broken), state

    def _scan_chunk(
        self, chunk: Sequence[Any], state: Sums, current: Tensor | None, scaled: bool
    ) -> tuple[Tensor, Sums, Tensor | None]:
        """Returns the output of one chunk, the sums with it, and the document that it ends in.

        `chunk` holds the chunk's q, k, v, visible and document ids.
        """
        q, k, v = chunk[:3]
        visible, documents = chunk[3:]
        queries = self._map_queries(q, k.shape[1])
        psi, c, values = self._map_keys(k, v, visible)
        if not scaled:
            c = None
        mask = Mask(causal=True, visible=visible, documents=documents)
        allowed = mask.allowed(psi.shape[2], psi.shape[2], q.device)
        peak_before = None
        if c is not None:
            peak_before = past_peak(state, documents, current)
        similarities, peaks = compare(queries, psi, c, allowed, peak_before)
        past = scale_for_past(queries, state, peaks, documents, current)
        # Pairs within the chunk [B,G,R·C,C] @ [B,G,C,V+1], and all before it [B,G,R·C,F] @ [B,G,F,V+1].
        sums = similarities.flatten(2, 3) @ values + past.flatten(2, 3) @ state.sums
        sums = sums.view(*q.shape[:3], values.shape[3])
        tokens = visible_counts(v, visible)
        out = self._normalise(sums, state.tokens[:, None] + tokens.cumsum(1)).to(v.dtype)
        if documents is not None and documents.shape[1] > 0:
            state, psi, c = keep_current_document(state, psi, c, documents, current)
            current = documents[:, -1]
        return out, add_keys(state, psi, c, values, tokens.sum(1)), current

    def _normalise(self, sums: Float[Tensor, "B H T V1"], seen: Int[Tensor, "B #T"]) -> Tensor:
        """Returns φ(q)ᵀS / φ(q)ᵀZ, the last column of the sums being Z; `seen` counts the tokens that a query sees."""
        return self._divide(sums[..., :-1], sums[..., -1:], seen)

    def _divide(self, sums: Tensor, total: Tensor, seen: Tensor) -> Tensor:
        """Returns sums / total, and zeros where the total is zero: an epsilon would leak the scale of other rows."""
        # Below this, terms have lost digits to underflow, and 1/total could overflow in the gradient.
        limits = torch.finfo(total.dtype)
        zero = total.detach().abs() < limits.tiny / limits.eps
        if total.device.type == "cpu" and can_read(total) and not zero.any():
            return sums / total
        if self.strict and bool((zero & seen.bool()[:, None, :, None]).any()):
            raise ZeroRowError(
                f"{self.name}: a query's similarities to the keys it may see sum to zero, so it has no weights. "
                "Use features that are positive, smaller inputs, or strict=False to get zeros there."
            )
        return (sums / total.masked_fill(zero, 1)).masked_fill(zero, 0)


class LinearFlops(NamedTuple):
    """FLOPs of the matrix products of a linear mechanism, and the pairs that it compares within chunks."""

    matmul: int  # as executed
    useful: int  # as needed
    pairs: int


def linear_flops(size: Size, F: int, per_vector: int, face: Face = "parallel") -> LinearFlops:
    """Returns the FLOPs of a face; `per_vector` are those of mapping one vector to its F features."""
    vectors = size.B * (size.H * size.T + size.G * _new_keys(size, face))
    # Beside its mapping, each key is added to the sums, and each query reads them.
    matmul = vectors * (per_vector + 2 * F * (size.V + 1))
    one_token = face == "recurrent" and size.T == 1
    if one_token or not (face == "recurrent" or size.causal):
        return LinearFlops(matmul, matmul, 0)
    chunks = size.chunk_counts(CHUNK)
    per_pair = 2 * size.B * size.H * (F + size.V + 1)
    return LinearFlops(matmul + per_pair * chunks.pairs, matmul + per_pair * chunks.causal, chunks.pairs)


def _new_keys(size: Size, face: Face) -> int:
    """Returns how many keys a face writes: in the recurrent one the T new tokens, of S in all."""
    if face == "recurrent":
        return size.T
    return size.S


def _linear_cost(mechanism: Linear, size: Size, face: Face) -> Cost:
    F = mechanism.feature_count(size.K)
    state = size.B * size.G * F * (size.V + 1) * size.itemsize_at_least(mechanism.accumulate)
    if size.window is not None:
        state = cache_bytes(mechanism, size)
    if face == "weights" or _uses_pairs(size, face):
        pairs = pair_cost(mechanism, size, face, 2 * F, mechanism.pair_work + 1)
        return pairs + _mapping_cost(mechanism, attended_size(size, face)) + Cost(0, 0, 0, 0, state - pairs.state)
    queries = size.H * size.T
    vectors = queries + size.G * _new_keys(size, face)
    flops = linear_flops(size, F, mechanism.feature_flops(size.K), face)
    moved = size.e * size.B * vectors * (size.K + size.V)
    if face == "recurrent":
        moved += 2 * state  # read and written
    # Features, then pairs within chunks, then the division of the output.
    work = vectors * F * mechanism.feature_work + size.H * flops.pairs * mechanism.pair_work + 4 * queries * size.V
    return Cost(flops.matmul, flops.useful, size.B * work, moved, state)


def _linear_gradient_cost(mechanism: Linear, size: Size) -> Cost:
    """Returns the cost of the gradients: two products for each one forward, but one for a projection to features.

    The directions of a projection have no gradient. Causal: nothing comes back from the sums before the first chunk,
    nor to those after the last.
    """
    F = mechanism.feature_count(size.K)
    mapping = _mapping_cost(mechanism, size)
    if _uses_pairs(size, "parallel"):
        return pair_gradient_cost(mechanism, size, 2 * F, True) + mapping
    flops = linear_flops(size, F, 0)
    spared = 0
    if size.causal:
        chunks = size.chunk_counts(CHUNK)
        spared = 2 * size.B * F * (size.V + 1) * (size.H * chunks.first + 2 * size.G * chunks.last)
    work = mapping.elementwise + size.B * size.H * (flops.pairs * mechanism.pair_work + 4 * size.T * size.V)
    return Cost(
        matmul=mapping.matmul + 2 * flops.matmul - spared,
        useful=mapping.useful + 2 * flops.useful,
        elementwise=2 * work,
        bytes=gradient_bytes(mechanism, size),
        state=0,
    )


def _mapping_cost(mechanism: Linear, size: Size) -> Cost:
    """Returns the cost of mapping all queries and keys to features; it moves nothing."""
    vectors = size.B * (size.H * size.T + size.G * size.S)
    matmul = vectors * mechanism.feature_flops(size.K)
    return Cost(matmul, matmul, vectors * mechanism.feature_count(size.K) * mechanism.feature_work, 0, 0)


def _uses_pairs(size: Size, face: Face) -> bool:
    """Returns whether a call goes by explicit weights: under a window, or if its queries are the last of more keys.

    A sequence within its window goes by sums, but its state keeps keys, since it may grow beyond.
    """
    if face == "recurrent":
        return size.window is not None
    under_window = size.window is not None and size.window < size.S
    last_of_more_keys = size.causal and size.T != size.S
    return under_window or last_of_more_keys
