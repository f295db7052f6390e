"""Capturing the attention of a Hugging Face model, and checking that q, k, mask and bias reproduce its weights.

The weights that the model's attention function returns are compared, row by row, with those recomputed from q, k, the
mask and the bias of the call. If they agree, q, k, mask and bias are stored; otherwise the model computes something
that no formula of a trace describes, and the weights themselves are stored (dense).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.errors import OptionError
from regard.hub.attention import Call
from regard.hub.memories import MemoryCall
from regard.lens.recording.mechanism_formulas import TILE_ROWS, first_example
from regard.lens.recording.memories import MemoryCapture, tap_output
from regard.lens.recording.outputs import OutputProjections, head_matrices, value_lengths
from regard.lens.trace.arrays import pack
from regard.lens.trace.formulas import Dense, SoftmaxFormula
from regard.lens.trace.rules import infer_rules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import RecordedAttention


class ModuleCapture:
    """The calls of one attention module for one text: a single call, or one call per step of generation.

    `dense_keys`: the total number of keys, if the weights themselves are to be stored (dense); else None.
    """

    def __init__(self, call: Call, dense_keys: int | None) -> None:
        heads = call.q.shape[1]
        self.name = call.name
        self.cross = call.cross
        self.formula = SoftmaxFormula(call.scaling, call.kwargs.get("softcap"))
        self.q: list[Tensor] = []
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.n: list[Tensor] = []  # log-normalisers [H,R] of the rows
        # For each call: index of its first key in the whole sequence, its mask [T,S], and its number of queries T.
        self.masks: list[tuple[int, Tensor | None, int]] = []
        self.offsets: dict[int, Tensor] = {}  # bias [H] of each distance j − i
        self.explained = True  # whether q, k, mask and bias reproduced all weights so far
        self.dense_keys = dense_keys
        self.unpacked_rows: list[Tensor] = []  # dense weights that do not fill a tile yet
        self.tiles: list[list[bytes]] = [[] for _ in range(heads)]
        self.rounding_error = torch.zeros(heads)
        self.grad_tap: Tensor | None = None  # zeros added to the heads' outputs; they receive the gradient
        self.output_grad: Tensor | None = None  # gradient of the loss with respect to the heads' outputs
        self.projection: nn.Module | None = None  # the output projection of the heads, if it is recorded
        self.bias: Tensor | None = None  # bias of the current call
        self.queries = 0  # number of queries so far, over all calls
        self.keys = 0  # number of keys so far
        self.first_query = 0  # index of the current call's first query in the whole sequence
        self.first_key = 0  # index of the current call's first key in the whole sequence
        self.tolerance = max(1e-5, 2 * torch.finfo(call.q.dtype).eps)

    def begin(self, call: Call) -> None:
        """Starts a call: stores its queries, its new keys and values, its mask and its bias."""
        T = call.q.shape[2]
        S = call.k.shape[2]
        new = T
        if self.k and not self.cross and 1 < T == S:  # the keys of a step of generation include those before it
            raise OptionError(
                f"{self.name} is called more than once in a pass over the text: its layers share it (as in ALBERT), "
                "which a trace cannot show"
            )
        if not self.k:
            new = S
        elif self.cross:  # keys of cross-attention are the same at every step
            new = 0
        self.first_query = self.queries
        self.queries += T
        self.keys += new
        self.first_key = 0
        if not self.cross:  # a sliding cache may have dropped the first keys
            self.first_key = self.keys - S
        self.q.append(first_example(call.q))
        if new:
            self.k.append(first_example(call.k[:, :, S - new :]))
            self.v.append(first_example(call.v[:, :, S - new :]))
        self.masks.append((self.first_key, call.allowed, T))
        self.bias = _added_bias(call)
        if self.bias is not None:
            self._add_offsets(self.bias)

    def rows(self, call: Call, start: int, weights: Float[Tensor, "H R S"]) -> None:
        """Receives the weights of the queries from `start` on (callback of `AttentionRecorder`).

        Stores the weights if the module is dense; otherwise checks that q, k, mask and bias reproduce them, and stores
        the log-normalisers [H,R].
        """
        weights = weights.float().cpu()
        R = weights.shape[1]
        if self.dense_keys is not None:
            self._add_weights(weights)
            return
        allowed = self.masks[-1][1]
        if allowed is not None:
            allowed = allowed[start : start + R].cpu()
        reach = _reach(allowed, weights.shape[2])
        q = call.q[0, :, start : start + R].detach().float().cpu()
        k = call.k[0, :, :reach].detach().float().cpu()
        scores = self.formula.scores(q, k.repeat_interleave(len(q) // len(k), 0))
        if self.bias is not None:
            scores += self._biases(self.first_query + start, R, reach)
        if allowed is not None:
            scores.masked_fill_(~allowed[:, :reach], float("-inf"))
        n = scores.logsumexp(-1)
        fully_masked = n == float("-inf")
        if not self._reproduces(scores, n, weights, fully_masked):
            # With an attention sink a row sums to less than 1, so logsumexp is not its normaliser; the largest weight
            # gives the right one: n = score − log(weight).
            largest = weights[..., :reach].max(-1)
            n = scores.gather(2, largest.indices[..., None])[..., 0] - largest.values.log()
            n = n.masked_fill(fully_masked, float("-inf"))
            self.explained &= self._reproduces(scores, n, weights, fully_masked)
        self.n.append(n)

    def end(self, out: Tensor, tap_gradients: bool) -> Tensor:
        """Returns the heads' outputs of a call.

        If `tap_gradients`, zeros are added to them, and the gradient of these zeros is the gradient of the outputs.
        """
        self.bias = None
        self.grad_tap, out = tap_output(out, tap_gradients)
        return out

    def to_recorded(self, layer: int, side: str, queries: int, keys: int, sequences: list[Tokens]) -> RecordedAttention:
        """Returns the `RecordedAttention` of this module; `queries` and `keys` are indices into `sequences`."""
        q, k, v = (torch.cat(parts, 1) for parts in (self.q, self.k, self.v))
        attended = RecordedAttention(
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
            infer_rules(self._allowed_entries(), sequences[queries], sequences[keys], self.cross),
            q=q,
            k=k,
            v=v,
        )
        if self.dense_keys is not None:
            self._pack_rows()
            attended.formula = Dense(TILE_ROWS, self.tiles)
            attended.error = self.rounding_error.tolist()
        else:
            attended.n = torch.cat(self.n, 1)
            if any(bool((x != 0).any()) for x in self.offsets.values()):
                zero = torch.zeros(q.shape[0])
                distances = range(1 - len(sequences[queries]), len(sequences[keys]))
                attended.offsets = torch.stack([self.offsets.get(d, zero) for d in distances], 1)
        if self.output_grad is not None:
            attended.g = self.output_grad[0].detach().float().cpu().transpose(0, 1).contiguous()
        if self.projection is not None:
            attended.vo = value_lengths(v, head_matrices(self.projection, q.shape[0]))
        return attended

    def _reproduces(self, scores: Tensor, n: Tensor, weights: Tensor, fully_masked: Tensor) -> bool:
        """Returns whether exp(scores − n) equals the weights up to `tolerance`, in every row that is not fully masked.

        `fully_masked` [H,R] marks the rows that are. All keys without scores need weights of 0.
        """
        reach = scores.shape[2]
        # One copy of the scores, changed in place: these are passes over every cell of a text.
        apart = (scores - n.masked_fill(fully_masked, 0)[..., None]).exp_().sub_(weights[..., :reach]).abs_().amax(-1)
        if reach < weights.shape[2]:
            apart = torch.maximum(apart, weights[..., reach:].abs().amax(-1))
        return bool((apart.masked_fill(fully_masked, 0) <= self.tolerance).all())

    def _add_offsets(self, bias: Float[Tensor, "H T S"]) -> None:
        """Stores the bias of each distance j − i, taken from the first row and the first column of a call's bias.

        A bias that does not depend on j − i alone is not reproduced from these; the check in `rows` then fails, and the
        weights are stored dense.
        """
        shift = self.first_key - self.first_query  # distance j − i of the call's first query and first key
        # The offsets are cloned, because views would keep the whole bias in memory.
        for j, offset in enumerate(bias[:, 0].T.clone()):
            self.offsets.setdefault(j + shift, offset)
        for i, offset in enumerate(bias[:, :, 0].T.clone()):
            self.offsets.setdefault(shift - i, offset)

    def _biases(self, start: int, R: int, S: int) -> Float[Tensor, "H R S"]:
        """Returns the bias of R queries for the S keys of the current call, looked up by distance.

        `start` is the index of the first of these queries in the whole sequence.
        """
        lowest = self.first_key - (start + R - 1)
        zero = torch.zeros_like(next(iter(self.offsets.values())))
        by_distance = torch.stack([self.offsets.get(d, zero) for d in range(lowest, self.first_key + S - start)], 1)
        column = torch.arange(S)[None] + self.first_key
        row = (start + torch.arange(R))[:, None]
        return by_distance[:, column - row - lowest]

    def _allowed_entries(self) -> Bool[Tensor, "T S"] | None:
        """Returns the mask of all calls together, True for allowed entries; None if no call had a mask."""
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
        """Stores dense weights, and packs them as soon as they fill a tile."""
        assert self.dense_keys is not None
        whole = torch.zeros(*weights.shape[:2], self.dense_keys)
        whole[..., self.first_key : self.first_key + weights.shape[2]] = weights
        self.unpacked_rows.append(whole)
        if sum(x.shape[1] for x in self.unpacked_rows) >= TILE_ROWS:
            self._pack_rows(full_tiles_only=True)

    def _pack_rows(self, full_tiles_only: bool = False) -> None:
        if not self.unpacked_rows:
            return
        rows = torch.cat(self.unpacked_rows, 1)
        stop = rows.shape[1]
        if full_tiles_only:
            stop = stop // TILE_ROWS * TILE_ROWS
        for part in rows[:, :stop].split(TILE_ROWS, 1):
            error = (part - part.half().float()).abs().amax((1, 2))
            self.rounding_error = torch.maximum(self.rounding_error, error)
            for tiles, head in zip(self.tiles, part, strict=True):
                tiles.append(pack(head, "f16"))
        self.unpacked_rows = []
        if stop < rows.shape[1]:
            self.unpacked_rows.append(rows[:, stop:])


class ModelCapture:
    """Captures every attention module of a model; an `AttentionRecorder` for `recording_attention`.

    `dense`: for each module whose weights themselves are to be stored, its name and its number of keys.
    """

    def __init__(self, tap_gradients: bool = False, dense: dict[str, int] | None = None) -> None:
        self.tap_gradients = tap_gradients
        self.dense = dense or {}
        self.modules: dict[str, ModuleCapture | MemoryCapture] = {}
        self.projections = OutputProjections()

    def begin(self, call: Call) -> None:
        """Stores the inputs of a call."""
        if call.name not in self.modules:
            self.modules[call.name] = ModuleCapture(call, self.dense.get(call.name))
        self._module(call).begin(call)

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Passes the weights [H,R,S] of the queries from `start` on to their module, which checks or stores them."""
        self._module(call).rows(call, start, weights)

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the heads' outputs of the call, with zeros added to them if gradients are tapped."""
        out = self._module(call).end(out, self.tap_gradients)
        self.projections.expect(call.name, out)
        return out

    def keep_projections(self) -> None:
        """Gives each module the output projection that was found for it."""
        for name, projection in self.projections.found.items():
            module = self.modules[name]
            assert isinstance(module, ModuleCapture)
            module.projection = projection

    def memory(self, call: MemoryCall, out: Tensor) -> Tensor:
        """Stores a call of a layer with a memory; returns its output, with zeros added if gradients are tapped."""
        module = self.modules.setdefault(call.name, MemoryCapture(call))
        assert isinstance(module, MemoryCapture)
        return module.add(call, out, self.tap_gradients)

    def _module(self, call: Call) -> ModuleCapture:
        module = self.modules[call.name]
        assert isinstance(module, ModuleCapture)
        return module

    @property
    def unexplained(self) -> dict[str, int]:
        """The names of modules whose weights were not reproduced, and their numbers of keys."""
        return {name: module.keys for name, module in self.modules.items() if not module.explained}


