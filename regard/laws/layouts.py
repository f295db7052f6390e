"""What the inputs and masks of somebody's attention look like, and how laws' inputs become them and back.

Laws draw q [B,H,T,K], k [B,G,S,K] and v [B,G,S,V] for attention without projections, tokens [B,T,D] for a module with
its own. A layout says how these are handed over:

    heads       q [B,H,T,K]        a function, or a module without projections
    heads last  q [B,T,H,K]        flash-attn's order
    tokens first  q [T,B,H,K]      Megatron's order
    merged      q [B,T,H·K]        with the number of heads as an argument
    flat        q [B,T,K]          a function over [n,T,d]
    matrices    q [T,K]            a function over one sequence
    multi-query  q [B,H,T,K], k [B,S,K]    keys and values without heads, which all queries share
    multi-query, heads last  q [B,T,H,K], k [B,S,K]
    packed      qkv [B,T,3,H,K]    one tensor
    tokens      query, key, value [B,T,D]    a module with projections, such as nn.MultiheadAttention
    cross       x [B,T,D] and context [B,S,D]
    x           x [B,T,D]          a module for self-attention
    image       x [B,D,h,w]        one of images, whose h·w places are its tokens
    channels first  x [B,D,T]      one over channels
    sequences   q [ΣT,H,K]         sequences packed one after another, and where each begins (cu_seqlens)
    sequences of qkv  [ΣT,3,H,K]   one tensor of these
    sequences of x    x [ΣT,D]     a module over these

Of flat, tokens and cross there are forms that take a single query a call, as a decoder's step does: q [B,D] or
[1,B,D], over keys [B,S,D] or [S,B,D]. Laws ask about T queries all the same, which are handed over one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.laws.case import DoesNotApply
from regard.laws.signatures import HEAD_COUNTS, KEY_MASKS, LENGTHS


class SingleQuery(NamedTuple):
    """How the only query of a call is handed over: as a row [1,B,D] or as [B,D], with keys [S,B,D] or [B,S,D]."""

    is_row: bool
    keys_first: bool

    def __str__(self) -> str:
        query = "[B,D]"
        keys = "[B,S,D]"
        if self.is_row:
            query = "[1,B,D]"
        if self.keys_first:
            keys = "[S,B,D]"
        return f"a single query {query} over {keys}"


@dataclass(frozen=True)
class Layout:
    """The axes of the inputs of a call. `projects`: they are [B,T,D], and the module makes heads of them itself.

    `inputs` is the number of tensors that laws draw, and `token_axis` the axis of their tokens. With `has_heads` they
    have as many heads as the case, otherwise one. `single` says how a call that takes a single query is given it.
    """

    name: str
    token_axis: int = 2
    inputs: int = 3
    projects: bool = False
    has_heads: bool = True
    same_widths: bool = False
    single: SingleQuery | None = None
    shares_keys: bool = False  # whether keys and values come without heads

    @property
    def given_axis(self) -> int:
        """The axis of tokens in what is handed over."""
        return {"heads": 2, "multi-query": 2, "matrices": 0, "tokens first": 0}.get(self.name, 1)

    @property
    def is_packed(self) -> bool:
        """Whether sequences are packed one after another, so that a call has to be told where each begins."""
        return self.name.startswith("sequences")

    def pack(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the tensors to hand over, from those that laws draw."""
        if self.name == "heads last":
            return [x.transpose(1, 2) for x in inputs]
        if self.name == "tokens first":
            return [x.permute(2, 0, 1, 3) for x in inputs]
        if self.shares_keys:
            q, k, v = inputs
            if self.name.endswith("heads last"):
                q = q.transpose(1, 2)
            return [q, k.squeeze(1), v.squeeze(1)]
        if self.name == "merged":
            return [x.transpose(1, 2).flatten(2) for x in inputs]
        if self.name == "flat":
            return [x.squeeze(1) for x in inputs]
        if self.name == "packed":
            return [torch.stack([x.transpose(1, 2) for x in inputs], 2)]
        if self.name == "image":
            return [x.mT.unflatten(2, _image_sides(x.shape[1])) for x in inputs]
        if self.name == "channels first":
            return [x.mT for x in inputs]
        if self.name == "sequences":
            return [x.transpose(1, 2).flatten(0, 1) for x in inputs]
        if self.name == "sequences of qkv":
            return [torch.stack([x.transpose(1, 2).flatten(0, 1) for x in inputs], 1)]
        if self.name == "sequences of x":
            return [x.flatten(0, 1) for x in inputs]
        return inputs

    def pack_query(self, inputs: list[Tensor], t: int) -> list[Tensor]:
        """Returns the tensors of a call by the t-th query alone, where a call takes a single one."""
        assert self.single is not None
        flat = inputs
        if not self.projects:
            flat = [x.squeeze(1) for x in inputs]
        query = flat[0][:, t]
        if self.single.is_row:
            query = query.unsqueeze(0)
        keys = flat[1:]
        if self.single.keys_first:
            keys = [x.transpose(0, 1) for x in keys]
        return [query, *keys]

    def join_queries(self, outs: list[Tensor]) -> Tensor | None:
        """Joins outputs of single queries, [B,V], [B,1,V] or [1,B,V], to [B,T,V] or [B,1,T,V]; None for others."""
        rows = []
        for out in outs:
            row = out
            if row.dim() == 3 and row.shape[1] == 1:
                row = row.squeeze(1)
            elif row.dim() == 3 and row.shape[0] == 1:
                row = row.squeeze(0)
            if row.dim() != 2:
                return None
            rows.append(row)
        joined = torch.stack(rows, 1)
        if self.projects:
            return joined
        return joined.unsqueeze(1)

    def unpack(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        """Returns an output in the laws' own form, [B,H,T,V] or [B,T,D]."""
        if self.name in ("heads last", "multi-query, heads last", "packed") and out.dim() == 4:
            return out.transpose(1, 2)
        if self.name == "tokens first" and out.dim() == 4:
            return out.permute(1, 2, 0, 3)
        if self.name == "flat" and out.dim() == 3:
            return out.unsqueeze(1)
        if self.name == "merged" and out.dim() == 3:
            return split_heads(out, inputs[0].shape[1])
        if self.name == "image" and out.dim() == 4:
            return out.flatten(2).mT
        if self.name == "channels first" and out.dim() == 3:
            return out.mT
        whole = (inputs[0].shape[0], inputs[0].shape[self.token_axis])
        if self.is_packed and out.shape[:1] == (whole[0] * whole[1],):
            out = out.unflatten(0, whole)
            if not self.projects and out.dim() == 4:
                out = out.transpose(1, 2)
        return out


def _image_sides(places: int) -> tuple[int, int]:
    """Returns the height and width of an image of so many places, as nearly square as can be."""
    height = max(n for n in range(1, int(places**0.5) + 1) if places % n == 0)
    return height, places // height


HEADS = Layout("heads")
HEADS_LAST = Layout("heads last")
TOKENS_FIRST = Layout("tokens first")
MULTI_QUERY = Layout("multi-query", shares_keys=True)
MULTI_QUERY_LAST = Layout("multi-query, heads last", shares_keys=True)
MERGED = Layout("merged", same_widths=True)
FLAT = Layout("flat", has_heads=False)
MATRICES = Layout("matrices", has_heads=False)
PACKED = Layout("packed", same_widths=True)
TOKENS = Layout("tokens", 1, 3, projects=True)
CROSS = Layout("cross", 1, 2, projects=True)
X = Layout("x", 1, 1, projects=True)
IMAGE = Layout("image", 1, 1, projects=True)
CHANNELS_FIRST = Layout("channels first", 1, 1, projects=True)
SEQUENCES = Layout("sequences")
SEQUENCES_OF_QKV = Layout("sequences of qkv", same_widths=True)
SEQUENCES_OF_X = Layout("sequences of x", 1, 1, projects=True)
# The likeliest first. No two axes of a probe have the same size, so the size of an axis tells which one it is.
_SINGLE = [SingleQuery(is_row, keys_first) for keys_first in (False, True) for is_row in (False, True)]


def single_query_forms(layout: Layout) -> list[Layout]:
    """Returns the forms of a layout that take a single query a call."""
    return [replace(layout, single=single) for single in _SINGLE]


def guess_layouts(
    f: Callable[..., Any], data: list[str], required: list[str], packing: Collection[str], width: int | None
) -> list[Layout]:
    """Returns the layouts that somebody's attention may have, the likeliest first, by its parameters."""
    is_module = isinstance(f, nn.Module)
    tokens: list[Layout] = []
    if packing and len(data) in (1, 3) and not (is_module and len(data) == 3):
        tokens = [SEQUENCES if len(data) == 3 else SEQUENCES_OF_QKV]
        if is_module:
            tokens = [SEQUENCES_OF_X]
        if any(name in required for name in packing):
            return tokens
    if len(data) == 1:
        tokens.append(X)
        if isinstance(f, nn.Module) and any(isinstance(m, nn.Conv1d | nn.Conv2d) for m in f.modules()):
            tokens += [IMAGE, CHANNELS_FIRST]
        if not is_module or width is None:
            tokens.append(PACKED)
        return tokens
    if len(data) == 2:
        return [CROSS, *single_query_forms(CROSS)]
    if is_module and width is not None:
        return [TOKENS, HEADS, HEADS_LAST, FLAT, *single_query_forms(TOKENS)]
    if any(name in HEAD_COUNTS for name in required):
        return [*tokens, MERGED, HEADS, HEADS_LAST, FLAT]
    return [*tokens, HEADS, HEADS_LAST, MULTI_QUERY, MULTI_QUERY_LAST, FLAT, MATRICES, *single_query_forms(FLAT)]


def find_output_form(out: Tensor, layout: Layout, sizes: tuple[int, int, int, int]) -> str | None:
    """Returns the form of an output, already unpacked, by the sizes (B, H, T, V) of a call; None for no known form.

    It is "same" as that of the inputs, "transposed" with heads and tokens exchanged, or "merged" [B,T,H·V].
    """
    B, H, T, V = sizes
    if out.shape == sizes:
        return "same"
    if not layout.has_heads or layout is MERGED:
        return None
    if out.shape == (B, T, H, V):
        return "transposed"
    shape = (B, T, H * V)
    if layout is TOKENS_FIRST:
        shape = (T, B, H * V)
    if out.shape == shape:
        return "merged"
    return None


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Returns [B,H,T,V] from [B,T,H·V]; what cannot be split stays as it is."""
    if x.shape[-1] % heads:
        return x
    split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


class MaskForm(NamedTuple):
    """How a mask is handed over: the parameter's name, its shape, and how hidden keys are marked in it."""

    name: str
    # "keys" [B,S], "pairs" [T,S], "batch pairs" [B,T,S], "head pairs" [B,1,T,S], "head keys" [B,1,1,S], "column"
    # [B,S,1], or "lengths" [B], how many of the first keys may be seen
    shape: str
    marks: str  # "visible": True may be seen; "hidden": True may not; "ones": 1 and 0; "added": 0 and −∞

    def build(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the mask from what each query may see, [B,T,S]."""
        if self.shape == "lengths":
            seen = allowed.any(1)
            lengths = seen.sum(1)
            if not bool((seen == (torch.arange(seen.shape[1], device=seen.device) < lengths[:, None])).all()):
                raise DoesNotApply(f"{self.name} hides the last keys and no others")
            return lengths
        if self.shape == "keys":
            allowed = allowed.any(1)
        elif self.shape == "head keys":
            allowed = allowed.any(1)[:, None, None]
        elif self.shape == "column":
            allowed = allowed.any(1)[..., None]
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

    def as_said(self, said: str | None) -> MaskForm:
        """Returns the form with True for what a docstring says, "visible" or "hidden", where that is the other way."""
        if said is None or self.marks == "added" or (self.marks == "hidden") == (said == "hidden"):
            return self
        return self._replace(marks=said)

    @property
    def has_pairs(self) -> bool:
        """Whether it can say that a query sees a key and another does not."""
        return self.shape not in ("keys", "head keys", "column", "lengths")

    @property
    def rank(self) -> int:
        """The number of its axes."""
        return {"keys": 2, "pairs": 2, "batch pairs": 3, "column": 3, "lengths": 1}.get(self.shape, 4)

    @property
    def has_batch(self) -> bool:
        """Whether it can hide other keys in each row of a batch."""
        return self.shape != "pairs"


def possible_forms(name: str, has_causal_flag: bool) -> Iterator[MaskForm]:
    """Yields the forms that a mask of this name may have, the likeliest first."""
    if name in LENGTHS:
        yield MaskForm(name, "lengths", "visible")
        return
    if name in KEY_MASKS:
        marks = ["visible", "hidden"]
        if KEY_MASKS[name]:
            marks.reverse()
        marks += ["ones", "added"]
        shapes = ["keys", "head keys", "column"]
        yield from (MaskForm(name, shape, mark) for shape in shapes for mark in marks)
        return
    # A mask [T,S] that is read as one of [B,S] addresses rows that are not there, and ends a process on a GPU.
    shapes = ["head pairs", "batch pairs", "keys", "head keys", "pairs", "column"]
    if has_causal_flag:  # then a mask is more likely to be one of keys
        shapes = ["keys", "head keys", "head pairs", "batch pairs", "pairs", "column"]
    for shape in shapes:
        for mark in ("visible", "hidden", "ones", "added"):
            yield MaskForm(name, shape, mark)
