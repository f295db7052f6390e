"""The chunks of gated and delta attention, forward and backward; the table of tensors heads this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.mechanisms import Recurrence
from regard.mechanisms.decays import STRONGEST


class Decays(NamedTuple):
    """What is left of what, from c = cumsum(a) within each chunk."""

    within: Tensor  # [N,n,C,C], D
    reading: Tensor  # [N,n,C,1]
    keeping: Tensor  # [N,n,C,1]

    @property
    def kept(self) -> Tensor:
        """What is left of the memory after each chunk, [N,n,1,1]."""
        return self.reading[:, :, -1:]


def decays_of(a: Tensor, dtype: torch.dtype) -> Decays:
    """Returns the decays within each chunk; differences of c are taken in float64, before the exponential."""
    c = a.double().clamp(min=STRONGEST).cumsum(2)
    within = (c[..., :, None] - c[..., None, :]).to(dtype).clamp_(max=0).exp_().tril_()
    reading = c.exp().to(dtype)[..., None]
    keeping = (c[..., -1:] - c).exp().to(dtype)[..., None]
    return Decays(within, reading, keeping)


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    """Returns x [N,n,C,X] once for each of the R query heads whose rows lie side by side in q [N,n,R·C,K]."""
    heads = q.shape[2] // x.shape[2]
    if heads == 1:
        return x
    return x.repeat(1, 1, heads, 1)


class ChunkedRecurrence(torch.autograd.Function):
    """Outputs of all chunks [N,n,R·C,V], and the memory after the last one [N,K,V]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        memory: Tensor,
        mechanism: Recurrence,
    ) -> tuple[Tensor, Tensor]:
        decays = decays_of(a, k.dtype)
        scale = mechanism.score_scale(k.shape[3])
        meeting = inverse = residual = None
        if mechanism.erases:
            assert b is not None
            # [N,n,C,K] @ [N,n,K,C]
            meeting = (k @ k.mT).mul_(decays.within)
            identity = torch.eye(k.shape[2], dtype=k.dtype).expand_as(meeting)
            inverse = torch.linalg.solve_triangular(b * meeting, identity, upper=False, unitriangular=True)
            residual = v.clone()
            new = torch.empty_like(v, memory_format=torch.contiguous_format)
        elif b is None:
            new = v
        else:
            new = b * v
        memories, last = _run_memories(k, b, decays, memory, new, inverse, residual)
        # [N,n,R·C,K] @ [N,n,K,V] and [N,n,R·C,C] @ [N,n,C,V]
        pairs = (q @ k.mT).mul_(_each_head(decays.within, q))
        out = (q * _each_head(decays.reading, q)) @ memories
        out.add_(pairs @ new).mul_(scale)
        ctx.save_for_backward(q, k, v, a, b, memory, *decays, meeting, inverse, residual, pairs, memories, new)
        ctx.mechanism = mechanism
        return out, last

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: gradients of these gradients are wanted
            return *_differentiate(ctx.saved_tensors[:6], ctx.mechanism, (d_out, d_last)), None
        q, k, v = ctx.saved_tensors[:3]
        a, b = ctx.saved_tensors[3:5]
        decays = Decays(*ctx.saved_tensors[6:9])
        meeting, inverse, residual, pairs = ctx.saved_tensors[9:13]
        memories, new = ctx.saved_tensors[13:]
        d = d_out * ctx.mechanism.score_scale(k.shape[3])
        rows = _each_head(decays.reading, q)
        # What comes back to the memories by reading, and to what is written by the outputs of the same chunk.
        d_read = (q * rows).mT @ d
        d_new, d_memories, first = _run_back(k, b, decays, inverse, pairs.mT @ d, d_read, d_last)
        d_pairs = d @ new.mT
        d_queries = d @ memories.mT
        d_keeping = new @ d_memories.mT
        grads = _Gradients(k, decays)
        grads.compare(q, d_pairs, pairs)
        d_q = (d_pairs.mul_(_each_head(decays.within, q)) @ k).add_(rows * d_queries)
        grads.read(q, d_queries)
        grads.keep(d_keeping, memories, d_memories)
        d_b = None
        d_v = d_new
        if meeting is not None:
            d_v = b * d_new
            d_b = (d_new * residual).sum(-1, keepdim=True)
            d_erasing = -d_v @ memories.mT
            grads.erase(d_erasing)
            d_meeting = (d_new @ new.mT).neg_().tril_(-1)
            d_b += (d_meeting * meeting).sum(-1, keepdim=True)
            grads.meet(d_meeting.mul_(b), meeting)
        elif b is not None:
            d_v = b * d_new
            d_b = (d_new * v).sum(-1, keepdim=True)
        return d_q, grads.k, d_v, grads.decay(a), d_b, first, None


