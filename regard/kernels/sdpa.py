"""PyTorch's fused attention for everything that is a softmax: softmax itself and both synthesizers.

On a CPU it is not fused where weights are dropped; regard's own function then takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from regard.kernels.blocks import refuse_blocks, rules_of_block
from regard.kernels.dropout import attention as dropout_attention
from regard.kernels.registry import kernel
from regard.kernels.stretches import attend_by_stretches, find_stretches
from regard.mechanisms import Mechanism, RandomSynthesizer, Softmax, Synthesizer
from regard.mechanisms.base import autocast_dtype, without_autocast
from regard.shapes import Mask

_LEAST_BLOCK = 64  # queries of a block under a window on a CPU: below it a call costs more than its products


def _when(mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if mask.softcap is not None:
        return "the fused call has no softcap"
    if mask.sinks is not None and mask.size(q, v if k is None else k)[0] == 1:
        return "the keys would be copied beside the sink for a single query"
    if isinstance(mechanism, Synthesizer) and mechanism.relative:
        return "scores by distance are no product of queries and keys"
    return None


@kernel(Softmax, "forward", name="sdpa", when=_when)
def softmax(mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns softmax attention by one fused call."""
    return fused_attention(mechanism, q, mask.zero_hidden(k), v, mask, mechanism.score_scale(q.shape[-1]))


@kernel(Synthesizer, "forward", name="sdpa", when=_when)
def synthesizer(mechanism: Synthesizer, q: Tensor, k: Tensor | None, v: Tensor, mask: Mask) -> Tensor:
    """Returns the synthesizer's output as softmax attention of [ReLU(q), 1] to its learned keys."""
    queries, keys = mechanism.as_softmax(q, mask)
    return _fused_at_scale_one(mechanism, queries, keys, v, mask)


@kernel(RandomSynthesizer, "forward", name="sdpa", when=_when)
def random_synthesizer(
    mechanism: RandomSynthesizer, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask
) -> Tensor:
    """Returns the output for scores R: its two factors are queries and keys, or all of R is a bias."""
    B = v.shape[0]
    if mechanism.right is not None:
        left, right = mechanism.factors(mask, q)
        return _fused_at_scale_one(mechanism, left.expand(B, -1, -1, -1), right.expand(B, -1, -1, -1), v, mask)
    bias = mechanism.scores(mask, q)
    if mask.bias is None:
        bias = bias.to(mechanism.left.dtype)  # as precise as R is
    else:
        bias = mask.but(slopes=None, relative=None).adjusted_scores(bias)  # these two are added with the rest below
    # A query and a key of zeros leave the bias as it is.
    _, H, T, S = bias.shape
    queries = bias.new_zeros(B, H, T, 8)
    keys = bias.new_zeros(B, H, S, 8)
    return _fused_at_scale_one(mechanism, queries, keys, v, mask.but(bias=bias))


