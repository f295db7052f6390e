"""The attention layer: project, position, attend, merge, project; and what today's models put between.

q, k, v = convolution(project(x))    q, k = turn(norm(q)), turn(norm(k))    a, b = gates(x)
out = project(merge(head_norm(attend(q, k, v; a, b) + skip ∘ v) ∘ f(gate(x))))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.errors import OptionError, ShapeError
from regard.kernels.dropout import dropout
from regard.mechanisms import Cost, Face, Mechanism, Recurrence, State, fitted
from regard.mechanisms.foreign import refuse_foreign
from regard.nn.convolution import ACTIVATIONS, ConvolvedState, ShortConvolution
from regard.nn.gates import Gates
from regard.nn.merges import MERGES, LooksAheadError
from regard.nn.norms import NORMS, UnitLength
from regard.nn.positions import Positions, Rotation, rotate
from regard.nn.projection import Projection
from regard.nn.torch_attention import from_torch, project_separately, to_torch
from regard.registry import call_with_options
from regard.shapes import Mask, Size

Tokens = Float[Tensor, "B T D"]
Seen = Bool[Tensor, "B T"] | None


class Attention(nn.Module):
    """Attention over tokens x [B,T,D] with H query heads and G key/value heads, by any mechanism.

    `causal`, which has to be said of self-attention: whether each token sees only itself and those before it.
    `mechanism` is a name with its `options`, or one already built. `source` is the width of another sequence to attend
    to (cross-attention); without it the layer attends to its own tokens. `rules` is a Mask with what holds for every
    call: window, slopes, softcap. `bias` is whether queries, keys and values have one, `out_bias` whether the output
    has; None means as `bias`. `qk_norm` names a norm that each head's queries and keys go through before they are
    turned: one of `NORMS`, or "l2", which makes their length 1, as it does unless said where a mechanism erases with
    them. `positions` is whether rotary positions and ALiBi hold here. `decay` is how a is made for a mechanism that
    needs it (see `regard.nn.gates`).
    `convolution` is the width of a short causal convolution over queries, keys and values of self-attention (0: none),
    with `convolution_options` (activation, bias). `out_norm` names the norm of each head's output, and `gate` the
    activation of an output gate, which is computed from x and multiplies what the norm gives. With `joint` the gate
    comes first, and the norm is one over all heads side by side. `skip` adds each head's values to its outputs, times a
    learned number a head. `key_heads` is the number of heads of queries and keys where values have more, each of them
    with a memory of its own. `dropout` acts on the attention weights, `residual_dropout` on the output. Outputs at
    invisible tokens are zero.
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
        if causal is None and source is None:
            raise OptionError(
                "say causal=True, where each token sees itself and those before it, or causal=False, where every token "
                "sees all"
            )
        if G is None:
            G = H
        _check_heads(D, H, G, K)
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
        self.mechanism = _build_mechanism(mechanism, self.size, options)
        self.mechanism.dropout = dropout or self.mechanism.dropout
        if source is not None and not self.mechanism.crosses:
            raise OptionError(
                f"{self.mechanism.name} has no cross-attention: its scores belong to positions of one sequence. "
                "Use 'softmax' or a linear mechanism there."
            )
        _check_key_heads(key_heads, H, G, self.mechanism)
        sizes = {"q": (key_heads or H, K), "k": (key_heads or G, K), "v": (G, V)}
        if self.mechanism.causal_only and not causal:
            raise OptionError(f"{self.mechanism.name} has no meaning that looks both ways; build it with causal=True")
        self.needs = self.mechanism.needs.rstrip("ab")  # a and b are made otherwise
        self.heads = [sizes[n][0] for n in self.needs]
        self.widths = [sizes[n][0] * sizes[n][1] for n in self.needs]
        self.project_source: Projection | None = None
        if source is None:
            self.project = Projection(D, sum(self.widths), bias=bias)
        else:
            self.project = Projection(D, self.widths[0], bias=bias)
            self.project_source = Projection(source, sum(self.widths[1:]), bias=bias)
        self.gates: Gates | None = None
        if self.needs != self.mechanism.needs:
            self.gates = Gates(D, G, K, self.mechanism, decay, decay_options)
        if getattr(self.mechanism, "erases", False):
            qk_norm = qk_norm or "l2"  # longer keys would take out more than there is, and the memory would grow
            if qk_norm == "l2" and isinstance(mechanism, str) and "checks" not in options:
                setattr(self.mechanism, "checks", False)  # noqa: B010  # the layer keeps to the ranges
        self.query_norm = _build_norm(qk_norm, K, eps, self.mechanism)
        self.key_norm = _build_norm(qk_norm, K, eps, self.mechanism)
        self.positions = positions
        self.convolution = _build_convolution(convolution, sum(self.widths), source, convolution_options or {})
        self.head_norm: nn.Module | None = None
        self.joint = joint
        if out_norm is not None:
            self.head_norm = NORMS.build(out_norm, {"D": H * V if joint else V, "eps": eps})
        self.gate: Projection | None = None
        if gate is not None:
            self.gate = Projection(D, H * V, bias=bias)
            self.gate_activation = ACTIVATIONS.find(gate)
        self.skip: nn.Parameter | None = None
        if skip:
            self.skip = _build_skip(H, source)
        self.merge = MERGES.build(merge, {}, **(merge_options or {}))
        self.out = Projection(H * V, D, bias=out_bias)

    @property
    def rules(self) -> Mask:
        """What holds for every call: the layer's own rules, with what positions add to the scores."""
        rules = self._rules
        for positions in self._positions:
            rules = positions.bias(rules)
        return rules

    @property
    def reach(self) -> int | None:
        """Returns how many tokens up to its own one sees at the most; None where it sees all before."""
        window = self.rules.window
        if window is None or self.convolution is None:
            return window
        return window + self.convolution.width - 1  # the oldest key of the window was made of those before it

    def use_positions(self, positions: Positions) -> None:
        """Lets the scores of self-attention have the bias of these positions, where they have one."""
        if self.source is None and self.positions:
            self._positions = (positions,)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, causal: bool = False) -> Attention:
        """Returns a layer that computes what PyTorch's does, with a copy of its weights.

        PyTorch's looks both ways unless each call says otherwise; `causal` says so here once for all calls. The batch
        comes first here, whatever its `batch_first` says. Layers with kdim = vdim become cross-attention.
        """
        return from_torch(cls, module, causal)

    def to_torch(self, batch_first: bool = True) -> nn.MultiheadAttention:
        """Returns a `torch.nn.MultiheadAttention` that computes what this layer does, with a copy of its weights.

        A causal layer becomes one that has to be told so at each call, by `attn_mask` and `is_causal`. What PyTorch's
        has not, such as grouped heads or another mechanism, is refused by name.
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
        change of number starts a new one, and nothing is seen across. Queries, keys and values of different tokens are
        handed over as in PyTorch, `layer(query, key, value)`, or by name: `source_visible` [B,S] then says which keys
        may be seen, and causal queries are the last of the keys. `need_weights`: also returns the weights [B,H,T,S] of
        each head.
        """
        refuse_foreign(others, "this layer")
        if others:
            raise OptionError(f"this layer has no argument '{min(others)}'")
        if value is not None and key is None:
            key, visible = visible, None
        if key is not None:
            q, k, v, mask = project_separately(self, x, key, value, source_visible)
            return self._attend(q, k, v, mask, x, None, need_weights)
        self._check_source(source is not None)
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
        """Returns a state that has seen nothing, with room for `capacity` tokens before it has to grow."""
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

        The state handed in is used up.
        """
        self._check_source(False)
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
        """Returns the outputs [B,T,D] of tokens that attend to what was written; as often as there are new tokens."""
        self._check_source(True)
        x = _zero_hidden(x, visible)
        q = self._project_queries(x)
        return self._merge_heads(self.mechanism.read(q, state), x, visible)

    def cost(self, T: int, S: int, face: Face = "parallel", B: int = 1) -> Cost:
        """Returns the declared cost of one call, projections included.

        The recurrent face has T new tokens, S in all; for cross-attention, T tokens that read S already written.
        """
        size = self._size_of_call(T, S, B)
        if self.source is not None and face == "recurrent":
            # Reading alone: cross-attention less the writing, which is what T = 0 costs.
            cost = self.mechanism.cost(size, "parallel")
            written = self.mechanism.cost(replace(size, T=0), "parallel")
            cost = replace(
                cost,
                matmul=cost.matmul - written.matmul,
                useful=cost.useful - written.useful,
                elementwise=cost.elementwise - written.elementwise,
                bytes=cost.bytes - written.bytes + cost.state,
            )
            return cost + self._projection_cost(T, 0, B)
        cost = self.mechanism.cost(replace(size, causal=size.causal or face == "recurrent"), face)
        if face == "recurrent":  # new keys and values are written, and then read with all others
            cost = replace(cost, bytes=cost.bytes + size.e * B * T * sum(self.widths["q" in self.needs :]))
            if self.convolution is not None:
                kept = size.e * B * (self.convolution.width - 1) * sum(self.widths)
                cost += Cost(0, 0, 0, 2 * kept, kept)  # read and written
        return cost + self._projection_cost(T, S, B)

    def gradient_cost(self, T: int, S: int, B: int = 1) -> Cost:
        """Returns what the gradients of a whole sequence cost beside it.

        Each projection has two products on the way back; the mechanism declares its own.
        """
        own = self._projection_cost(T, S, B)
        doubled = Cost(2 * own.matmul, 2 * own.useful, 2 * own.elementwise, 2 * own.bytes, 0)
        return doubled + self.mechanism.gradient_cost(self._size_of_call(T, S, B))

    def _size_of_call(self, T: int, S: int, B: int) -> Size:
        own = self.size
        window = None
        if self.source is None:
            window = self.rules.window
        return replace(own, B=B, T=T, S=S, dtype=self.out.weight.dtype, window=window)

    def _projection_cost(self, T: int, S: int, B: int) -> Cost:
        """Returns the cost of projecting T tokens and, for cross-attention, S of the other sequence.

        Bytes are weights and inputs read, and outputs written. What lies between projection and mechanism is counted
        with the mechanism.
        """
        projections = [(self.project, T), (self.out, T)]
        numbers = 2 * T * self.width
        if self.project_source is not None and S > 0:
            projections.append((self.project_source, S))
            numbers += S * self.project_source.in_features
        made = None if self.gates is None else self.gates.project
        for more in (self.gate, made):
            if more is not None:
                projections.append((more, T))
                numbers += T * more.out_features
        flops = sum(2 * B * tokens * projection.weight.numel() for projection, tokens in projections)
        weights = sum(x.numel() for projection, _ in projections for x in projection.parameters())
        work = 0
        if self.convolution is not None:
            weights += sum(x.numel() for x in self.convolution.parameters())
            numbers += T * sum(self.widths)
            work += self.convolution.flops(B * T)
        # 7 FLOPs a number for a norm, 9 for the gate, an activation and a product, and 2 for the values added.
        parts = 7 * (self.head_norm is not None) + 9 * (self.gate is not None) + 2 * (self.skip is not None)
        work += B * T * self.size.H * self.size.V * parts
        e = self.out.weight.dtype.itemsize
        return Cost(flops, flops, work, e * (weights + B * numbers), 0)

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
        q, k = [*queries_keys, None, None][:2]
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
        """Returns a and b of tokens x [B,T,D], as far as the mechanism needs them, by name."""
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
        return out, self.mechanism.weights(q, k, mask, **gates)

    def _add_values(self, heads: Tensor, v: Tensor) -> Tensor:
        """Returns the outputs of heads [B,H,T,V] with their own tokens' values v [B,G,T,V] added, where asked for."""
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