def _differentiate(
    inputs: Sequence[Tensor | None], mechanism: Recurrence, grads: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """Returns the gradients of q, k, v, a, b and the first memory, by the reference, which autograd goes through again.

    `grads` are those of the outputs and of the last memory.
    """
    # Views: where one input was made of another, its gradient must not count for that one too.
    own = [x if x is None else x.view_as(x) for x in inputs]
    q, k, v = own[:3]
    a, b, memory = own[3:]
    assert q is not None and k is not None and v is not None and a is not None and memory is not None
    outs = []
    last = memory[:, None]
    for i in range(k.shape[1]):
        heads = q[:, i].unflatten(1, (-1, k.shape[2]))
        strength = None if b is None else b[:, i, None]
        chunk = (heads, k[:, i, None], v[:, i, None], a[:, i, None, :, None], strength, None)
        out, last = mechanism.scan_chunk(chunk, last, None)
        outs.append(out.flatten(1, 2))
    wanted = [x for x in own if x is not None and x.requires_grad]
    found = torch.autograd.grad((torch.stack(outs, 1), last[:, 0]), wanted, grads, create_graph=True, allow_unused=True)
    given = iter(found)
    return [next(given) if x is not None and x.requires_grad else None for x in own]


def _run_memories(
    k: Tensor,
    b: Tensor | None,
    decays: Decays,
    memory: Tensor,
    new: Tensor,
    inverse: Tensor | None,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the memory before each chunk [N,n,K,V], and the one after the last [N,K,V].

    Where keys erase, what the memory reads is taken from `residual` (V, at first), and `new` is filled.
    """
    memories = memory.new_empty(k.shape[0], k.shape[1], *memory.shape[1:])
    kept = (k * decays.keeping).mT
    erasing = None
    if inverse is not None:
        erasing = k * decays.reading
    left = decays.kept.unbind(1)
    written = new.unbind(1)
    for i, (before, keys) in enumerate(zip(memories.unbind(1), kept.unbind(1), strict=True)):
        before.copy_(memory)
        if erasing is not None:
            assert residual is not None and inverse is not None and b is not None
            rest = residual[:, i].baddbmm_(erasing[:, i], memory, alpha=-1)
            written[i].copy_(inverse[:, i] @ (b[:, i] * rest))
        memory = torch.baddbmm(left[i] * memory, keys, written[i])
    return memories, memory


def _run_back(
    k: Tensor,
    b: Tensor | None,
    decays: Decays,
    inverse: Tensor | None,
    d_new: Tensor,
    d_read: Tensor,
    d_memory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what comes back to b (V − …) of each token, to the memory after each chunk, and to the first memory.

    `d_new` comes back to what is written from outputs of the same chunk, `d_read` to the memory before from reading it.
    """
    d_memories = torch.empty_like(d_read)
    keeping = k * decays.keeping
    erasing = None
    if inverse is not None:
        erasing = (k * decays.reading).mT
    for i in reversed(range(k.shape[1])):
        d_memories[:, i] = d_memory
        d_written = torch.baddbmm(d_new[:, i], keeping[:, i], d_memory)
        d_memory = torch.addcmul(d_read[:, i], decays.kept[:, i], d_memory)
        if erasing is not None:
            assert inverse is not None and b is not None
            d_written = inverse[:, i].mT @ d_written
            d_memory = torch.baddbmm(d_memory, erasing[:, i], b[:, i] * d_written, alpha=-1)
        d_new[:, i] = d_written
    return d_new, d_memories, d_memory


class _Gradients:
    """The gradient of the keys, and of c = cumsum(a), as they come together."""

    def __init__(self, k: Tensor, decays: Decays) -> None:
        self.keys = k
        self.decays = decays
        self.k = torch.zeros_like(k)
        self.c = torch.zeros_like(decays.reading)  # [N,n,C,1]

    def compare(self, q: Tensor, d_pairs: Tensor, pairs: Tensor) -> None:
        """Adds what comes by the pairs of queries and keys; D_ij raises c_i and lowers c_j."""
        heads = (-1, self.keys.shape[2])
        change = (d_pairs * pairs).unflatten(2, heads).sum(2)
        self.c += change.sum(-1, keepdim=True) - change.sum(-2)[..., None]
        within = _each_head(self.decays.within, q)
        self.k += (d_pairs * within).mT @ q

    def read(self, q: Tensor, d_queries: Tensor) -> None:
        """Adds what comes by queries that read the memory."""
        change = (q * d_queries).sum(-1, keepdim=True).unflatten(2, (-1, self.keys.shape[2])).sum(2)
        self.c += self.decays.reading * change

    def keep(self, d_keeping: Tensor, memories: Tensor, d_memories: Tensor) -> None:
        """Adds what comes by the memory at the end of the chunk: its keys, and what is left of the memory before."""
        moved = self.decays.keeping * d_keeping
        self.k += moved
        change = (self.keys * moved).sum(-1, keepdim=True)
        self.c -= change
        kept = (memories * d_memories).sum((-2, -1))[..., None, None]
        self.c[:, :, -1:] += change.sum(2, keepdim=True) + self.decays.kept * kept

    def erase(self, d_erasing: Tensor) -> None:
        """Adds what comes by keys that read the memory before they are written."""
        moved = self.decays.reading * d_erasing
        self.k += moved
        self.c += (self.keys * moved).sum(-1, keepdim=True)

    def meet(self, d_meeting: Tensor, meeting: Tensor) -> None:
        """Adds what comes by keys that meet earlier keys of the chunk."""
        change = d_meeting * meeting
        self.c += change.sum(-1, keepdim=True) - change.sum(-2)[..., None]
        weighted = d_meeting.mul_(self.decays.within)
        self.k += weighted @ self.keys
        self.k += weighted.mT @ self.keys

    def decay(self, a: Tensor) -> Tensor:
        """Returns the gradient of a [N,n,C]: c_i holds every a up to i."""
        later = self.c[..., 0].double().flip(-1).cumsum(-1).flip(-1)
        return later.masked_fill(a < STRONGEST, 0).to(a.dtype)
