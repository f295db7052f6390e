"""Capturing the attention of a Hugging Face model: what is kept of each module, and whether it explains the weights.

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
from regard.lens.recording.mechanism_formulas import TILE, first_row
from regard.lens.trace.arrays import pack
from regard.lens.trace.formulas import Dense, SoftmaxFormula
from regard.lens.trace.rules import infer_rules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Attended


class ModuleCapture:
    """All calls of one attention module: one for a whole text, one a step while it generates.

    `columns` is given where the weights themselves are to be kept: how many keys there will be.
    """

    def __init__(self, call: Call, columns: int | None) -> None:
        heads = call.q.shape[1]
        self.name = call.name
        self.cross = call.cross
        self.formula = SoftmaxFormula(call.scaling, call.kwargs.get("softcap"))
        self.q: list[Tensor] = []
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.n: list[Tensor] = []
        self.masks: list[tuple[int, Tensor | None, int]] = []  # first column, mask of the columns from there, rows
        self.offsets: dict[int, Tensor] = {}  # bias [H] of each distance j − i
        self.explained = True
        self.columns = columns
        self.unpacked_rows: list[Tensor] = []  # weights that do not fill a tile yet
        self.tiles: list[list[bytes]] = [[] for _ in range(heads)]
        self.rounding_error = torch.zeros(heads)
        self.probe: Tensor | None = None  # a zero added to the output; then its gradient
        self.bias: Tensor | None = None  # of the current call
        self.queries = 0  # seen so far
        self.keys = 0
        self.start = 0  # the first query of the current call
        self.first = 0  # the first key of the current call
        self.tolerance = max(1e-5, 2 * torch.finfo(call.q.dtype).eps)

    def begin(self, call: Call) -> None:
        """Keeps the queries of a call, and the keys and values that are new in it."""
        T = call.q.shape[2]
        S = call.k.shape[2]
        new = T
        if not self.k:
            new = S
        elif self.cross:  # written once, read at every step
            new = 0
        self.start = self.queries
        self.queries += T
        self.keys += new
        self.first = 0
        if not self.cross:  # a cache may have let go of the first keys
            self.first = self.keys - S
        self.q.append(first_row(call.q))
        if new:
            self.k.append(first_row(call.k[:, :, S - new :]))
            self.v.append(first_row(call.v[:, :, S - new :]))
        self.masks.append((self.first, call.allowed, T))
        self.bias = _added_bias(call)
        if self.bias is not None:
            self._add_offsets(self.bias)

    def rows(self, call: Call, start: int, weights: Float[Tensor, "H R S"]) -> None:
        """Compares some rows with what they should be, and keeps their normalisers [H,R]."""
        weights = weights.float().cpu()
        R = weights.shape[1]
        if self.columns is not None:
            self._add_weights(weights)
            return
        q = call.q[0, :, start : start + R].detach().float().cpu()
        k = call.k[0].detach().float().cpu()
        scores = self.formula.scores(q, k.repeat_interleave(len(q) // len(k), 0))
        if self.bias is not None:
            scores = scores + self._biases(self.start + start, R, scores.shape[2])
        seen = call.allowed
        if seen is not None:
            scores = scores.masked_fill(~seen[start : start + R].cpu(), float("-inf"))
        n = scores.logsumexp(-1)
        blind = n == float("-inf")
        if not self._agree(scores, n, weights, blind):
            # A sink takes a share that the row lacks: the normaliser shows in any single weight.
            largest = weights.max(-1)
            n = scores.gather(2, largest.indices[..., None])[..., 0] - largest.values.log()
            n = n.masked_fill(blind, float("-inf"))
            self.explained &= self._agree(scores, n, weights, blind)
        self.n.append(n)

    def end(self, out: Tensor, probing: bool) -> Tensor:
        """Returns the output of a call, with a zero added whose gradient is that of the output where `probing`."""
        self.bias = None
        if not probing:
            return out
        self.probe = torch.zeros_like(out, requires_grad=True)
        return out + self.probe

    def attended(self, layer: int, side: str, queries: int, keys: int, sequences: list[Tokens]) -> Attended:
        """Returns what was captured as a trace keeps it; `queries` and `keys` are numbers of sequences."""
        q, k, v = (torch.cat(parts, 1) for parts in (self.q, self.k, self.v))
        attended = Attended(
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
            infer_rules(self._visible_cells(), sequences[queries], sequences[keys], self.cross),
            q=q,
            k=k,
            v=v,
        )
        if self.columns is not None:
            self._pack_rows()
            attended.formula = Dense(TILE, self.tiles)
            attended.error = self.rounding_error.tolist()
        else:
            attended.n = torch.cat(self.n, 1)
            if any(bool((x != 0).any()) for x in self.offsets.values()):
                zero = torch.zeros(q.shape[0])
                distances = range(1 - len(sequences[queries]), len(sequences[keys]))
                attended.offsets = torch.stack([self.offsets.get(d, zero) for d in distances], 1)
        if self.probe is not None:
            attended.g = self.probe[0].detach().float().cpu().transpose(0, 1).contiguous()
        return attended

    def _agree(self, scores: Tensor, n: Tensor, weights: Tensor, blind: Tensor) -> bool:
        """Returns whether exp(scores − n) are the weights, in all rows [H,R] that see something."""
        computed = torch.exp(scores - n.masked_fill(blind, 0)[..., None])
        return bool(((computed - weights).abs().amax(-1).masked_fill(blind, 0) <= self.tolerance).all())

    def _add_offsets(self, bias: Float[Tensor, "H T S"]) -> None:
        """Keeps the bias of each distance, from the first row and the first column of a call."""
        shift = self.first - self.start  # columns and rows of this call begin elsewhere in the whole
        # Cloned, so that the matrix they are views of can be freed.
        for j, offset in enumerate(bias[:, 0].T.clone()):
            self.offsets.setdefault(j + shift, offset)
        for i, offset in enumerate(bias[:, :, 0].T.clone()):
            self.offsets.setdefault(shift - i, offset)

    def _biases(self, start: int, R: int, S: int) -> Float[Tensor, "H R S"]:
        """Returns the bias of R queries from `start` on, looked up by distance."""
        lowest = self.first - (start + R - 1)
        zero = torch.zeros_like(next(iter(self.offsets.values())))
        by_distance = torch.stack([self.offsets.get(d, zero) for d in range(lowest, self.first + S - start)], 1)
        column = torch.arange(S)[None] + self.first
        row = (start + torch.arange(R))[:, None]
        return by_distance[:, column - row - lowest]

    def _visible_cells(self) -> Bool[Tensor, "T S"] | None:
        """Returns which cells may be seen over all calls; None where no call had a mask."""
        if all(mask is None for _, mask, _ in self.masks):
            return None
        first, mask, _ = self.masks[0]
        if len(self.masks) == 1 and mask is not None and first == 0:
            return mask.cpu()
        parts = []
        for first, mask, T in self.masks:
            rows = torch.zeros(T, self.keys, dtype=torch.bool)
            if mask is None:
                rows[:, first:] = True
            else:
                rows[:, first : first + mask.shape[1]] = mask.cpu()
            parts.append(rows)
        return torch.cat(parts)

    def _add_weights(self, weights: Float[Tensor, "H R S"]) -> None:
        """Keeps weights themselves, and packs them as soon as they fill a tile."""
        assert self.columns is not None
        whole = torch.zeros(*weights.shape[:2], self.columns)
        whole[..., self.first : self.first + weights.shape[2]] = weights
        self.unpacked_rows.append(whole)
        if sum(x.shape[1] for x in self.unpacked_rows) >= TILE:
            self._pack_rows(full_tiles_only=True)

    def _pack_rows(self, full_tiles_only: bool = False) -> None:
        if not self.unpacked_rows:
            return
        rows = torch.cat(self.unpacked_rows, 1)
        stop = rows.shape[1]
        if full_tiles_only:
            stop = stop // TILE * TILE
        for part in rows[:, :stop].split(TILE, 1):
            error = (part - part.half().float()).abs().amax((1, 2))
            self.rounding_error = torch.maximum(self.rounding_error, error)
            for tiles, head in zip(self.tiles, part, strict=True):
                tiles.append(pack(head, "f16"))
        self.unpacked_rows = []
        if stop < rows.shape[1]:
            self.unpacked_rows.append(rows[:, stop:])


class ModelCapture:
    """Captures every attention module of a model, as a recorder of `recording_attention`.

    `dense`: names of modules whose weights are to be kept, and how many keys they have.
    """

    def __init__(self, probing: bool = False, dense: dict[str, int] | None = None) -> None:
        self.probing = probing
        self.dense = dense or {}
        self.modules: dict[str, ModuleCapture] = {}

    def begin(self, call: Call) -> None:
        """Keeps what goes into a call."""
        if call.name not in self.modules:
            self.modules[call.name] = ModuleCapture(call, self.dense.get(call.name))
        self.modules[call.name].begin(call)

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Keeps or checks the weights [H,R,S] of some queries."""
        self.modules[call.name].rows(call, start, weights)

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output, which may have got a probe."""
        return self.modules[call.name].end(out, self.probing)

    @property
    def unexplained(self) -> dict[str, int]:
        """Modules that do something else than their formula says, and how many keys they have."""
        return {name: module.keys for name, module in self.modules.items() if not module.explained}


class OutputProbe:
    """A recorder that adds a zero to the output of every module, the same for all rows of a batch.

    The gradient of the zero is that of the outputs, summed over the rows.
    """

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


def _added_bias(call: Call) -> Float[Tensor, "H T S"] | None:
    """Returns what the call adds to its scores, besides hiding some; None for nothing."""
    total: Tensor | None = None
    position_bias: Any = call.kwargs.get("position_bias")
    if position_bias is not None:
        total = position_bias[0].detach().float().cpu()
    if call.mask is not None and call.mask.dtype != torch.bool:
        numbers = call.mask[0].detach().float().cpu()[..., : call.k.shape[2]]
        # What is hidden has the lowest number there is, or twice that where two masks were added.
        numbers = numbers.masked_fill(numbers < torch.finfo(call.mask.dtype).min / 2, 0)
        if bool((numbers != 0).any()):
            total = numbers if total is None else total + numbers
    if total is None:
        return None
    return total.expand(call.q.shape[1], call.q.shape[2], call.k.shape[2])
