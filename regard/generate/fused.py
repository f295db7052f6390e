"""A decoding step in five kernels a layer, for the most common models.

    norm, queries, keys and values → position, cache and attention → output and residual → norm, MLP up and activation
    → MLP down and residual

For few rows, the time of a step is that of reading the weights once. PyTorch's kernels leave the memory idle between
them; these fetch their weights while the one before still runs. Models with other parts are run unfused.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.kernels.devices import can_start_early
from regard.mechanisms import Cache, Softmax
from regard.models import Decoder
from regard.models.stack import StackState
from regard.nn import Attention, Block, Rotary, Rotation
from regard.nn.block import MLP, GatedMLP
from regard.nn.merges import Merge
from regard.nn.projection import Projection

MOST_ROWS = 64
WIDEST = 16384  # numbers of a row of weights, all of which a program holds at once
WIDEST_HEAD = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse_fused_step(model: Decoder[Any], state: StackState) -> str | None:
    """Returns in words why a step of this model and state cannot be fused, or None."""
    if model.device.type != "cuda" or find_spec("triton") is None:
        return "it needs a CUDA device and triton"
    if torch.is_autocast_enabled("cuda"):
        return "it knows no autocast"
    return refuse_parts(model, state)


def refuse_parts(model: Decoder[Any], state: StackState) -> str | None:
    """Returns in words which part of the model or the state has no fused kernel, or None."""
    if state.tokens.shape[0] > MOST_ROWS:
        return f"it takes at most {MOST_ROWS} rows"
    dtype = model.embedding.weight.dtype
    if dtype not in DTYPES or any(p.dtype != dtype for p in model.parameters()):
        return "it takes weights of one dtype: bfloat16, float16 or float32"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a module is watched by a hook"
    if model.stack.final_norm is not None and _norm_kind(model.stack.final_norm) is None:
        return "it knows layer norm and RMS norm"
    if _turns_a_part(model.stack):
        return "it takes rotary positions that turn the whole width of every layer"
    for block, layer in zip(model.stack.layers, state.layers, strict=True):
        reason = _refuse_block(block) or _refuse_state(layer.own, dtype)
        if reason is not None:
            return reason
    return None


def _turns_a_part(stack: Any) -> bool:
    """Returns whether rotary positions turn a share of the width only, or some layers only."""
    rotary = stack.positions
    return isinstance(rotary, Rotary) and any(
        not block.attention.positions or rotary.width < block.attention.size.K for block in stack.layers
    )


def _refuse_block(block: Block) -> str | None:
    """Returns in words which part of a block has no fused kernel, or None."""
    if type(block) is not Block or block.cross is not None or not block.before:
        return "it takes blocks of attention and an MLP with norms before them"
    if block.mlp is None or block.mlp_norm is None or _activation(block.mlp) is None:
        return "it knows the MLPs gelu, gelu_tanh, relu and swiglu"
    if _norm_kind(block.attention_norm) is None or _norm_kind(block.mlp_norm) is None:
        return "it knows layer norm and RMS norm"
    attention = block.attention
    mechanism = attention.mechanism
    more = (attention.convolution, attention.head_norm, attention.gate, attention.skip)
    if any(part is not None for part in more):
        return "it takes attention without a convolution, an output norm, an output gate or a skip"
    if type(attention) is not Attention or type(attention.merge) is not Merge or attention.query_norm is not None:
        return "it takes attention whose heads are concatenated, without norms of queries and keys"
    if type(mechanism) is not Softmax or mechanism.use != "auto" or "extend" in vars(mechanism):
        return "it takes softmax attention that chooses its own kernel"
    if max(attention.size.K, attention.size.V) > WIDEST_HEAD:
        return f"it takes heads up to {WIDEST_HEAD} wide"
    for part in (attention.project, attention.out, block.mlp.into, block.mlp.out):
        if type(part) is not Projection or type(part.weight) is not nn.Parameter or not part.weight.is_contiguous():
            return "it takes plain projections"
        if part.in_features > WIDEST:
            return f"it takes projections of at most {WIDEST} numbers"
    return None


def _refuse_state(own: Any, dtype: torch.dtype) -> str | None:
    """Returns in words why the state of a layer cannot be extended by the fused kernel, or None."""
    if not isinstance(own, Cache) or own.k is None or own.v.dtype != dtype:
        return "it takes caches of the weights' dtype"
    if own.rules.relative is not None or own.rules.sinks is not None:
        return "it knows no bias of relative positions and no sinks"
    return None


def _norm_kind(norm: nn.Module) -> str | None:
    """Returns the kind of a norm, "layer" or "rms"; None for other kinds."""
    if isinstance(norm, nn.RMSNorm):
        return "rms"
    if type(norm) is nn.LayerNorm:
        return "layer"
    return None


def _norm_parts(norm: Any) -> Any:
    """Returns the kind, weight, bias and ε of a norm."""
    from regard.kernels.matvec.triton_project import Norm

    kind = _norm_kind(norm)
    assert kind is not None
    eps = norm.eps
    if eps is None:
        eps = torch.finfo(norm.weight.dtype).eps
    return Norm(kind, norm.weight, getattr(norm, "bias", None), eps)


def _activation(mlp: nn.Module) -> str | None:
    """Returns the name of an MLP's activation, or None if it has no fused kernel."""
    if type(mlp) is GatedMLP:
        return "silu"
    if type(mlp) is not MLP:
        return None
    activation: Any = mlp.activation
    if isinstance(activation, partial) and activation.keywords == {"approximate": "tanh"}:
        return {functional.gelu: "gelu_tanh"}.get(activation.func)
    return {functional.gelu: "gelu", torch.relu: "relu"}.get(activation)


