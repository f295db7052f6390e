"""Softmax attention under rules on a GPU, by PyTorch's FlexAttention.

A rule of a `Mask` becomes a function of four indices (batch, head, query, key) that the kernel asks of each pair. Which
blocks of 128 queries and 128 keys it visits at all is decided beforehand from the least and the greatest position of
each block: a matrix [T,S] is never made. FlexAttention is a template that has to be compiled, once for each set of
rules, dtype and width, which takes seconds; so a call that is small enough for a dense mask is left to `sdpa`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

from regard.kernels.registry import kernel
from regard.kernels.softcap import cap_score, has_fast_softcap
from regard.mechanisms import Softmax
from regard.shapes import Mask

BLOCK = 128  # queries, and keys, of a block
# A dense mask of fewer pairs than this costs less than compiling ever pays back in a handful of calls.
LEAST_PAIRS = 2**24
_KEPT_MASKS = 8  # block masks of recent batches
_RECOMPILATIONS = 64  # of one function; PyTorch's own limit of 8 would fall back to a dense matrix

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Extent(NamedTuple):
    """The least and the greatest of some number in each block, [#B,blocks], and where it is the same for all of it."""

    low: Tensor
    high: Tensor


class Blocks(NamedTuple):
    """What a rule says of each pair of blocks, [#B,query blocks,key blocks]."""

    some: Tensor  # some pair may be allowed
    all: Tensor  # every pair is allowed for certain


def _when(mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if q.device.type != "cuda":
        return "it is compiled for CUDA devices only"
    reason = why_not_expressible(mechanism, q, k, v, mask)
    if reason is not None:
        return reason
    if mechanism.use == "flex":
        return None
    if mask.bias is not None:
        return "its test with a bias fails on a GPU"
    T = q.shape[2]
    S = k.shape[2]
    has_rules = mask.visible is not None or mask.window is not None or mask.documents is not None
    if not has_rules and not mask.adjusts_scores:
        return "without rules PyTorch's fused call is faster"
    if q.shape[0] * T * S < LEAST_PAIRS:
        return f"a dense mask of fewer than {LEAST_PAIRS:,} pairs does not pay for compiling"
    return None


def why_not_expressible(mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns which part of a call FlexAttention has no words for, or None where it has them all."""
    T = q.shape[2]
    S = k.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "it is measured and judged in bfloat16 and float16 only"
    if min(q.shape[3], v.shape[3]) < 16 or min(T, S) < BLOCK:
        return f"it wants widths of at least 16 and at least {BLOCK} queries and keys"
    if mechanism.training and mechanism.dropout > 0:
        return "it drops no weights"
    if mask.rows is not None or mask.relative is not None or mask.sinks is not None:
        return "it knows no queries at places of their own, no relative positions and no sinks"
    if T != S and not mask.causal and (mask.window is not None or mask.slopes is not None):
        return "without causal, a window or slopes need as many queries as keys"
    learned = [x for x in (mask.bias, mask.slopes) if x is not None and x.requires_grad]
    if learned:
        return "gradients of a bias or of slopes would be summed pair by pair"
    return None


@kernel(Softmax, "forward", name="flex", when=_when, device="cuda")
def softmax(mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns softmax attention [B,H,T,V] whose rules are asked block by block."""
    blocks = find_block_mask(mask, q.shape[2], k.shape[2], q.device)
    scores = score_rule(mask, q, k)
    call = (q, k, v, mask.visible, scores, blocks, mechanism.score_scale(q.shape[-1]))
    if torch.compiler.is_compiling() or q.device.type != "cuda":
        return _attend(*call)
    out: Tensor
    given = tuple(x is not None for x in (mask.visible, mask.documents, mask.slopes, mask.bias))
    key = (given, mask.causal, mask.window, mask.softcap, q.shape, k.shape, v.shape, q.dtype, torch.is_grad_enabled())
    if key in _COMPILED_CALLS:
        out = _compiled()(*call)
        return out
    # Changing the limit takes longer than a small call: only where something may have to be compiled.
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS):
        out = _compiled()(*call)
    _COMPILED_CALLS.add(key)
    return out


_COMPILED_CALLS: set[tuple[Any, ...]] = set()


class ZeroedTokens(torch.autograd.Function):
    """Zeros where no query may see. The gradient passes as it is: what arrives there is zero already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor) -> Tensor:
        return x.masked_fill(hidden, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scores: Any, blocks: BlockMask | None, scale: float
) -> Tensor:
    """Returns FlexAttention's output [B,H,T,V]. Hidden keys and values are zeroed here, to be compiled with the rest.

    A function of our own: PyTorch counts recompilations by function, and others may have used up those of its own.
    """
    if visible is not None:
        hidden = ~visible[:, None, :, None]
        v = ZeroedTokens.apply(v, hidden)  # type: ignore[no-untyped-call]
        # A score of a hidden key is masked whatever it is, but its gradient is a product with the key.
        if torch.is_grad_enabled():
            k = ZeroedTokens.apply(k, hidden)  # type: ignore[no-untyped-call]
    out: Tensor = flex_attention(q, k, v, scores, blocks, scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


@lru_cache(1)
def _compiled() -> Callable[..., Any]:
    """Returns `_attend` compiled: for one length first, and for any length from the second on."""
    compiled: Callable[..., Any] = torch.compile(_attend, fullgraph=True)
    return compiled


def score_rule(mask: Mask, q: Tensor, k: Tensor) -> Callable[..., Tensor] | None:
    """Returns what the mask does to a score (softcap, slopes, bias, in this order), or None."""
    if not mask.adjusts_scores:
        return None
    softcap = mask.softcap
    slopes = mask.slopes
    bias = mask.bias
    T = q.shape[2]
    S = k.shape[2]
    distance = None
    if slopes is not None:
        slopes = slopes.float()
        distance = _distance(mask, T, S, q.device, q.shape[0])
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], T, S)
    fast_softcap = softcap is not None and has_fast_softcap(softcap, q.device)

    def adjust(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = cap_score(score, softcap, fast_softcap)
        if slopes is not None and distance is not None:
            score = score - slopes[h] * distance(b, i, j).abs()
        if bias is not None:
            score = score + bias[b, h, i, j]
        return score

    return adjust


def _distance(mask: Mask, T: int, S: int, device: torch.device, B: int) -> Callable[..., Tensor]:
    """Returns a function of (batch, query, key) that gives how many positions the query stands after the key."""
    if mask.visible is None:
        return lambda b, i, j: i + (S - T) - j
    across = mask.but(documents=None, causal=True)
    keys = across.positions(S, device).int().expand(B, -1)
    queries = across.query_positions(T, S, device).position.int().expand(B, -1)
    return lambda b, i, j: queries[b, i] - keys[b, j]


# Block masks of recent calls: all layers of a model, and the gradients of each, ask for the same one.
_RECENT: OrderedDict[tuple[Any, ...], tuple[tuple[Any, ...], BlockMask | None]] = OrderedDict()


def find_block_mask(mask: Mask, T: int, S: int, device: torch.device) -> BlockMask | None:
    """Returns `block_mask` of the rules, that of an earlier call where the same tensors were asked about."""
    given = [x for x in (mask.visible, mask.documents) if x is not None]
    fleeting = torch.compiler.is_compiling() or any(x.is_inference() for x in given)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        fleeting = True  # a graph has to make its own each time, since its inputs change underneath
    if fleeting:
        return block_mask(mask, T, S, device)
    # Tensors made in inference mode cannot be kept for a gradient: what is made there is used there only.
    mode = torch.is_inference_mode_enabled()
    key = (mask.causal, mask.window, T, S, device, id(mask.visible), id(mask.documents), mode)
    versions = tuple(x._version for x in given)
    references, kept = _RECENT.get(key, (None, None))
    if references is not None and references[0] == versions and all(r() is not None for r in references[1:]):
        _RECENT.move_to_end(key)
        return kept
    made = block_mask(mask, T, S, device)
    _RECENT[key] = ((versions, *(weakref.ref(x) for x in given)), made)
    while len(_RECENT) > _KEPT_MASKS:
        _RECENT.popitem(last=False)
    return made


def block_mask(mask: Mask, T: int, S: int, device: torch.device) -> BlockMask | None:
    """Returns which blocks of queries and keys meet, and the rule within them; None where everything may be seen."""
    rules: list[Rule] = []
    found: list[Blocks] = []
    # Positions over the whole row order the tokens of each document as its own positions would.
    across = mask.but(documents=None)
    offset = S - T
    if mask.visible is not None:
        visible = mask.visible.to(torch.int32)  # read as bool, the kernel would take three times as long
        rules.append(lambda b, h, i, j: visible[b, j] > 0)
        seen = _extent(visible, pad=0)
        found.append(Blocks(seen.high[:, None, :] > 0, seen.low[:, None, :] > 0))
    if mask.causal:
        # A visible key lies at or before a query by position where it does by index: positions need not be read.
        rules.append(lambda b, h, i, j: j <= i + offset)
        found.append(_causal_blocks(_indices(T, device, offset), _indices(S, device)))
    if mask.window is not None:
        keys = across.positions(S, device).int()
        queries = across.but(causal=True).query_positions(T, S, device).position.int()
        found.append(_window_blocks(_extent(queries), _extent(keys), mask.window))
        rules.append(_window_rule(mask.visible, keys, queries, offset, mask.window))
    ids = mask.document_ids()
    if ids is not None:
        documents = ids.int()
        rules.append(lambda b, h, i, j: documents[b, i + offset] == documents[b, j])
        found.append(_document_blocks(_extent(ids[:, offset:]), _extent(ids)))
    if not rules:
        return None
    return _assemble(found, rules, T, S, device)


def _extent(x: Tensor, pad: int | None = None) -> Extent:
    """Returns the extent of a number [#B,N] over blocks; the last block is filled up with `pad`, or its last number."""
    missing = -x.shape[1] % BLOCK
    if missing and pad is None:
        x = torch.cat([x, x[:, -1:].expand(-1, missing)], 1)
    elif missing:
        x = functional.pad(x, (0, missing), value=pad)
    x = x.view(x.shape[0], -1, BLOCK)
    return Extent(x.amin(2), x.amax(2))


def _indices(N: int, device: torch.device, offset: int = 0) -> Extent:
    """Returns the extent of the indices of N tokens, the first of which is `offset`."""
    return _extent(torch.arange(offset, offset + N, device=device, dtype=torch.int32)[None])


def _causal_blocks(queries: Extent, keys: Extent) -> Blocks:
    return Blocks(
        keys.low[:, None, :] <= queries.high[:, :, None],
        keys.high[:, None, :] <= queries.low[:, :, None],
    )


def _window_blocks(queries: Extent, keys: Extent, window: int) -> Blocks:
    # The nearest and the farthest that a query and a key of two blocks can be from each other.
    after = queries.low[:, :, None] - keys.high[:, None, :]
    before = keys.low[:, None, :] - queries.high[:, :, None]
    nearest = torch.maximum(after, before)
    farthest = torch.maximum(
        queries.high[:, :, None] - keys.low[:, None, :], keys.high[:, None, :] - queries.low[:, :, None]
    )
    return Blocks(nearest < window, farthest < window)


def _document_blocks(queries: Extent, keys: Extent) -> Blocks:
    overlap = (queries.low[:, :, None] <= keys.high[:, None, :]) & (keys.low[:, None, :] <= queries.high[:, :, None])
    one = (queries.low == queries.high)[:, :, None] & (keys.low == keys.high)[:, None, :]
    return Blocks(overlap, one & overlap)


def _window_rule(visible: Tensor | None, keys: Tensor, queries: Tensor, offset: int, window: int) -> Rule:
    if visible is None:
        return lambda b, h, i, j: (i + offset - j).abs() < window
    return lambda b, h, i, j: (queries[b, i] - keys[b, j]).abs() < window


def _assemble(found: list[Blocks], rules: list[Rule], T: int, S: int, device: torch.device) -> BlockMask:
    """Returns the block mask of all rules together: blocks to visit with the rule, and blocks to visit without."""
    some = found[0].some
    whole = found[0].all
    for blocks in found[1:]:
        some = some & blocks.some
        whole = whole & blocks.all
    # The last block is not full where the length is no multiple of BLOCK: the rule sees to its end.
    inside_queries = torch.arange(-(-T // BLOCK), device=device) < T // BLOCK
    inside_keys = torch.arange(-(-S // BLOCK), device=device) < S // BLOCK
    whole = whole & some & inside_queries[:, None] & inside_keys
    partial = some & ~whole
    return BlockMask.from_kv_blocks(
        *_list_blocks(partial),
        *_list_blocks(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=and_masks(*rules),
        seq_lengths=(T, S),
    )


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many key blocks each query block visits [#B,1,rows], and which, in order, [#B,1,rows,columns]."""
    count = chosen.sum(2, dtype=torch.int32)
    order = torch.argsort((~chosen).to(torch.uint8), dim=2, stable=True).to(torch.int32)
    return count[:, None].contiguous(), order[:, None].contiguous()