def _build_mechanism(mechanism: str | Mechanism, size: Size, options: Mapping[str, Any]) -> Mechanism:
    """Returns the mechanism of a name with its options, made for `size`; one already built as it is."""
    if isinstance(mechanism, str):
        return fitted(mechanism, size, **options)
    if options:
        raise OptionError(
            f"options {', '.join(options)} were given beside a mechanism already built; build it with them"
        )
    return mechanism


def _build_norm(name: str | None, K: int, eps: float, mechanism: Mechanism) -> nn.Module | None:
    """Returns the norm of each head's queries or keys, or None where none is asked for."""
    if name is None:
        return None
    if not {"q", "k"} <= set(mechanism.needs):
        raise OptionError(f"{mechanism.name} has no queries and keys of its own, so qk_norm has nothing to act on")
    if name == "l2":
        return UnitLength()
    norm: nn.Module = NORMS.build(name, {"D": K, "eps": eps})
    return norm


def _build_convolution(
    width: int, channels: int, source: int | None, options: Mapping[str, Any]
) -> ShortConvolution | None:
    """Returns the short convolution of a layer with so many channels of queries, keys and values; None for width 0."""
    if width == 0:
        return None
    if source is not None:
        raise OptionError("a short convolution belongs to self-attention: it compares a token with those before it")
    built: ShortConvolution = call_with_options(
        ShortConvolution, "the short convolution", {"channels": channels, "width": width}, options
    )
    return built


