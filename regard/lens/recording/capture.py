"""Listening to the attention of a Hugging Face model: what is kept of each layer, and whether it explains the weights.

The weights of the model's own function are compared, row by row, with those that follow from q, k, the mask and the
biases that it was given. Where they agree, these are kept. Where they do not, the model does something that no formula
of a trace says, and its weights are kept themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.hub.attention import Call
from regard.lens.trace.arrays import packed
from regard.lens.trace.formulas import Dense, Softmax
from regard.lens.trace.rules import recognised
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Attended

TILE = 64  # rows of dense weights that are packed together


class Heard:
    """All calls of one attention module: one for a whole text, one a step while it generates."""

    def __init__(self, call: Call, dense: int | None) -> None:
        self.name, self.cross = call.name, call.cross
        self.formula = Softmax(call.scaling, call.kwargs.get("softcap"))
        self.q: list[Tensor] = []
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.n: list[Tensor] = []
        self.masks: list[tuple[int, Tensor | None, int]] = []  # first column, what may be seen of them, and how many
        self.offsets: dict[int, Tensor] = {}  # bias of each distance j − i
        self.explained = True
        self.columns = dense  # how many there will be, where weights are to be kept
        self.waiting: list[Tensor] = []
        self.tiles: list[list[bytes]] = [[] for _ in range(call.q.shape[1])]
        self.lost = torch.zeros(call.q.shape[1])
        self.probe: Tensor | None = None
        self.bias: Tensor | None = None
        self.queries = self.keys = self.start = self.first = 0
        self.tolerance = max(1e-5, 2 * torch.finfo(call.q.dtype).eps)

    def begin(self, call: Call) -> None:
        t, S = call.q.shape[2], call.k.shape[2]
        new = S if not self.k else 0 if self.cross else t
        self.start = self.queries
        self.queries, self.keys = self.queries + t, self.keys + new
        self.first = 0 if self.cross else self.keys - S  # a cache may have let go of the first keys
        self.q.append(_plain(call.q))
        if new:
            self.k.append(_plain(call.k[:, :, S - new :]))
            self.v.append(_plain(call.v[:, :, S - new :]))
        self.masks.append((self.first, call.allowed, t))
        self.bias = _bias(call)
        if self.bias is not None:
            self._learn(self.bias)

    def rows(self, call: Call, start: int, weights: Float[Tensor, "H R S"]) -> None:
        """Compares some rows with what they should be, and keeps their normaliser."""
        weights = weights.float().cpu()
        R = weights.shape[1]
        if self.columns is not None:
            self._keep(weights)
            return
        q = call.q[0, :, start : start + R].detach().float().cpu()
        k = call.k[0].detach().float().cpu()
        H = q.shape[0]
        scores = self.formula.scores(q, k.repeat_interleave(H // k.shape[0], 0))
        if self.bias is not None:
            scores = scores + self._biases(self.start + start, R, scores.shape[2])
        seen = call.allowed
        if seen is not None:
            scores = scores.masked_fill(~seen[start : start + R].cpu(), float("-inf"))
        n = scores.logsumexp(-1)
        blind = n == float("-inf")
        if not self._agree(scores, n, weights, blind):
            # A sink takes a share that the row lacks: the normaliser shows in any single weight.
            best = weights.max(-1)
            n = scores.gather(2, best.indices[..., None])[..., 0] - best.values.log()
            n = n.masked_fill(blind, float("-inf"))
            self.explained &= self._agree(scores, n, weights, blind)
        self.n.append(n)

    def end(self, out: Tensor, probing: bool) -> Tensor:
        self.bias = None
        if not probing:
            return out
        self.probe = torch.zeros_like(out, requires_grad=True)
        return out + self.probe

    def attended(self, layer: int, side: str, queries: int, keys: int, sequences: list[Tokens]) -> Attended:
        """What was heard, as a trace keeps it."""
        q, k, v = (torch.cat(x, 1) for x in (self.q, self.k, self.v))
        asking, asked = sequences[queries], sequences[keys]
        made = Attended(
            layer,
            side,
            "cross" if self.cross else "self",
            self.name,
            "softmax",
            queries,
            keys,
            q.shape[0],
            k.shape[0],
            self.formula,
            recognised(self._seen(), asking, asked, self.cross),
            q=q,
            k=k,
            v=v,
        )
        if self.columns is not None:
            self._pack()
            made.formula, made.error = Dense(TILE, self.tiles), self.lost.tolist()
        else:
            made.n = torch.cat(self.n, 1)
            if any(bool((x != 0).any()) for x in self.offsets.values()):
                blank = torch.zeros(q.shape[0])
                spread = range(1 - len(asking), len(asked))
                made.offsets = torch.stack([self.offsets.get(d, blank) for d in spread], 1)
        if self.probe is not None:
            made.g = self.probe[0].detach().float().cpu().transpose(0, 1).contiguous()
        return made

    def _agree(self, scores: Tensor, n: Tensor, weights: Tensor, blind: Tensor) -> bool:
        made = torch.exp(scores - n.masked_fill(blind, 0)[..., None])
        return bool(((made - weights).abs().amax(-1).masked_fill(blind, 0) <= self.tolerance).all())

    def _learn(self, bias: Float[Tensor, "H T S"]) -> None:
        """The bias of each distance, from the first row and the first column."""
        shift = self.first - self.start  # columns and rows of this call begin elsewhere in the whole
        row, column = bias[:, 0].T.clone(), bias[:, :, 0].T.clone()  # for themselves, so that the rest can go
        for j, one in enumerate(row):
            self.offsets.setdefault(j + shift, one)
        for i, one in enumerate(column):
            self.offsets.setdefault(shift - i, one)

    def _biases(self, start: int, R: int, S: int) -> Float[Tensor, "H R S"]:
        low = self.first - (start + R - 1)
        blank = torch.zeros_like(next(iter(self.offsets.values())))
        line = torch.stack([self.offsets.get(d, blank) for d in range(low, self.first + S - start)], 1)
        at = torch.arange(S)[None] + self.first - (start + torch.arange(R))[:, None] - low
        return line[:, at]

    def _seen(self) -> Bool[Tensor, "T S"] | None:
        if all(mask is None for _, mask, _ in self.masks):
            return None
        parts = []
        first, mask, _ = self.masks[0]
        if len(self.masks) == 1 and mask is not None and first == 0:
            return mask.cpu()
        for first, mask, t in self.masks:
            rows = torch.zeros(t, self.keys, dtype=torch.bool)
            rows[:, first : first + mask.shape[1] if mask is not None else None] = True if mask is None else mask.cpu()
            parts.append(rows)
        return torch.cat(parts)

    def _keep(self, weights: Float[Tensor, "H R S"]) -> None:
        assert self.columns is not None
        whole = torch.zeros(*weights.shape[:2], self.columns)
        whole[..., self.first : self.first + weights.shape[2]] = weights
        self.waiting.append(whole)
        if sum(x.shape[1] for x in self.waiting) >= TILE:
            self._pack(whole_only=True)

    def _pack(self, whole_only: bool = False) -> None:
        if not self.waiting:
            return
        rows = torch.cat(self.waiting, 1)
        stop = rows.shape[1] // TILE * TILE if whole_only else rows.shape[1]
        for part in rows[:, :stop].split(TILE, 1):
            self.lost = torch.maximum(self.lost, (part - part.half().float()).abs().amax((1, 2)))
            for tiles, head in zip(self.tiles, part, strict=True):
                tiles.append(packed(head, "f16"))
        self.waiting = [rows[:, stop:]] if stop < rows.shape[1] else []


class Listener:
    """A recorder of every module. `dense`: modules whose weights are to be kept, and how many keys they have."""

    def __init__(self, probing: bool = False, dense: dict[str, int] | None = None) -> None:
        self.probing, self.dense = probing, dense or {}
        self.heard: dict[str, Heard] = {}

    def begin(self, call: Call) -> None:
        if call.name not in self.heard:
            self.heard[call.name] = Heard(call, self.dense.get(call.name))
        self.heard[call.name].begin(call)

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        self.heard[call.name].rows(call, start, weights)

    def end(self, call: Call, out: Tensor) -> Tensor:
        return self.heard[call.name].end(out, self.probing)

    @property
    def unexplained(self) -> dict[str, int]:
        """Modules that do something else, and how many keys they have."""
        return {name: heard.keys for name, heard in self.heard.items() if not heard.explained}


class Prober:
    """Adds a zero to the output of every module, the same for all rows of a batch: its gradient is theirs in sum."""

    def __init__(self) -> None:
        self.probes: dict[str, Tensor] = {}

    def begin(self, call: Call) -> None:
        """Leaves the call as it is."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Keeps no weights."""

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output with the zero [1,T,H,V] added."""
        probe = torch.zeros_like(out[:1], requires_grad=True)
        self.probes[call.name] = probe
        return out + probe


def _bias(call: Call) -> Float[Tensor, "H T S"] | None:
    """What the call adds to its scores, besides hiding some."""
    added: Any = call.kwargs.get("position_bias")
    total: Tensor | None = None if added is None else added[0].detach().float().cpu()
    if call.mask is not None and call.mask.dtype != torch.bool:
        numbers = call.mask[0].detach().float().cpu()[..., : call.k.shape[2]]
        numbers = numbers.masked_fill(numbers < torch.finfo(call.mask.dtype).min / 2, 0)
        if bool((numbers != 0).any()):
            total = numbers if total is None else total + numbers
    if total is None:
        return None
    return total.expand(call.q.shape[1], call.q.shape[2], call.k.shape[2])


def _plain(x: Tensor) -> Tensor:
    """The first row of a batch as float32 on the CPU, for itself."""
    return x[0].detach().float().cpu().contiguous()