class FusedStep:
    """A fused step of `model` for B rows, whose caches must have room for it: step(tokens, state) → logits."""

    def __init__(self, model: Decoder[Any], B: int) -> None:
        self.model = model
        self.early = can_start_early(model.embedding.weight)
        groups = max(block.attention.size.G for block in model.stack.layers)
        # Programs that share a row count here how many have finished; the last one resets it to zero.
        self.arrived = torch.zeros(B * groups, dtype=torch.int32, device=model.device)

    def __call__(self, tokens: Int[Tensor, "B 1"], state: StackState) -> Float[Tensor, "B 1 N"]:
        """Returns logits after one more token of each row; writes keys and values, but does not count the tokens."""
        from regard.kernels.matvec.triton_project import project

        model = self.model
        x, rotation = self._embed(tokens, state)
        for block, layer in zip(model.stack.layers, state.layers, strict=True):
            x = self._extend_block(block, x, layer.own, rotation)
        norm = None
        if model.stack.final_norm is not None:
            norm = _norm_parts(model.stack.final_norm)
        table = model.head or model.embedding
        return project(x, table.weight, norm=norm, early=self.early)

    def _embed(self, tokens: Tensor, state: StackState) -> tuple[Float[Tensor, "B 1 D"], Rotation | None]:
        """Returns the input of the first block, and the rotation of queries and keys."""
        x: Tensor = self.model.embedding(tokens)
        stack = self.model.stack
        positions = state.tokens[:, None]
        added = stack.positions.added(positions, state.used + 1, x.dtype)
        if added is not None:
            x = x + added
        if stack.embedding_norm is not None:
            x = stack.embedding_norm(x)
        return x, stack.positions.rotation(positions, state.used + 1, x.dtype)

    def _extend_block(self, block: Block, x: Tensor, own: Cache, rotation: Rotation | None) -> Float[Tensor, "B 1 D"]:
        """Returns the residual stream [B,1,D] after one block."""
        from regard.kernels.decode.triton_decode import step
        from regard.kernels.matvec.triton_project import project

        attention = block.attention
        mechanism = attention.mechanism
        assert own.k is not None and isinstance(mechanism, Softmax)
        size = attention.size
        B = x.shape[0]
        projected = project(
            x, attention.project.weight, attention.project.bias,
            norm=_norm_parts(block.attention_norm), early=self.early,
        )  # fmt: skip
        parts = projected.split_with_sizes(attention.widths, -1)
        q, k, v = (part.view(B, heads, 1, -1) for part, heads in zip(parts, attention.heads, strict=True))
        heads = step(
            q, k, v, own.k, own.v, own.tokens, own.used, mechanism.score_scale(size.K), own.rules,
            rotation=rotation, arrived=self.arrived, counted_before=True,
        )  # fmt: skip
        merged = heads.view(B, 1, size.H * size.V)
        x = project(merged, attention.out.weight, attention.out.bias, residual=x, early=self.early)
        mlp: Any = block.mlp
        activation = _activation(mlp)
        assert activation is not None
        hidden = project(
            x, mlp.into.weight, mlp.into.bias, norm=_norm_parts(block.mlp_norm),
            activation=activation, gated=type(mlp) is GatedMLP, early=self.early,
        )  # fmt: skip
        return project(hidden, mlp.out.weight, mlp.out.bias, residual=x, early=self.early)