def _check_heads(D: int, H: int, G: int, K: int | None) -> None:
    if min(D, H, G) < 1:
        raise OptionError(f"width {D}, {H} query heads, {G} key/value heads: each must be at least 1")
    if K is None and D % H:
        raise OptionError(f"width {D} does not divide into {H} heads; choose another number of heads, or say K and V")
    if H % G:
        raise OptionError(f"{G} key/value heads do not divide {H} query heads")


def _check_key_heads(key_heads: int | None, H: int, G: int, mechanism: Mechanism) -> None:
    """Raises where values cannot have more heads than queries and keys do."""
    if key_heads is None:
        return
    if not isinstance(mechanism, Recurrence):
        raise OptionError(
            f"{mechanism.name}: key_heads = {key_heads}, but only mechanisms with a memory for each value head, such "
            "as 'gated-delta', let several of them share queries and keys. Leave it out, or say G"
        )
    if H != G or key_heads < 1 or G % key_heads:
        raise OptionError(
            f"key_heads = {key_heads} with {H} query heads and {G} key/value heads: expected a divisor of the value "
            "heads, and as many heads as groups"
        )


def _build_skip(H: int, source: int | None) -> nn.Parameter:
    """Returns the factor of each head's own values, 1 to begin with."""
    if source is not None:
        raise OptionError("skip adds a token's own values to its outputs: it belongs to self-attention")
    return nn.Parameter(torch.ones(H))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Returns [B,heads,T,width] from [B,T,heads·width]."""
    B, T, width = x.shape
    if T == 1:  # a decoding step has the same memory either way, and one call is cheaper than two
        return x.view(B, heads, 1, width // heads)
    return x.view(B, T, heads, width // heads).transpose(1, 2)


def _zero_hidden(x: Tensor, visible: Tensor | None) -> Tensor:
    """Returns x [B,T,D] with zeros at invisible tokens, so that even NaN there reaches nothing."""
    if visible is None:
        return x
    return x.masked_fill(~visible[..., None], 0)