class GradientTaps:
    """An `AttentionRecorder` that adds zeros to the heads' outputs, before the output projection, in every module.

    The gradient of the loss with respect to these zeros is that with respect to the heads' outputs, summed over the
    examples of a batch, because all examples share the zeros.
    """

    def __init__(self) -> None:
        self.taps: dict[str, Tensor] = {}

    def begin(self, call: Call) -> None:
        """Does nothing: the call is not changed."""

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Ignores the weights."""

    def memory(self, call: MemoryCall, out: Tensor) -> Tensor:
        """Returns the output of a layer with a memory with zeros [1,T,H,V] added."""
        return self.end(call, out)

    def end(self, call: Call | MemoryCall, out: Tensor) -> Tensor:
        """Returns the output with zeros [1,T,H,V] added."""
        tap = torch.zeros_like(out[:1], requires_grad=True)
        self.taps[call.name] = tap
        return out + tap


def _reach(allowed: Bool[Tensor, "R S"] | None, S: int) -> int:
    """Returns the number of keys up to the last one that any of these queries may see; S if they may see none."""
    if allowed is None:
        return S
    seen = allowed.any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else S


def _added_bias(call: Call) -> Float[Tensor, "H T S"] | None:
    """Returns the bias that the call adds to its scores; None if there is none.

    The bias is the sum of `position_bias` and of the numbers in an additive mask, in which masked entries count as 0.
    """
    total: Tensor | None = None
    position_bias: Any = call.kwargs.get("position_bias")
    if position_bias is not None:
        total = position_bias[0].detach().float().cpu()
    if call.mask is not None and call.mask.dtype != torch.bool:
        numbers = call.mask[0].detach().float().cpu()[..., : call.k.shape[2]]
        # Masked entries hold the lowest number of the dtype, or twice that (−inf) where two masks were added.
        numbers = numbers.masked_fill(numbers < torch.finfo(call.mask.dtype).min / 2, 0)
        if bool((numbers != 0).any()):
            total = numbers if total is None else total + numbers
    if total is None:
        return None
    return total.expand(call.q.shape[1], call.q.shape[2], call.k.shape[2])
