"""Gated and delta attention: a memory S [K,V] that fades, is written to, and is read.

    decay    S ← e^{a_t} S                              a_t ≤ 0, one number a head, or one a key channel (a row of S)
    write    S ← S + b_t k_t (v_t − [erases] Sᵀ k_t)ᵀ     a mechanism that erases takes out first what k_t already reads
    read     out_t = scale · Sᵀ q_t

A mechanism of this family says what its decays are and whether it erases; everything else follows. It is causal by
construction: what a token leaves in S depends on the order of those before it.

A whole sequence goes chunk by chunk. Within a chunk that starts with S, with c = cumsum(a) counted from its start:

    D_ij = e^{c_i − c_j} for j ≤ i                      never a quotient of exponentials, which would overflow
    N = (I + tril(diag(b)(K Kᵀ ⊙ D), −1))⁻¹ diag(b) (V − (K ⊙ e^c) S)      what each token writes; not erasing, b ⊙ V
    out = scale · ((Q ⊙ e^c) S + (Q Kᵀ ⊙ D) N),         S ← e^{c_C} S + (K ⊙ e^{c_C − c})ᵀ N

Every value head has a memory of its own. q and k may have fewer heads than v, which then share them; or there are more
query heads than value heads, and several read one memory. A hidden token has a = 0 and b = 0, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.mechanisms.base import Cost, Face, Mechanism, refuse_in_state, require_cross, without_autocast
from regard.mechanisms.cache import visible_counts
from regard.mechanisms.decays import STRONGEST, compare_decayed, cumulate
from regard.mechanisms.gates import (
    GatedTokens,
    check_memory,
    check_rules,
    check_tokens,
    prepare,
    same_document,
    share_heads,
)
from regard.mechanisms.nonfinite import mark_rows, replace_nonfinite, rows_of_documents
from regard.mechanisms.pairwise import zero_output
from regard.mechanisms.recurrence_costs import recurrence_cost, recurrence_gradient_cost
from regard.mechanisms.sums import concatenate, split_tokens
from regard.shapes import Mask, Size, Visible, default_scale

CHUNK = 64  # tokens that are taken at once: pairs within it cost C·(K+V) a token, the memory K·V
Decays = Float[Tensor, "B G S"] | Float[Tensor, "B G S K"] | None
Writes = Float[Tensor, "B G S"] | None


class Memory(NamedTuple):
    """All that is kept of the past; float32 or better whatever the inputs."""

    memory: Float[Tensor, "B G K V"]  # S, one for each value head
    tokens: Int[Tensor, " B"]  # visible tokens so far


class Recurrence(Mechanism):
    """The family: `log_decay` and `erases` are the mechanism, everything else follows from them.

    `checks` says whether a, b and k are looked at, as far as they can be: a layer that makes them within their ranges
    may do without. `scale` is 1/√K where it is None.
    """

    order = "N·K·V"
    memory = "G·K·V"
    training_memory = "N·(K+V)+N/C·K·V"
    crosses = False
    causal_only = True
    normalised = False
    signed = True
    accumulate: ClassVar[torch.dtype] = torch.float32
    chunk: ClassVar[int] = CHUNK
    erases: ClassVar[bool] = False  # what a key already reads is taken out before it is written
    channels: bool = False  # a has a number for each key channel, [B,G,S,K], not one for each head [B,G,S]
    range: float = 1.0  # b is from 0 to this

    def __init__(self, scale: float | None = None, checks: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.checks = checks

    def log_decay(self, v: Float[Tensor, "B G S V"]) -> Float[Tensor, "#B #G #S 1"]:
        """Returns the logarithm of each token's decay, for a mechanism that is not given it as a."""
        raise NotImplementedError(f"{self.name} has a in its `needs`, or a `log_decay` of its own")

    def score_scale(self, K: int) -> float:
        """Returns the factor of what a query of width K reads."""
        if self.scale is None:
            return default_scale(K)
        return self.scale

    def forward(  # type: ignore[override]
        self,
        q: Float[Tensor, "B I T K"],
        k: Float[Tensor, "B J S K"],
        v: Float[Tensor, "B G S V"],
        mask: Mask = Mask(),
        *,
        a: Decays = None,
        b: Writes = None,
    ) -> Float[Tensor, "B H T V"]:
        q, k, size, mask = check_tokens(self, q, k, v, mask)
        if size.S == 0 or size.T == 0:
            return zero_output(self, q, v)
        fast = self.select_kernel("forward", q, k, v, mask, a, b)
        if fast is not None:
            return functional.dropout(fast(self, q, k, v, mask, a, b), self.dropout, self.training)
        if size.T < size.S:  # the queries are the last tokens: those before them are written, and ask nothing
            q = functional.pad(q, (0, 0, size.S - size.T, 0))
        state = self.empty(size)
        out, _ = self._scan(q, k, v, state, mask.visible, mask.document_ids(), a, b)
        return functional.dropout(out[:, :, size.S - size.T :], self.dropout, self.training)

    def empty(self, size: Size, rules: Mask = Mask()) -> Memory:
        check_rules(self, rules)
        refuse_in_state(self, rules)
        dtype = torch.promote_types(size.dtype, torch.float32)
        memory = torch.zeros(size.B, size.G, size.K, size.V, dtype=dtype, device=size.device)
        return Memory(memory, torch.zeros(size.B, dtype=torch.long, device=size.device))

    def extend(  # type: ignore[override]
        self,
        q: Float[Tensor, "B I T K"],
        k: Float[Tensor, "B J T K"],
        v: Float[Tensor, "B G T V"],
        state: Memory,
        visible: Bool[Tensor, "B T"] | None = None,
        *,
        a: Decays = None,
        b: Writes = None,
    ) -> tuple[Float[Tensor, "B H T V"], Memory]:
        q, k, size, _ = check_tokens(self, q, k, v, Mask(causal=True, visible=visible), new=True)
        check_memory(state.memory, k, v)
        if size.T == 0:
            return zero_output(self, q, v), state
        fast = self.select_kernel("extend", q, k, v, state, visible, a, b)
        if fast is not None:
            result: tuple[Tensor, Memory] = fast(self, q, k, v, state, visible, a, b)
            return result
        if size.T != 1:
            return self._scan(q, k, v, state, visible, None, a, b)
        with without_autocast(v):
            token = prepare(self, q, k, v, visible, a, b, state.memory.dtype)
            out, memory = self._step(token, state.memory)
        added: Tensor | int = 1
        if visible is not None:
            added = visible_counts(v, visible).sum(1)
        return out.flatten(1, 2).to(v.dtype), Memory(memory, state.tokens + added)

    def write(self, state: Memory, k: Any, v: Any, visible: Visible | None = None) -> Memory:
        require_cross(self)
        return state

    def read(self, q: Any, state: Memory, positions: Any = None, bias: Any = None) -> Tensor:
        require_cross(self)
        return state.memory

    def weights(  # type: ignore[override]
        self,
        q: Float[Tensor, "B I T K"],
        k: Float[Tensor, "B J S K"],
        mask: Mask = Mask(),
        *,
        a: Decays = None,
        b: Writes = None,
        heads: int | None = None,
    ) -> Float[Tensor, "B H T S"]:
        """Returns scale · A M⁻¹ diag(b), with A = tril(Q Kᵀ ⊙ D) and M = I + tril(diag(b)(K Kᵀ ⊙ D), −1).

        They are exact and signed, and need not sum to one. `heads` is how many v has, each with a memory of its own. It
        need be said only where no a or b does and k has fewer: else it is the most that k, a or b have.
        """
        if heads is None:
            heads = max((x.shape[1] for x in (k, a, b) if x is not None and x.dim() > 1), default=0)
        q, k = share_heads(q, k, heads)
        q, k, size, mask = check_tokens(self, q, k, k, mask)
        T = size.T
        S = size.S
        dtype = torch.promote_types(q.dtype, torch.float32)
        with without_autocast(q):
            finite = replace_nonfinite(None, k, mask)
            x = prepare(self, q, finite.v, k, mask.visible, a, b, dtype)
            c = cumulate(x.a)
            causal = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            documents = mask.document_ids()
            # [B,G,R·T,S]
            weights = compare_decayed(x.q, x.k, c, same_document(documents, causal)).flatten(2, 3)
            weights = weights * self.score_scale(size.K)
            if self.erases:
                assert x.b is not None
                before = torch.ones(S, S, dtype=torch.bool, device=q.device).tril(-1)
                erased = x.b * compare_decayed(x.k[:, :, None], x.k, c, same_document(documents, before))[:, :, 0]
                # W M = A, with M = I + erased
                weights = torch.linalg.solve_triangular(erased, weights, upper=False, left=False, unitriangular=True)
            if x.b is not None:
                weights = weights * x.b.mT
            weights = weights.reshape(size.B, size.H, T, S)
            return mark_rows(weights, rows_of_documents(finite.broken, mask.documents, True, T))

    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        return recurrence_cost(self, size, face)

    def gradient_cost(self, size: Size) -> Cost:
        return recurrence_gradient_cost(self, size)

    def _scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Memory,
        visible: Tensor | None,
        documents: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
    ) -> tuple[Tensor, Memory]:
        """Returns the outputs of a whole sequence, computed chunk by chunk, and the memory after its last token.

        `documents` [B,T] are the ids of packed documents; the memory holds only the last one.
        """
        outs = []
        memory = state.memory
        current = None  # [B], the document that the memory holds
        finite = replace_nonfinite(k, v, Mask(visible=visible))
        assert finite.k is not None
        with without_autocast(v):
            x = prepare(self, q, finite.k, finite.v, visible, a, b, memory.dtype)
            for chunk in split_tokens(CHUNK, x.q.flatten(1, 2), x.k, x.v, x.a, x.b, documents):
                out, memory = self.scan_chunk(chunk, memory, current)
                outs.append(out)
                if documents is not None:
                    current = chunk[5][:, -1]
        out = concatenate(outs).to(v.dtype)
        tokens = state.tokens + visible_counts(v, visible).sum(1)
        # The memory holds what the last token has seen, so that what is not a number reaches all tokens to come.
        broken = rows_of_documents(finite.broken, documents, True, q.shape[2])
        if broken is None:
            return out, Memory(memory, tokens)
        memory = mark_rows(memory, broken[..., -1:].any(-1, keepdim=True))
        return mark_rows(out, broken), Memory(memory, tokens)

    def scan_chunk(
        self, chunk: Sequence[Any], memory: Float[Tensor, "B G K V"], current: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B H C V"], Float[Tensor, "B G K V"]]:
        """Returns the output of one chunk and the memory after it; the head of this file has the formulas.

        `chunk` holds its q [B,H,C,K], k, v, a, b and the ids of its documents; `current` is that of the memory.
        """
        q, k, v, a = chunk[:4]
        b, documents = chunk[4:]
        C = k.shape[2]
        queries = q.unflatten(1, (k.shape[1], -1))
        causal = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
        c = cumulate(a)
        reading, keeping, kept = _decay_memory(c, documents, current, k.dtype)
        new = v
        if self.erases:
            # [B,G,C,K] @ [B,G,K,V]: what the keys read of all before the chunk
            new = b * (v - (k * reading) @ memory)
            erased = b * compare_decayed(k[:, :, None], k, c, same_document(documents, causal.tril(-1)))[:, :, 0]
            new = torch.linalg.solve_triangular(erased, new, upper=False, unitriangular=True)
        elif b is not None:
            new = b * v
        # The memory before [B,G,R·C,K] @ [B,G,K,V], and pairs within the chunk [B,G,R·C,C] @ [B,G,C,V]
        past = (queries * reading[:, :, None]).flatten(2, 3) @ memory
        pairs = compare_decayed(queries, k, c, same_document(documents, causal)).flatten(2, 3)
        out = (past + pairs @ new) * self.score_scale(k.shape[3])
        memory = kept * memory + (k * keeping).mT @ new
        return out.view(*q.shape[:3], v.shape[3]), memory

    def _step(self, x: GatedTokens, memory: Tensor) -> tuple[Float[Tensor, "B G R 1 V"], Float[Tensor, "B G K V"]]:
        """Returns what one token reads, and the memory with it: the three lines of the recurrence."""
        memory = memory * x.a.clamp(min=STRONGEST).exp().to(memory.dtype).mT
        new = x.v
        if self.erases:
            new = new - x.k @ memory
        if x.b is not None:
            new = x.b * new
        memory = memory + x.k.mT * new
        # [B,G,R,K] @ [B,G,K,V]
        return (x.q[:, :, :, 0] @ memory)[:, :, :, None] * self.score_scale(x.k.shape[3]), memory


def repeat_shared(
    mechanism: Mechanism, q: Tensor | None, k: Tensor | None, G: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns q and k with a head for each of the G memories of a mechanism that has them; others' as they are."""
    if q is None or k is None or not isinstance(mechanism, Recurrence):
        return q, k
    return share_heads(q, k, G)


def _decay_memory(
    c: Tensor, documents: Tensor | None, current: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what is left of the memory where each token reads it [B,G,C,X], of each token at the end of the chunk
    [B,G,C,X], and of the memory at the end [B,G,X,1]; nothing is left across documents."""
    reading = c.exp().to(dtype)
    keeping = (c[:, :, -1:] - c).exp().to(dtype)
    kept = reading[:, :, -1:].mT
    if documents is not None:
        keeping = keeping.masked_fill((documents != documents[:, -1:])[:, None, :, None], 0)
        if current is not None:
            reading = reading.masked_fill((documents != current[:, None])[:, None, :, None], 0)
            kept = reading[:, :, -1:].mT
    return reading, keeping, kept
