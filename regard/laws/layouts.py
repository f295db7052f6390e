"""What the inputs and masks of somebody's attention look like, and how laws' inputs become them and back.

Laws draw q [B,H,T,K], k [B,G,S,K] and v [B,G,S,V] for attention without projections, tokens [B,T,D] for a module with
its own. A layout says how these are handed over:

    heads       q [B,H,T,K]        a function, or a module without projections
    heads last  q [B,T,H,K]        flash-attn's order
    tokens first  q [T,B,H,K]      Megatron's order
    merged      q [B,T,H·K]        with the number of heads as an argument
    flat        q [B,T,K]          a function over [n,T,d]
    matrices    q [T,K]            a function over one sequence
    packed      qkv [B,T,3,H,K]    one tensor
    tokens      query, key, value [B,T,D]    a module with projections, such as nn.MultiheadAttention
    cross       x [B,T,D] and context [B,S,D]
    x           x [B,T,D]          a module for self-attention
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.laws.signatures import KEY_MASKS


@dataclass(frozen=True)
class Layout:
    """What the inputs look like. `projects`: the width is the module's own, and heads are its own affair.

    `inputs` counts the tensors that laws draw, `token_axis` is that of their tokens. `has_heads`: they have more than
    one head where a case does.
    """

    name: str
    token_axis: int = 2
    inputs: int = 3
    projects: bool = False
    has_heads: bool = True
    same_widths: bool = False

    @property
    def given_axis(self) -> int:
        """The axis of tokens in what is handed over."""
        return {"heads": 2, "matrices": 0, "tokens first": 0}.get(self.name, 1)

    def pack(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the tensors to hand over, from those that laws draw."""
        if self.name == "heads last":
            return [x.transpose(1, 2) for x in inputs]
        if self.name == "tokens first":
            return [x.permute(2, 0, 1, 3) for x in inputs]
        if self.name == "merged":
            return [x.transpose(1, 2).flatten(2) for x in inputs]
        if self.name == "flat":
            return [x.squeeze(1) for x in inputs]
        if self.name == "packed":
            return [torch.stack([x.transpose(1, 2) for x in inputs], 2)]
        return inputs

    def unpack(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        """Returns an output in the laws' own form, [B,H,T,V] or [B,T,D]."""
        if self.name in ("heads last", "packed") and out.dim() == 4:
            return out.transpose(1, 2)
        if self.name == "tokens first" and out.dim() == 4:
            return out.permute(1, 2, 0, 3)
        if self.name == "flat" and out.dim() == 3:
            return out.unsqueeze(1)
        if self.name == "merged" and out.dim() == 3:
            return split_heads(out, inputs[0].shape[1])
        return out


HEADS = Layout("heads")
HEADS_LAST = Layout("heads last")
TOKENS_FIRST = Layout("tokens first")
MERGED = Layout("merged", same_widths=True)
FLAT = Layout("flat", has_heads=False)
MATRICES = Layout("matrices", has_heads=False)
PACKED = Layout("packed", same_widths=True)
TOKENS = Layout("tokens", 1, 3, projects=True)
CROSS = Layout("cross", 1, 2, projects=True)
X = Layout("x", 1, 1, projects=True)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Returns [B,H,T,V] from [B,T,H·V]; what cannot be split stays as it is."""
    if x.shape[-1] % heads:
        return x
    split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


class MaskForm(NamedTuple):
    """How a mask is handed over: the parameter's name, its shape, and how hidden keys are marked in it."""

    name: str
    shape: str  # "keys" [B,S], "pairs" [T,S], "batch pairs" [B,T,S], "head pairs" [B,1,T,S], "head keys" [B,1,1,S]
    marks: str  # "visible": True may be seen; "hidden": True may not; "ones": 1 and 0; "added": 0 and −∞

    def build(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the mask from what each query may see, [B,T,S]."""
        if self.shape == "keys":
            allowed = allowed.any(1)
        elif self.shape == "head keys":
            allowed = allowed.any(1)[:, None, None]
        elif self.shape == "pairs":
            allowed = allowed[0]
        elif self.shape == "head pairs":
            allowed = allowed[:, None]
        if self.marks == "visible":
            return allowed
        if self.marks == "hidden":
            return ~allowed
        if self.marks == "ones":
            return allowed.to(dtype)
        return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, float("-inf"))

    @property
    def has_pairs(self) -> bool:
        """Whether it can say that a query sees a key and another does not."""
        return self.shape not in ("keys", "head keys")

    @property
    def has_batch(self) -> bool:
        """Whether it can hide other keys in each row of a batch."""
        return self.shape != "pairs"


def possible_forms(name: str, has_causal_flag: bool) -> Iterator[MaskForm]:
    """Yields the forms that a mask of this name may have, the likeliest first."""
    if name in KEY_MASKS:
        marks = ["visible", "hidden"]
        if KEY_MASKS[name]:
            marks.reverse()
        yield from (MaskForm(name, shape, mark) for shape in ("keys", "head keys") for mark in marks)
        return
    # A mask [T,S] that is read as one of [B,S] addresses rows that are not there, and ends a process on a GPU.
    shapes = ["head pairs", "batch pairs", "keys", "head keys", "pairs"]
    if has_causal_flag:  # then a mask is more likely to be one of keys
        shapes = ["keys", "head keys", "head pairs", "batch pairs", "pairs"]
    for shape in shapes:
        for mark in ("visible", "hidden", "ones", "added"):
            yield MaskForm(name, shape, mark)
