"""The attention layer: project, position, attend, merge, project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.errors import OptionError, ShapeError
from regard.kernels.dropout import dropout
from regard.mechanisms import Cost, Face, Mechanism, State, fitted
from regard.nn.merges import MERGES, LooksAheadError
from regard.nn.norms import NORMS
from regard.nn.positions import Rotation, rotate
from regard.nn.projection import Projection
from regard.shapes import Mask, Size

Tokens = Float[Tensor, "B T D"]
Seen = Bool[Tensor, "B T"] | None


class Attention(nn.Module):
    """Attention over tokens x [B,T,D] with H query heads and G key/value heads, by any mechanism.

    `mechanism` is a name with its `options`, or one already built. `source` is the width of another sequence to attend
    to (cross-attention); without it the layer attends to its own tokens. `rules` holds window, slopes and softcap.
    `bias`: of queries, keys and values; `out_bias`: of the output, as `bias` unless said. `qk_norm` names a norm that
    each head's queries and keys go through before they are positioned. `dropout` is that of the attention,
    `residual_dropout` that of the output. Outputs at invisible tokens are zero.
    """

    def __init__(
        self,
        D: int,
        H: int,
        *,
        G: int | None = None,
        K: int | None = None,
        V: int | None = None,
        mechanism: str | Mechanism = "softmax",
        causal: bool = True,
        source: int | None = None,
        length: int = 1024,
        merge: str = "concatenate",
        merge_options: Mapping[str, Any] | None = None,
        rules: Mask = Mask(),
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: str | None = None,
        eps: float = 1e-5,
        dropout: float = 0.0,
        residual_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        G = H if G is None else G
        _check(D, H, G, K)
        K = D // H if K is None else K
        V = K if V is None else V
        self.size = Size(T=length, S=length, H=H, G=G, K=K, V=V, causal=causal and source is None)
        self.width, self.source, self.rules = D, source, rules
        self.residual_dropout = residual_dropout
        self.mechanism = _mechanism(mechanism, self.size, options)
        self.mechanism.dropout = dropout or self.mechanism.dropout
        if source is not None and not self.mechanism.crosses:
            raise OptionError(
                f"{self.mechanism.name} has no cross-attention: its scores belong to positions of one sequence. "
                "Use 'softmax' or a linear mechanism there."
            )
        sizes = {"q": (H, K), "k": (G, K), "v": (G, V)}
        self.needs = self.mechanism.needs
        self.heads = [sizes[n][0] for n in self.needs]
        self.widths = [sizes[n][0] * sizes[n][1] for n in self.needs]
        own, other = (self.widths, []) if source is None else (self.widths[:1], self.widths[1:])
        self.project = Projection(D, sum(own), bias=bias)
        self.project_source = Projection(source, sum(other), bias=bias) if source is not None else None
        self.query_norm, self.key_norm = (_norm(qk_norm, K, eps, self.mechanism) for _ in "qk")
        self.merge = MERGES.build(merge, {}, **(merge_options or {}))
        self.out = Projection(H * V, D, bias=bias if out_bias is None else out_bias)

    def forward(
        self,
        x: Tokens,
        visible: Seen = None,
        *,
        source: Float[Tensor, "B S E"] | None = None,
        source_visible: Bool[Tensor, "B S"] | None = None,
        rotation: Rotation | None = None,
    ) -> Tokens:
        """A whole sequence; with `source`, attention to that other sequence."""
        self._check_source(source is not None)
        x = _zeroed(x, visible)
        if source is None:
            q, k, v = self._own(x, rotation)
            mask = self.rules.but(causal=self.size.causal, visible=visible)
        else:
            q, (k, v) = self._queries(x), self._keys(source)
            mask = self.rules.but(visible=source_visible)
        return self._output(self.mechanism(q, k, v, mask), visible)

    def empty(
        self, B: int, capacity: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> State:
        """A state that has seen nothing, with room for `capacity` tokens before it has to grow."""
        if self.source is None and not self.size.causal:
            raise LooksAheadError(
                "attention that is not causal looks ahead and has no state; build it with causal=True"
            )
        self.merge.check_state()
        like = self.out.weight
        size = Size(
            B=B,
            S=capacity,
            H=self.size.H,
            G=self.size.G,
            K=self.size.K,
            V=self.size.V,
            dtype=like.dtype if dtype is None else dtype,
            device=like.device if device is None else device,
        )
        return self.mechanism.empty(size, self.rules)

    def extend(
        self, x: Tokens, state: State, visible: Seen = None, *, rotation: Rotation | None = None
    ) -> tuple[Tokens, State]:
        """Causal continuation by T tokens. The state handed in is used up."""
        self._check_source(False)
        q, k, v = self._own(_zeroed(x, visible), rotation)
        out, state = self.mechanism.extend(q, k, v, state, visible)
        return self._output(out, visible), state

    def write(self, state: State, source: Float[Tensor, "B S E"], visible: Bool[Tensor, "B S"] | None = None) -> State:
        """Cross-attention: writes another sequence once …"""
        self._check_source(True)
        return self.mechanism.write(state, *self._keys(_zeroed(source, visible)), visible)

    def read(self, x: Tokens, state: State, visible: Seen = None) -> Tokens:
        """… and reads it, as often as there are new tokens."""
        self._check_source(True)
        return self._output(self.mechanism.read(self._queries(_zeroed(x, visible)), state), visible)

    def cost(self, T: int, S: int, face: Face = "parallel", B: int = 1) -> Cost:
        """Declared cost with its projections. Recurrent: T new tokens, S in all; or T that read S already written."""
        crossing, size = self.source is not None, self._sized(T, S, B)
        if crossing and face == "recurrent":  # reading only: cross-attention less the writing, which T = 0 leaves
            cost, written = (self.mechanism.cost(replace(size, T=t), "parallel") for t in (T, 0))
            cost = replace(
                cost,
                matmul=cost.matmul - written.matmul,
                useful=cost.useful - written.useful,
                elementwise=cost.elementwise - written.elementwise,
                bytes=cost.bytes - written.bytes + cost.state,
            )
            return cost + self._projected(T, 0, B)
        cost = self.mechanism.cost(replace(size, causal=size.causal or face == "recurrent"), face)
        if face == "recurrent":  # new keys and values are written, and then read with all others
            cost = replace(cost, bytes=cost.bytes + size.e * B * T * sum(self.widths["q" in self.needs :]))
        return cost + self._projected(T, S if crossing else 0, B)

    def gradient_cost(self, T: int, S: int, B: int = 1) -> Cost:
        """What the gradients of a whole sequence cost beside it: two products for each projection, and the mechanism's
        own."""
        own, size = self._projected(T, S if self.source is not None else 0, B), self._sized(T, S, B)
        doubled = Cost(2 * own.matmul, 2 * own.useful, 2 * own.elementwise, 2 * own.bytes, 0)
        return doubled + self.mechanism.gradient_cost(size)

    def _sized(self, T: int, S: int, B: int) -> Size:
        own = self.size
        return Size(B, T, S, own.H, own.G, own.K, own.V, own.causal, self.out.weight.dtype)

    def _projected(self, T: int, S: int, B: int) -> Cost:
        """Cost of projecting T tokens, and S of another sequence: weights and inputs read, outputs written. What lies
        between projection and mechanism is counted with the mechanism."""
        parts = [(self.project, T), (self.out, T)] + ([(self.project_source, S)] if S else [])
        flops = sum(2 * B * n * part.weight.numel() for part, n in parts if part is not None)
        weights = sum(x.numel() for part, _ in parts if part is not None for x in part.parameters())
        e = self.out.weight.dtype.itemsize
        return Cost(flops, flops, 0, e * (weights + B * (2 * T * self.width + S * (self.source or 0))), 0)

    def extra_repr(self) -> str:
        s = self.size
        return f"D={self.width}, H={s.H}, G={s.G}, K={s.K}, V={s.V}, causal={s.causal}"

    def _own(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor | None, Tensor | None, Tensor]:
        *others, v = map(_split, self.project(x).split_with_sizes(self.widths, -1), self.heads)
        if self.query_norm is not None and self.key_norm is not None:
            others = [norm(x) for norm, x in zip((self.query_norm, self.key_norm), others, strict=True)]
        if rotation is not None:
            others = [rotate(x, rotation) for x in others]
        q, k = [*others, None, None][:2]
        return q, k, v

    def _queries(self, x: Tensor) -> Tensor:
        q = _split(self.project(x), self.size.H)
        return q if self.query_norm is None else self.query_norm(q)

    def _keys(self, source: Tensor) -> tuple[Tensor, Tensor]:
        assert self.project_source is not None
        k, v = self.project_source(source).split(self.widths[1:], -1)
        k, v = _split(k, self.size.G), _split(v, self.size.G)
        return k if self.key_norm is None else self.key_norm(k), v

    def _output(self, heads: Tensor, visible: Tensor | None) -> Tensor:
        out: Tensor = self.out(self.merge(heads, visible))
        if self.training and self.residual_dropout:
            out = dropout(out, self.residual_dropout)
        return _zeroed(out, visible)

    def _check_source(self, crossing: bool) -> None:
        if crossing and self.source is None:
            raise ShapeError(
                "this layer attends to its own tokens; build it with source=<width of the other sequence> to cross"
            )
        if not crossing and self.source is not None:
            raise ShapeError("this layer attends to another sequence: give it (source=…), or write it once and read it")


def _mechanism(mechanism: str | Mechanism, size: Size, options: Mapping[str, Any]) -> Mechanism:
    if isinstance(mechanism, str):
        return fitted(mechanism, size, **options)
    if options:
        raise OptionError(
            f"options {', '.join(options)} were given beside a mechanism already built; build it with them"
        )
    return mechanism


def _norm(name: str | None, K: int, eps: float, mechanism: Mechanism) -> nn.Module | None:
    """The norm of each head's queries or keys."""
    if name is not None and mechanism.needs != "qkv":
        raise OptionError(f"{mechanism.name} has no queries and keys of its own, so qk_norm has nothing to act on")
    return None if name is None else NORMS.build(name, {"D": K, "eps": eps})


def _check(D: int, H: int, G: int, K: int | None) -> None:
    if min(D, H, G) < 1:
        raise OptionError(f"width {D}, {H} query heads, {G} key/value heads: each must be at least 1")
    if K is None and D % H:
        raise OptionError(f"width {D} does not divide into {H} heads; choose another number of heads, or say K and V")
    if H % G:
        raise OptionError(f"{G} key/value heads do not divide {H} query heads")


def _split(x: Tensor, heads: int) -> Tensor:
    """[B,T,heads·width] → [B,heads,T,width]."""
    B, T, width = x.shape
    if T == 1:  # a decoding step: the same memory, in one call
        return x.view(B, heads, 1, width // heads)
    return x.view(B, T, heads, width // heads).transpose(1, 2)


def _zeroed(x: Tensor, visible: Tensor | None) -> Tensor:
    return x if visible is None else x.masked_fill(~visible[..., None], 0)
