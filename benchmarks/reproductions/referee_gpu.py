"""Implementations that need a GPU, for `referee.py run --device cuda`: fla's layers, FlexAttention.

Each is asked in a process of its own, because compiling its kernels is most of the work. Kernels that choose among
configurations by timing them are given the first one: every configuration has to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64  # of tokens; two heads of 32
TAKEN = (torch.float32, torch.bfloat16)  # fla's kernels have no float64, which finite differences would need
HEAD = 16  # the width of heads of operations


def use_first_configurations() -> None:
    """Makes Triton take the first configuration of a kernel instead of timing them all."""
    import triton

    original = triton.autotune
    triton.autotune = lambda configs, **options: original(configs[:1], **options)


class FlaLayer(nn.Module):
    """A layer of fla over tokens x [B,T,D], with a mask of visible tokens [B,T] and a cache.

    Without a cache it takes the path of training (kernels by chunks), with one the path of generation.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import fla.layers
        from fla.layers import simple_gla

        torch.manual_seed(0)
        make = getattr(fla.layers, name, None) or getattr(simple_gla, name)
        self.width = WIDTH
        self.layer = make(hidden_size=WIDTH, layer_idx=0, **options).eval()

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        from fla.models.utils import Cache

        if x.dtype not in TAKEN:
            raise TypeError(f"fla's kernels are asked in float32 and bfloat16, got {x.dtype}")
        if not use_cache:
            return self.layer(x, attention_mask=attention_mask)[0]
        if past_key_values is None:
            past_key_values = Cache()
        with torch.no_grad():
            out = self.layer(x, attention_mask, past_key_values, use_cache=True)[0]
        return out, past_key_values


def fla_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns fla's causal softmax attention of q, k, v [B,T,H,K]."""
    from fla.ops.attn import parallel_attn

    if q.dtype not in TAKEN or q.shape[1] != k.shape[1]:
        raise TypeError("as many queries as keys, in float32 or bfloat16")
    out: Tensor = parallel_attn(q.contiguous(), k.contiguous(), v.contiguous())
    return out


_COMPILED: dict[str, Callable[..., Tensor]] = {}


def compiled_flex(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Returns torch's flex_attention, compiled; the queries are the last T keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not _COMPILED:
        _COMPILED["flex"] = torch.compile(flex_attention, dynamic=True)
    T, S = q.shape[2], k.shape[2]
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i + (S - T) >= j, None, None, T, S, device=q.device)
    return _COMPILED["flex"](q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def layer(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Returns what builds a layer of fla."""
    return lambda: FlaLayer(name, **options)


# Each: the distribution, what is made, and the mechanism that it is meant to compute.
GPU_FUNCTIONS: dict[str, tuple[str, Callable[[], Any], str | None]] = {
    "LinearAttention": ("flash-linear-attention", layer("LinearAttention", num_heads=2), None),
    "LinearAttention(elu, normalised)": (
        "flash-linear-attention",
        layer("LinearAttention", num_heads=2, feature_map="elu", do_feature_map_norm=True),
        None,
    ),
    "MultiScaleRetention": ("flash-linear-attention", layer("MultiScaleRetention", num_heads=2), None),
    "SimpleGatedLinearAttention": ("flash-linear-attention", layer("SimpleGatedLinearAttention", num_heads=2), None),
    "GatedLinearAttention": ("flash-linear-attention", layer("GatedLinearAttention", num_heads=2), None),
    "HGRN2Attention": ("flash-linear-attention", layer("HGRN2Attention", expand_ratio=32), None),
    "GatedSlotAttention": ("flash-linear-attention", layer("GatedSlotAttention", num_heads=2, num_slots=16), None),
    "DeltaNet": ("flash-linear-attention", layer("DeltaNet", num_heads=2), None),
    "GatedDeltaNet": ("flash-linear-attention", layer("GatedDeltaNet", num_heads=2, head_dim=32, expand_v=1), None),
    "GatedDeltaProduct": (
        "flash-linear-attention",
        layer("GatedDeltaProduct", num_heads=2, head_dim=32, expand_v=1),
        None,
    ),
    "KimiDeltaAttention": ("flash-linear-attention", layer("KimiDeltaAttention", num_heads=2, head_dim=32), None),
    "ForgettingAttention": ("flash-linear-attention", layer("ForgettingAttention", num_heads=2), None),
    "PaTHAttention": ("flash-linear-attention", layer("PaTHAttention", num_heads=2), None),
    "parallel_attn": ("fla-core", lambda: fla_attention, "softmax"),
    "flex_attention, compiled": ("torch", lambda: compiled_flex, "softmax"),
}

# Each: the subject, the law, what is to be said, and a program of ten lines without regard.
GPU_BROKEN: dict[str, tuple[str, str, str, str]] = {}