def _fused_at_scale_one(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns softmax(q·kᵀ + …) v for q [B,H,T,·], k [B,H,S,·] of another width than v [B,G,S,V], in v's dtype."""
    precise = _precise(v)
    padded = _pad_to_one_width(q.to(precise.dtype), k.to(precise.dtype), precise, mask)
    return fused_attention(mechanism, *padded, mask, 1.0)[..., : v.shape[-1]].to(v.dtype)


def _precise(v: Tensor) -> Tensor:
    """Returns the values in float32 or better on a CPU.

    Its fused call rounds the gradients of scores to the dtype of the values: too much where scores are learned numbers.
    """
    if v.device.type == "cpu" and v.dtype.itemsize < 4:
        return v.float()
    return v


def fused_attention(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Returns scaled_dot_product_attention under a structured mask, with zeros for a row that may see nothing."""
    if q.dtype is torch.float16 and q.device.type == "cpu":  # where some CPUs sum products in float16 too
        return fused_attention(mechanism, q.float(), k.float(), v.float(), mask, scale).to(q.dtype)
    if mask.sinks is not None:
        return _attend_beside_sinks(mechanism, q, k, v, mask, scale)
    if mask.adjusts_scores:
        return _attend_with_added_scores(mechanism, q, k, v, mask, scale)
    T = q.shape[2]
    S = k.shape[2]
    rows = find_stretches(q, mask, S)
    if rows is not None:

        def attend(q: Tensor, k: Tensor, v: Tensor, rules: Mask) -> Tensor:
            return fused_attention(mechanism, q, k, v, rules, scale)

        return attend_by_stretches(attend, q, k, v, mask, rows)
    call = _fused_call(mechanism, q, k, mask.zero_hidden(v), mask, scale)
    # PyTorch's is_causal puts the queries first, regard puts them last: the same where T = S, or for one query.
    if mask.is_plain and (not mask.causal or T in (1, S)):
        is_causal = False
        if mask.causal and T > 1:  # a branch: compiled for any length, T > 1 itself would not be a bool
            is_causal = True
        return call(is_causal=is_causal)
    if mask.window is not None and q.device.type == "cpu":
        C = max(_LEAST_BLOCK, mask.window)
        if 2 * C < S and refuse_blocks(mask, T, S) is None:
            return _window_by_blocks(mechanism, q, k, mask.zero_hidden(v), mask, scale, C)
    attn_mask, blind = _dense_mask(q, mask, T, S)
    return call(attn_mask=attn_mask).masked_fill(blind, 0)


def _attend_with_added_scores(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> Tensor:
    """Returns fused attention whose bias, slopes and relative positions are added in float32 or better.

    In half precision a score of 100 is off by a quarter, and its weight by a fifth.
    """
    dtype = autocast_dtype(q)
    computed = dtype
    if q.is_cuda and dtype.itemsize < 4 and _is_rounded(mask, dtype):
        computed = torch.float32  # fused calls on a GPU take a mask of the inputs' dtype only
    with without_autocast(q):
        q, k, v = (x.to(dtype).to(computed) for x in (q, k, v))
        added, blind = _dense_mask(q, mask, q.shape[2], k.shape[2])
        out = _fused_call(mechanism, q, k, mask.zero_hidden(v), mask, scale)(attn_mask=added)
        return out.masked_fill(blind, 0).to(dtype)


def _attend_beside_sinks(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Returns fused attention with a sink a head: one more key, first of all, whose value is zero.

    Its score is that of the sinks alone: queries [q, high, low] with high + low = sink/scale meet the keys [k, 0, 0],
    and the sink's key [0, 1, 1]. Two numbers, because one in half precision has too few digits.
    """
    assert mask.sinks is not None
    T = q.shape[2]
    S = k.shape[2]
    dtype = autocast_dtype(q)
    rules = mask.but(sinks=None)
    if rules.adjusts_scores and dtype.itemsize < 4:  # see _attend_with_added_scores
        return _attend_beside_sinks(mechanism, q.float(), k.float(), v.float(), mask, scale).to(dtype)
    with without_autocast(q):
        score = (mask.sinks.to(torch.promote_types(dtype, torch.float32)) / scale)[None, :, None, None]
        high = score.to(dtype)
        low = (score - high).to(dtype)
        queries = torch.cat([q.to(dtype), high.expand(*q.shape[:3], 1), low.expand(*q.shape[:3], 1)], 3)
        keys = functional.pad(functional.pad(k.to(dtype), (0, 2)), (0, 0, 1, 0))
        keys[:, :, 0, k.shape[3] :] = 1
        values = functional.pad(mask.zero_hidden(v).to(dtype), (0, 0, 1, 0))
        width = -(-max(queries.shape[3], values.shape[3]) // 8) * 8  # flash kernels want one multiple of 8
        keys, values = (functional.pad(x, (0, width - x.shape[3])) for x in (keys, values))
        queries = functional.pad(queries, (0, width - queries.shape[3]))
        if rules.is_plain and rules.causal and T == S:
            # A query more, which sees the sink alone and is not looked at, puts the others on the diagonal.
            queries = functional.pad(queries, (0, 0, 1, 0))
            out = _fused_call(mechanism, queries, keys, values, rules, scale)(is_causal=True)[:, :, 1:]
        elif rules.is_plain and not rules.causal:
            out = _fused_call(mechanism, queries, keys, values, rules, scale)()
        else:
            shown, blind = _dense_mask(q, rules, T, S)
            sink = shown.new_ones(()) if shown.dtype == torch.bool else shown.new_zeros(())
            shown = torch.cat([sink.expand(*shown.shape[:3], 1), shown], 3)
            out = _fused_call(mechanism, queries, keys, values, rules, scale)(attn_mask=shown).masked_fill(blind, 0)
    return out[..., : v.shape[3]]


def _is_rounded(mask: Mask, dtype: torch.dtype) -> bool:
    """Returns whether what the mask adds to scores would lose digits in this dtype."""
    return mask.depends_on_heads or (mask.bias is not None and mask.bias.dtype != dtype)


def _window_by_blocks(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, C: int
) -> Tensor:
    """Returns causal attention [B,H,T,V] within a window of at most C, C queries at a time over 2·C keys.

    A block of queries sees its own block of keys and the one before, so that the time grows with T·C and not with T².
    """
    # Split and not sliced: the gradient of a slice would be as long as the whole sequence.
    queries, keys, values = (x.split(C, 2) for x in (q, k, v))
    varies = mask.visible is not None or mask.documents is not None
    outs = []
    for i in range(len(queries)):
        before = max(0, i - 1)
        near_keys = torch.cat(keys[before : i + 1], 2)
        near_values = torch.cat(values[before : i + 1], 2)
        T = queries[i].shape[2]  # the last block may be shorter
        S = near_keys.shape[2]
        if varies or i < 2:  # all blocks but the first have the same rules where there are no others
            shown, blind = _dense_mask(q, rules_of_block(mask, before * C, before * C + S), T, S)
        call = _fused_call(mechanism, queries[i], near_keys, near_values, mask, scale)
        out = call(attn_mask=shown[:, :, :T, :S])
        outs.append(out.masked_fill(blind, 0) if varies else out)
    return torch.cat(outs, 2)


def _fused_call(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> Callable[..., Tensor]:
    """Returns the fused function with everything but its mask: PyTorch's, or regard's where a CPU drops weights."""
    p = 0.0
    if mechanism.training:
        p = mechanism.dropout
    attention: Callable[..., Tensor] = functional.scaled_dot_product_attention
    if p > 0 and dropout_attention.is_supported(q, mask):
        attention = dropout_attention.scaled_dot_product_attention
    return partial(attention, q, k, v, dropout_p=p, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _dense_mask(q: Tensor, mask: Mask, T: int, S: int) -> tuple[Tensor, Tensor]:
    """Returns the mask as a tensor of what may be seen, or of what is added to scores, and the rows that see nothing.

    Such a blind row sees everything instead, since a softmax over nothing is NaN; the caller sets it to zero.
    """
    allowed = mask.allowed(T, S, q.device)
    if not mask.adjusts_scores and allowed is not None:
        blind = ~allowed.any(-1, keepdim=True)
        return allowed | blind, blind
    heads = q.shape[1] if mask.depends_on_heads else 1
    dtype = q.dtype
    if not q.is_cuda:
        dtype = torch.promote_types(dtype, torch.float32)
    added = mask.adjusted_scores(torch.zeros(1, heads, T, S, dtype=dtype, device=q.device))
    if allowed is not None:
        added = added.masked_fill(~allowed, float("-inf"))
    blind = (added == float("-inf")).all(-1, keepdim=True)
    return added.masked_fill(blind, 0), blind


def _pad_to_one_width(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v zero-padded to one multiple of 8, as the flash kernels want; each query head has its values."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    v = mask.zero_hidden(v).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return tuple(functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))  # type: ignore[return-value]
