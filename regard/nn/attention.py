"""The attention layer: project, position, attend, merge, project; and the optional steps of recent models between.

q, k, v = convolution(project(x))    q, k = rotate(norm(q)), rotate(norm(k))    a, b = gates(x) out =
project(merge(head_norm(attend(q, k, v; a, b) + skip ∘ v) ∘ f(gate(x))))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.kernels.dropout import dropout
from regard.mechanisms import Cost, Face, Mechanism, State
from regard.mechanisms.foreign import refuse_foreign, refuse_others
from regard.mechanisms.recurrence import repeat_shared
from regard.nn.building import (
    build_convolution,
    build_mechanism,
    build_norm,
    build_skip,
    check_direction,
    check_heads,
    check_key_heads,
    check_mechanism,
)
from regard.nn.convolution import ACTIVATIONS, ConvolvedState
from regard.nn.gates import Gates
from regard.nn.layer_costs import layer_cost, layer_gradient_cost
from regard.nn.merges import MERGES, LooksAheadError
from regard.nn.norms import NORMS
from regard.nn.positions import Positions, Rotation, rotate
from regard.nn.projection import Projection
from regard.nn.torch_attention import from_torch, project_separately, to_torch
from regard.shapes import Mask, Size, check_visible

Tokens = Float[Tensor, "B T D"]
Seen = Bool[Tensor, "B T"] | None


class Attention(nn.Module):
    """Attention over tokens x [B,T,D] with H query heads and G key/value heads, by any mechanism.

    `causal`, which self-attention requires: whether each token sees only itself and those before it. `mechanism` is a
    name with its `options`, or one already built. `source` is the width of another sequence to attend to
    (cross-attention); without it the layer attends to its own tokens. `rules` is a Mask with the rules of every call:
    window, slopes, softcap. `bias` is whether queries, keys and values have one, `out_bias` whether the output has;
    None means as `bias`. `qk_norm` names a norm that each head's queries and keys go through before they are rotated:
    one of `NORMS`, or "l2", which makes their length 1 and is the default of mechanisms that erase. `positions` is
    whether rotary positions and ALiBi apply to this layer. `decay` names how the decay a is computed for a mechanism
    that takes one (see `regard.nn.gates`). `convolution` is the width of a short causal convolution over queries, keys
    and values of self-attention (0: none), with `convolution_options` (activation, bias). `out_norm` names the norm of
    each head's output, and `gate` the activation of an output gate, which is computed from x and multiplies the output
    of the norm. With `joint` the gate comes first, and the norm is one over all heads side by side. `skip` adds each
    head's values to its outputs, times one learned number for each head. `key_heads` is the number of heads of queries
    and keys if it is less than that of values, for a mechanism with a memory for each value head. `dropout` acts on the
    attention weights, `residual_dropout` on the output. Outputs at invisible tokens are zero.
    """

    def __init__(
        self,
        D: int,
        H: int,
        *,
        G: int | None = None,
        key_heads: int | None = None,
        K: int | None = None,
        V: int | None = None,
        mechanism: str | Mechanism = "softmax",
        causal: bool | None = None,
        source: int | None = None,
        length: int = 1024,
        merge: str = "concatenate",
        merge_options: Mapping[str, Any] | None = None,
        rules: Mask = Mask(),
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: str | None = None,
        positions: bool = True,
        decay: str = "softplus",
        decay_options: Mapping[str, Any] | None = None,
        convolution: int = 0,
        convolution_options: Mapping[str, Any] | None = None,
        out_norm: str | None = None,
        gate: str | None = None,
        joint: bool = False,
        skip: bool = False,
        eps: float = 1e-5,
        dropout: float = 0.0,
        residual_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_foreign(options, "regard.nn.Attention")
        check_direction(causal, source)
        if G is None:
            G = H
        check_heads(D, H, G, K)
        if K is None:
            K = D // H
        if V is None:
            V = K
        if out_bias is None:
            out_bias = bias
        self.size = Size(T=length, S=length, H=H, G=G, K=K, V=V, causal=bool(causal) and source is None)
        self.width = D
        self.source = source
        self.residual_dropout = residual_dropout
        self._rules = rules
        # In a tuple, so that it is no submodule: the stack owns it, and all of its layers share it.
        self._positions: tuple[Positions, ...] = ()
        self.mechanism = build_mechanism(mechanism, self.size, options)
        self.mechanism.dropout = dropout or self.mechanism.dropout
        check_mechanism(self.mechanism, causal, source)
        check_key_heads(key_heads, H, G, self.mechanism)
        self._build_projections(key_heads, bias)
        self.gates: Gates | None = None
        if self.needs != self.mechanism.needs:
            self.gates = Gates(D, G, K, self.mechanism, decay, decay_options)
        bounded = self.gates is not None and self.gates.keeps_ranges
        if getattr(self.mechanism, "erases", False):
            qk_norm = qk_norm or "l2"  # with longer keys more would be erased than is stored, and the memory would grow
            bounded = bounded and qk_norm == "l2"
        if bounded and isinstance(mechanism, str) and "checks" not in options:
            setattr(self.mechanism, "checks", False)  # noqa: B010  # the check waits for the GPU at each layer
        self.query_norm = build_norm(qk_norm, K, eps, self.mechanism)
        self.key_norm = build_norm(qk_norm, K, eps, self.mechanism)
        self.positions = positions
        self.convolution = build_convolution(convolution, sum(self.widths), source, convolution_options or {})
        self.joint = joint
        self.head_norm: nn.Module | None = None
        if out_norm is not None:
            self.head_norm = NORMS.build(out_norm, {"D": H * V if joint else V, "eps": eps})
        self.gate: Projection | None = None
        if gate is not None:
            self.gate = Projection(D, H * V, bias=bias)
            self.gate_activation = ACTIVATIONS.find(gate)
        self.skip: nn.Parameter | None = None
        if skip:
            self.skip = build_skip(H, source)
        self.merge = MERGES.build(merge, {}, **(merge_options or {}))
        self.out = Projection(H * V, D, bias=out_bias)

    def _build_projections(self, key_heads: int | None, bias: bool) -> None:
        """Builds the projections to those of queries, keys and values that the mechanism needs."""
        size = self.size
        sizes = {"q": (key_heads or size.H, size.K), "k": (key_heads or size.G, size.K), "v": (size.G, size.V)}
        self.needs = self.mechanism.needs.rstrip("ab")  # `Gates` computes a and b
        self.heads = [sizes[n][0] for n in self.needs]
        self.widths = [sizes[n][0] * sizes[n][1] for n in self.needs]
        self.project_source: Projection | None = None
        if self.source is None:
            self.project = Projection(self.width, sum(self.widths), bias=bias)
        else:
            self.project = Projection(self.width, self.widths[0], bias=bias)
            self.project_source = Projection(self.source, sum(self.widths[1:]), bias=bias)

    @property
    def rules(self) -> Mask:
        """Returns the mask rules of every call: the layer's own, and what positions add to the scores."""
        rules = self._rules
        for positions in self._positions:
            rules = positions.bias(rules)
        return rules

    @property
    def reach(self) -> int | None:
        """Returns how many tokens, itself included, a token's output may depend on; None: all before it."""
        window = self.rules.window
        if window is None or self.convolution is None:
            return window
        return window + self.convolution.width - 1  # the convolution makes the oldest key from earlier tokens, too

    def use_positions(self, positions: Positions) -> None:
        """Adds the bias of these positions, if they have one, to the scores of self-attention."""
        if self.source is None and self.positions:
            self._positions = (positions,)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, causal: bool = False) -> Attention:
        """Returns a layer that computes what PyTorch's does, with a copy of its weights.

        PyTorch's takes a causal mask at each call; here `causal` holds for all calls. The batch always comes first
        here, whatever `batch_first` is. A layer whose kdim = vdim differs from its width becomes cross-attention.
        """
        return from_torch(cls, module, causal)

    def to_torch(self, batch_first: bool = True) -> nn.MultiheadAttention:
        """Returns a `torch.nn.MultiheadAttention` that computes what this layer does, with a copy of its weights.

        If this layer is causal, pass `attn_mask` and `is_causal` at each call of the other. Raises an OptionError that
        names what PyTorch's layer does not have, such as grouped heads or another mechanism.
        """
        return to_torch(self, batch_first)

    def forward(
        self,
        x: Tokens,
        visible: Seen | Float[Tensor, "B S E"] = None,
        value: Float[Tensor, "B S E"] | None = None,
        *,
        key: Float[Tensor, "B S E"] | None = None,
        source: Float[Tensor, "B S E"] | None = None,
        source_visible: Bool[Tensor, "B S"] | None = None,
        rotation: Rotation | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        need_weights: bool = False,
        **others: Any,
    ) -> Any:
        """Returns the outputs of a whole sequence, [B,T,D]; with `source`, of attention to that other sequence.

        `visible` [B,T] says which tokens may be seen. `documents` numbers the documents that are packed into a row: a
        change of number starts a new one, and nothing is seen across. Queries, keys and values of different sequences
        are passed as in PyTorch, `layer(query, key, value)`, or by name: `source_visible` [B,S] then says which keys
        may be seen, and causal queries are the last of the keys. `need_weights`: also returns the weights [B,H,T,S] of
        each head.
        """
        refuse_others(others, "this layer")
        if value is not None and key is None:
            key, visible = visible, None
        if key is not None:
            q, k, v, mask = project_separately(self, x, key, value, source_visible)
            return self._attend(q, k, v, mask, x, None, need_weights)
        self._check_source(source is not None)
        self._check_tokens(x)
        x = _zero_hidden(x, visible)
        if source is None:
            mask = self.rules.but(causal=self.size.causal, visible=visible)
            if documents is not None:
                self.merge.check_documents()
                mask = mask.but(documents=documents)
            q, k, v = self._project_tokens(x, rotation, mask)
        else:
            q = self._project_queries(x)
            k, v = self._project_source(source)
            mask = self.rules.but(visible=source_visible)
        return self._attend(q, k, v, mask, x, visible, need_weights)

    def empty(
        self, B: int, capacity: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> State:
        """Returns a state without tokens, with room for `capacity` tokens before it has to grow."""
        if self.source is None and not self.size.causal:
            raise LooksAheadError(
                "attention that is not causal looks ahead and has no state; build it with causal=True"
            )
        self.merge.check_state()
        if dtype is None:
            dtype = self.out.weight.dtype
        if device is None:
            device = self.out.weight.device
        size = Size(
            B=B,
            S=capacity,
            H=self.size.H,
            G=self.size.G,
            K=self.size.K,
            V=self.size.V,
            dtype=dtype,
            device=device,
        )
        state = self.mechanism.empty(size, self.rules)
        if self.convolution is None:
            return state
        return ConvolvedState(state, self.convolution.empty(B, dtype, device))

    def extend(
        self, x: Tokens, state: State, visible: Seen = None, *, rotation: Rotation | None = None
    ) -> tuple[Tokens, State]:
        """Returns the outputs [B,T,D] of the T tokens that come next, and the state after them.

        The given state must not be used again, as its memory may be overwritten.
        """
        self._check_source(False)
        self._check_tokens(x)
        x = _zero_hidden(x, visible)
        projected = self.project(x)
        if self.convolution is None:
            q, k, v = self._split_projected(projected, rotation)
            out, state = self.mechanism.extend(q, k, v, state, visible, **self._make_gates(x))
        else:
            projected, before = self.convolution.extend(projected, state.before, visible)
            q, k, v = self._split_projected(projected, rotation)
            out, own = self.mechanism.extend(q, k, v, state.own, visible, **self._make_gates(x))
            state = ConvolvedState(own, before)
        return self._merge_heads(self._add_values(out, v), x, visible), state

    def write(self, state: State, source: Float[Tensor, "B S E"], visible: Bool[Tensor, "B S"] | None = None) -> State:
        """Returns the state with another sequence written into it, which `read` then attends to (cross-attention)."""
        self._check_source(True)
        return self.mechanism.write(state, *self._project_source(_zero_hidden(source, visible)), visible)

    def read(self, x: Tokens, state: State, visible: Seen = None) -> Tokens:
        """Returns the outputs [B,T,D] of tokens that attend to the written sequence, which stays for later calls."""
        self._check_source(True)
        x = _zero_hidden(x, visible)
        q = self._project_queries(x)
        return self._merge_heads(self.mechanism.read(q, state), x, visible)

    def cost(self, T: int, S: int, face: Face = "parallel", B: int = 1) -> Cost:
        """Returns the declared cost of one call, projections included.

        `face` "recurrent" counts T new tokens of S in all; for cross-attention, T tokens that read S written ones.
        """
        return layer_cost(self, T, S, face, B)

    def gradient_cost(self, T: int, S: int, B: int = 1) -> Cost:
        """Returns the cost of the backward pass over a whole sequence, without that of the forward pass."""
        return layer_gradient_cost(self, T, S, B)

    def extra_repr(self) -> str:
        s = self.size
        shown = f"D={self.width}, H={s.H}, G={s.G}, K={s.K}, V={s.V}, causal={s.causal}"
        rules = {name: getattr(self._rules, name) for name in ("window", "softcap")}
        options = {"source": self.source, "residual_dropout": self.residual_dropout or None, **rules}
        return ", ".join([shown, *(f"{name}={value}" for name, value in options.items() if value is not None)])

    def _project_tokens(
        self, x: Tensor, rotation: Rotation | None, mask: Mask = Mask()
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Returns q, k and v of a whole sequence of the layer's own tokens; see `_split_projected`."""
        projected = self.project(x)
        if self.convolution is not None:
            projected = self.convolution(projected, mask.visible, mask.document_ids())
        return self._split_projected(projected, rotation)

    def _split_projected(
        self, projected: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Returns q [B,H,T,K], k [B,G,T,K] and v [B,G,T,V] of the layer's own tokens; None for what is not needed.

        `projected` holds them side by side, [B,T,·].
        """
        parts = projected.split_with_sizes(self.widths, -1)
        *queries_keys, v = map(_split_heads, parts, self.heads)
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm, self.key_norm)
            queries_keys = [norm(x) for norm, x in zip(norms, queries_keys, strict=True)]
        if rotation is not None and self.positions:
            queries_keys = [rotate(x, rotation) for x in queries_keys]
        # Under autocast norms and rotations give float32, and a fused kernel takes one dtype for all three.
        q, k = [*(x.to(v.dtype) for x in queries_keys), None, None][:2]
        return q, k, v

    def _project_queries(self, x: Tensor) -> Tensor:
        """Returns the queries [B,H,T,K] of tokens that attend to another sequence."""
        q = _split_heads(self.project(x), self.size.H)
        if self.query_norm is not None:
            q = self.query_norm(q)
        return q

    def _project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys [B,G,S,K] and values [B,G,S,V] of another sequence."""
        assert self.project_source is not None
        parts = self.project_source(source).split(self.widths[1:], -1)
        k, v = (_split_heads(part, self.size.G) for part in parts)
        if self.key_norm is not None:
            k = self.key_norm(k)
        return k, v

    def _make_gates(self, x: Tensor) -> dict[str, Tensor]:
        """Returns those of a and b that the mechanism takes, computed from tokens x [B,T,D], by name."""
        if self.gates is None:
            return {}
        made: dict[str, Tensor] = self.gates(x)
        return made

    def _attend(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        mask: Mask,
        x: Tensor,
        visible: Tensor | None,
        need_weights: bool,
    ) -> Any:
        """Returns the outputs [B,T,D] of queries made of x, and with `need_weights` the weights [B,H,T,S] too."""
        gates = self._make_gates(x)
        heads = self._add_values(self.mechanism(q, k, v, mask, **gates), v)
        out = self._merge_heads(heads, x, visible)
        if not need_weights:
            return out
        q, k = repeat_shared(self.mechanism, q, k, v.shape[1])
        return out, self.mechanism.weights(q, k, mask, **gates)

    def _add_values(self, heads: Tensor, v: Tensor) -> Tensor:
        """Returns the outputs of heads [B,H,T,V] with the values v [B,G,T,V] of their tokens added, if any."""
        if self.skip is None:
            return heads
        # A value head serves the query heads that stand side by side.
        values = v.repeat_interleave(self.size.H // self.size.G, 1)
        return torch.addcmul(heads, values, self.skip.to(v.dtype)[:, None, None])

    def _merge_heads(self, heads: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
        """Returns the layer's outputs [B,T,D] from those of its heads [B,H,T,V] and, for the gate, its inputs x."""
        if self.head_norm is not None and not self.joint:
            heads = self.head_norm(heads)
        if self.gate is not None:
            heads = heads * self.gate_activation(_split_heads(self.gate(x), self.size.H))
        merged = self.merge(heads, visible)
        if self.head_norm is not None and self.joint:
            merged = self.head_norm(merged)
        out: Tensor = self.out(merged)
        if self.training and self.residual_dropout:
            out = dropout(out, self.residual_dropout)
        return _zero_hidden(out, visible)

    def _check_source(self, crossing: bool) -> None:
        if crossing and self.source is None:
            raise ShapeError(
                "this layer attends to its own tokens; build it with source=<width of the other sequence> to cross"
            )
        if not crossing and self.source is not None:
            raise ShapeError("this layer attends to another sequence: give it (source=…), or write it once and read it")

    def _check_tokens(self, x: Tensor) -> None:
        """Raises a ShapeError unless x is floating-point [B,T,D] with the layer's width D."""
        if x.dim() != 3 or x.shape[-1] != self.width or not x.is_floating_point():
            raise ShapeError(
                f"x is {x.dtype} {list(x.shape)}, expected vectors [B,T,D] with D = {self.width}, the layer's width"
            )


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Returns [B,heads,T,width] from [B,T,heads·width]."""
    B, T, width = x.shape
    if T == 1:  # a decoding step has the same memory layout either way, and one call is cheaper
        return x.view(B, heads, 1, width // heads)
    return x.view(B, T, heads, width // heads).transpose(1, 2)


def _zero_hidden(x: Tensor, visible: Tensor | None) -> Tensor:
    """Returns x [B,T,D] with zeros at invisible tokens, so that even NaN there changes nothing."""
    if visible is None:
        return x
    check_visible(visible)
    return x.masked_fill(~visible[..., None], 0)
