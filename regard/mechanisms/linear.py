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
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import ShapeError, ZeroRowError
from regard.mechanisms.base import Cost, Face, Mechanism, gradient_bytes, refuse, refuse_in_state, without_autocast
from regard.mechanisms.pairwise import (
    Cache,
    append_to_cache,
    attend_by_weights,
    empty_cache,
    extend_cache,
    pair_cost,
    pair_gradient_cost,
    read_cache,
    zero_output,
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


class Sums(NamedTuple):
    """All that is kept of the past; float32 or better whatever the inputs."""

    sums: Float[Tensor, "B G F V+1"]  # Σ eᶜ⁻ᵐ ψ(k) [v, 1]ᵀ: S, and Z as the last column
    peak: Float[Tensor, "B G"]  # m, the largest c so far
    tokens: Int[Tensor, " B"]  # visible tokens so far


class Linear(Mechanism):
    """The family: `features` is the mechanism, everything else follows from it."""

    order = "N·F·(K+V)"
    memory = "G·F·(V+1)"
    training_memory = "N·F+F·V"
    accumulate: ClassVar[torch.dtype] = torch.float32  # features and sums are at least this precise
    feature_work: ClassVar[int] = 3  # element-wise FLOPs behind a feature
    pair_work: ClassVar[int] = 2  # and behind a pair within a chunk: mask and sum

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict

    @abstractmethod
    def features(self, x: Float[Tensor, "B N T K"]) -> tuple[Float[Tensor, "B N T F"], Float[Tensor, "B N T"] | None]:
        """(ψ, c) with φ(x) = eᶜ·ψ; c None means 0."""

    @abstractmethod
    def feature_count(self, K: int) -> int:
        """F, the number of features of a vector of width K."""

    def feature_flops(self, K: int) -> int:
        """FLOPs of matrix products behind the features of one vector."""
        return 0

    def forward(self, q: Queries, k: Keys, v: Values, mask: Mask = Mask()) -> Outputs:  # type: ignore[override]
        size = check_sizes(q, k, v, mask)
        refuse(self, mask, "bias", "slopes", "relative", "softcap")
        if (
            mask.window is not None
            or (mask.documents is not None and not mask.causal)
            or (mask.causal and size.T != size.S)
        ):
            # A running sum cannot forget: these need the pairs themselves.
            return attend_by_weights(self, q, k, v, mask)
        fast = self.select_kernel("forward", q, k, v, mask)
        if fast is not None:
            return functional.dropout(fast(self, q, k, v, mask), self.dropout, self.training)
        state = self._nothing(size)
        if mask.causal:
            out = self._scan(q, k, v, state, mask.visible, mask.document_ids())[0]
        else:
            out = self.read(q, self.write(state, k, v, mask.visible))
        return functional.dropout(out, self.dropout, self.training)

    def empty(self, size: Size, rules: Mask = Mask()) -> Sums | Cache:
        refuse(self, rules, "bias", "slopes", "relative", "softcap")
        refuse_in_state(self, rules)
        if rules.window is not None:
            return empty_cache(self, size, rules)
        return self._nothing(size)

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
        check_sizes(q, k, v, Mask(causal=True, visible=visible), new=True)
        self._check_state(state, k, v)
        if q.shape[2] == 0:
            return zero_output(q, v), state
        fast = self.select_kernel("extend", q, k, v, state, visible)
        if fast is not None:
            result: tuple[Tensor, Sums] = fast(self, q, k, v, state, visible)
            return result
        if q.shape[2] == 1:  # one token sees all that is written, itself included
            state = self.write(state, k, v, visible)
            return self.read(q, state).to(v.dtype), state
        return self._scan(q, k, v, state, visible, None)

    def write(  # type: ignore[override]
        self, state: Sums | Cache, k: Keys, v: Values, visible: Visible | None = None
    ) -> Sums | Cache:
        check_sizes(None, k, v, Mask(visible=visible))
        if isinstance(state, Cache):
            return append_to_cache(state, k, v, visible)
        self._check_state(state, k, v)
        if k.shape[2] == 0:
            return state
        with without_autocast(v):
            for ks, vs, seen in _pieces(BLOCK, k, v, visible):
                psi, c, values = self._keys(ks, vs, seen)
                state = _added(state, psi, c, values, _tokens(vs, seen).sum(1))
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
        B, G, F, V = *state.sums.shape[:3], state.sums.shape[3] - 1
        if q.dim() != 4 or q.shape[0] != B or q.shape[1] % G or self.feature_count(q.shape[3]) != F:
            raise ShapeError(
                f"q {list(q.shape)} cannot read a state of B = {B}, G = {G}, F = {F} features: expected [B,H,T,K] "
                "with G dividing H and the width K of the keys written."
            )
        out = []
        with without_autocast(q):
            for piece in q.split(BLOCK, 2):
                psi = self.features(self._wide(piece))[0]
                sums = psi.reshape(psi.shape[0], G, -1, F).to(state.sums.dtype) @ state.sums
                out.append(self._ratio(sums.view(*psi.shape[:3], V + 1), state.tokens[:, None]).to(q.dtype))
        return _joined(out)

    def weights(self, q: Queries, k: Keys, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        check_sizes(q, k, k, mask)
        refuse(self, mask, "bias", "slopes", "relative", "softcap")
        T, S = q.shape[2], k.shape[2]
        with without_autocast(q):
            allowed = mask.allowed(T, S, q.device)
            queries = _grouped(self.features(self._wide(q))[0], k.shape[1])
            psi, c, _ = self._keys(k, k, mask.visible)
            similar, _ = _similar(queries, psi, c, allowed, None)
            similar = similar.view(q.shape[0], q.shape[1], T, S)
            total = similar.sum(-1, keepdim=True)
            seen = torch.ones_like(total[:, :1, :, 0]) if allowed is None else allowed.any(-1)
            return self._divided(similar, total, seen[:, 0]).to(upcast_half(q).dtype)

    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        return _linear_cost(self, size, face)

    def gradient_cost(self, size: Size) -> Cost:
        return _linear_gradient_cost(self, size)

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, self.accumulate))

    def _nothing(self, size: Size) -> Sums:
        dtype = torch.promote_types(size.dtype, self.accumulate)
        sums = torch.zeros(size.B, size.G, self.feature_count(size.K), size.V + 1, dtype=dtype, device=size.device)
        peak = torch.full((size.B, size.G), float("-inf"), dtype=dtype, device=size.device)
        return Sums(sums, peak, torch.zeros(size.B, dtype=torch.long, device=size.device))

    def _check_state(self, state: Sums, k: Keys, v: Values) -> None:
        B, G, F, V = *state.sums.shape[:3], state.sums.shape[3] - 1
        check_state(Size(B=B, G=G, K=k.shape[3], V=V), k, v)
        if self.feature_count(k.shape[3]) != F:
            raise ShapeError(
                f"{self.name}: k of width {k.shape[3]} has {self.feature_count(k.shape[3])} features, "
                f"but the state was made for keys of {F}."
            )

    def _keys(self, k: Keys, v: Values, visible: Visible | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """ψ(k), c and [v, 1], all of them nothing where invisible."""
        mask = Mask(visible=visible)
        psi, c = self.features(self._wide(mask.zero_hidden(k)))
        values = mask.zero_hidden(v).to(psi.dtype)
        if c is not None and visible is not None:
            c = c.masked_fill(~visible[:, None], float("-inf"))
        return mask.zero_hidden(psi), c, torch.cat([values, torch.ones_like(values[..., :1])], -1)

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None, runs: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Causal attention chunk by chunk. `runs`: packed documents, of which the sums hold only the current one."""
        G, out, run = k.shape[1], [], None
        with without_autocast(v):
            for qs, ks, vs, seen, here in _pieces(CHUNK, q, k, v, visible, runs):
                queries = _grouped(self.features(self._wide(qs))[0], G)
                psi, c, values = self._keys(ks, vs, seen)
                mask = Mask(causal=True, visible=seen, documents=here)
                allowed = mask.allowed(psi.shape[2], psi.shape[2], q.device)
                similar, peaks = _similar(
                    queries, psi, c, allowed, _past_peak(state, here, run) if c is not None else None
                )
                past = _past(queries, state, peaks, here, run)
                sums = similar.flatten(2, 3) @ values + past.flatten(2, 3) @ state.sums
                sums = sums.view(q.shape[0], q.shape[1], -1, values.shape[3])
                tokens = _tokens(vs, seen)
                out.append(self._ratio(sums, state.tokens[:, None] + tokens.cumsum(1)).to(v.dtype))
                if here is not None:
                    state, psi, c = _current_document(state, psi, c, here, run)
                    run = here[:, -1]
                state = _added(state, psi, c, values, tokens.sum(1))
        return _joined(out), state

    def _ratio(self, sums: Float[Tensor, "B H T V1"], seen: Int[Tensor, "B #T"]) -> Tensor:
        return self._divided(sums[..., :-1], sums[..., -1:], seen > 0)

    def _divided(self, sums: Tensor, total: Tensor, seen: Tensor) -> Tensor:
        """sums / total, and zeros where the total is zero: no epsilon, which would leak the scale of other rows."""
        # Below this, terms have lost digits to underflow, and 1/total could overflow in the gradient.
        zero = total.abs() < torch.finfo(total.dtype).tiny / torch.finfo(total.dtype).eps
        if self.strict and bool((zero & seen.bool()[:, None, :, None]).any()):
            raise ZeroRowError(
                f"{self.name}: a query's similarities to the keys it may see sum to zero, so it has no weights. "
                "Use features that are positive, smaller inputs, or strict=False to get zeros there."
            )
        return (sums / total.masked_fill(zero, 1)).masked_fill(zero, 0)


def _grouped(psi: Tensor, G: int) -> Tensor:
    """[B,H,T,F] as [B,G,H/G,T,F]."""
    B, H, T, F = psi.shape
    return psi.reshape(B, G, H // G, T, F)


def _pieces(n: int, *tensors: Tensor | None) -> Iterator[Any]:
    """n tokens at a time of [B,·,T,·] and [B,T] tensors. Split, as the gradient of a slice is as long as the whole."""
    split = [None if x is None else x.split(n, 2 if x.dim() == 4 else 1) for x in tensors]
    for i in range(len(next(x for x in split if x is not None))):
        yield tuple(None if x is None else x[i] for x in split)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _tokens(v: Tensor, visible: Tensor | None) -> Tensor:
    """1 for each visible token, [B,T]."""
    return torch.ones(v.shape[0], v.shape[2], dtype=torch.long, device=v.device) if visible is None else visible.long()


def _similar(
    queries: Tensor, psi: Tensor, c: Tensor | None, allowed: Tensor | None, past: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """φ(q)·φ(k) of each pair that counts, relative to the largest c that the row has seen; and that largest c."""
    B, G, R, T, F = queries.shape
    similar = (queries.reshape(B, G, R * T, F) @ psi.mT).view(B, G, R, T, -1)
    if c is None:
        return (similar if allowed is None else similar.masked_fill(~allowed[:, :, None], 0)), None
    c = c[:, :, None, :]
    if allowed is not None:
        c = torch.where(allowed, c, float("-inf"))
    peaks = c.detach().amax(-1)
    if past is not None:
        peaks = torch.maximum(peaks, past)
    return similar * torch.exp(c - _finite(peaks)[..., None])[:, :, None], peaks


def _finite(peak: Tensor) -> Tensor:
    """−inf (nothing seen yet) as 0, so that −inf − peak stays −inf."""
    return peak.masked_fill(peak == float("-inf"), 0)


def _past_peak(state: Sums, runs: Tensor | None, run: Tensor | None) -> Tensor:
    """Largest c of the sums, for each row that may read them."""
    past = state.peak[..., None]
    if runs is None or run is None:
        return past
    return torch.where((runs == run[:, None])[:, None], past, float("-inf"))


def _past(queries: Tensor, state: Sums, peaks: Tensor | None, runs: Tensor | None, run: Tensor | None) -> Tensor:
    """Query features scaled for reading the sums: by exp(m_old − m_row), and by 0 across documents."""
    if peaks is not None:
        queries = queries * torch.exp(state.peak[..., None] - _finite(peaks)).clamp(max=1)[:, :, None, :, None]
    if runs is not None and run is not None:
        queries = queries.masked_fill((runs != run[:, None])[:, None, None, :, None], 0)
    return queries


def _current_document(
    state: Sums, psi: Tensor, c: Tensor | None, runs: Tensor, run: Tensor | None
) -> tuple[Sums, Tensor, Tensor | None]:
    """Forgets what does not belong to the document that a chunk ends in."""
    last = runs[:, -1:]
    ended = torch.zeros_like(last[:, 0], dtype=torch.bool) if run is None else last[:, 0] != run
    state = state._replace(
        sums=state.sums.masked_fill(ended[:, None, None, None], 0),
        peak=state.peak.masked_fill(ended[:, None], float("-inf")),
    )
    other = (runs != last)[:, None]
    psi = psi.masked_fill(other[..., None], 0)
    return state, psi, None if c is None else c.masked_fill(other, float("-inf"))


def _added(state: Sums, psi: Tensor, c: Tensor | None, values: Tensor, tokens: Tensor) -> Sums:
    """The sums with more keys in them, rescaled where the largest c has grown."""
    psi, values = psi.to(state.sums.dtype), values.to(state.sums.dtype)
    if c is None:
        return Sums(state.sums + psi.mT @ values, state.peak, state.tokens + tokens)
    c = c.to(state.peak.dtype)
    peak = torch.maximum(state.peak, c.detach().amax(-1))
    base = _finite(peak)
    kept = state.sums * torch.exp(state.peak - base)[..., None, None]
    return Sums(kept + (psi * torch.exp(c - base[..., None])[..., None]).mT @ values, peak, state.tokens + tokens)


def _linear_cost(mechanism: Linear, size: Size, face: Face) -> Cost:
    B, T, S, H, G, K, V = size.B, size.T, size.S, size.H, size.G, size.K, size.V
    F, per_vector = mechanism.feature_count(K), mechanism.feature_flops(K)
    state = B * G * F * (V + 1) * size.itemsize_at_least(mechanism.accumulate)
    if face == "weights" or _by_pairs(size, face):
        vectors = B * (H * T + G * S)
        pairs = pair_cost(mechanism, size, face, 2 * F, mechanism.pair_work + 1)
        mapped, work = vectors * per_vector, vectors * F * mechanism.feature_work
        return pairs + Cost(mapped, mapped, work, 0, state - pairs.state)
    fresh = T if face == "recurrent" else S
    matmul, useful, pairs_done = linear_flops(size, F, per_vector, face)
    moved = size.e * B * (H * T * (K + V) + G * fresh * (K + V)) + (2 * state if face == "recurrent" else 0)
    work = (H * T + G * fresh) * F * mechanism.feature_work + H * pairs_done * mechanism.pair_work + 4 * H * T * V
    return Cost(matmul, useful, B * work, moved, state)


def _by_pairs(size: Size, face: Face) -> bool:
    """Whether a whole sequence goes by explicit weights: queries that are the last of more keys."""
    return face == "parallel" and size.causal and size.T != size.S


def linear_flops(size: Size, F: int, per_vector: int, face: Face = "parallel") -> tuple[int, int, int]:
    """FLOPs of matrix products as executed and as needed, and the pairs within chunks. `per_vector`: of one φ."""
    B, T, H, G, V = size.B, size.T, size.H, size.G, size.V
    fresh = T if face == "recurrent" else size.S
    sums = 2 * F * (V + 1)  # FLOPs of adding a key to the sums, or of reading them
    matmul = B * (H * T + G * fresh) * per_vector + B * (G * fresh + H * T) * sums
    useful, pairs_done = matmul, 0
    if (face == "recurrent" or size.causal) and not (face == "recurrent" and T == 1):
        chunks, per_pair = size.chunk_counts(CHUNK), 2 * B * H * (F + V + 1)
        pairs_done = chunks.pairs
        matmul += per_pair * pairs_done
        useful += per_pair * chunks.causal
    return matmul, useful, pairs_done


def _linear_gradient_cost(mechanism: Linear, size: Size) -> Cost:
    """Two products for each one forward, but one for a projection to features: its directions have no gradient. Causal:
    nothing comes back from the sums before the first chunk, nor to those after the last."""
    B, T, S, H, G, K, V = size.B, size.T, size.S, size.H, size.G, size.K, size.V
    F, per_vector = mechanism.feature_count(K), mechanism.feature_flops(K)
    vectors, moved = B * (H * T + G * S), gradient_bytes(mechanism, size)
    if _by_pairs(size, "parallel"):
        mapped = vectors * per_vector
        work = vectors * F * mechanism.feature_work
        return pair_gradient_cost(mechanism, size, 2 * F, True) + Cost(mapped, mapped, work, 0, 0)
    matmul, useful, pairs_done = linear_flops(size, F, 0)
    mapped, spared = vectors * per_vector, 0
    if size.causal:
        chunks = size.chunk_counts(CHUNK)
        spared = 2 * B * F * (V + 1) * (H * chunks.first + 2 * G * chunks.last)
    work = vectors * F * mechanism.feature_work + B * H * (pairs_done * mechanism.pair_work + 4 * T * V)
    return Cost(mapped + 2 * matmul - spared, mapped + 2 * useful, 2 * work, moved, 0)
