"""Wrong attention of kinds that students and public repositories make, each with the laws that name its fault."""

from __future__ import annotations

import math
from typing import Any

import torch
from public_attention_right import (
    NEVER,
    CacheInPlace,
    CrossAttention,
    KeepsItsCache,
    MultiQuery,
    NanoAttention,
    RotaryGrouped,
    einsum_attention,
    linear_attention,
    lower,
    phi,
    rotate,
)
from torch import Tensor, nn
from torch.nn import functional


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def masked(s: Tensor, causal: bool = True) -> Tensor:
    return s.masked_fill(~lower(*s.shape[-2:]), NEVER) if causal else s


def forgets_to_rescale(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Online softmax whose sums keep the factor of the maximum they were made with."""
    S = k.shape[2]
    s = masked(scores(q, k), causal)
    top = q.new_full((*q.shape[:-1], 1), -1e4)
    total, out = q.new_zeros((*q.shape[:-1], 1)), q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for j in range(0, S, 4):
        top = torch.maximum(top, s[..., j : j + 4].amax(-1, keepdim=True))
        p = (s[..., j : j + 4] - top).exp()
        total, out = total + p.sum(-1, keepdim=True), out + p @ v[:, :, j : j + 4]
    return out / total


def drops_the_last_block(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Whole blocks of 8 keys only; what is left over beyond the first block is not read."""
    n = max(k.shape[2] // 8 * 8, min(8, k.shape[2]))
    s = masked(scores(q, k), causal)[..., :n]
    return s.softmax(-1).nan_to_num(0) @ v[:, :, :n]


def block_sees_its_own_future(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal by blocks of 4, with no mask inside the diagonal block."""
    i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    return scores(q, k).masked_fill(i // 4 < j // 4, NEVER).softmax(-1) @ v


def query_blocks_without_offset(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Queries in blocks of 6, each masked as if it were the first."""
    parts = []
    for block in q.split(6, 2):
        s = scores(block, k)
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), NEVER)
        parts.append(s.softmax(-1) @ v)
    return torch.cat(parts, 2)


def halves_averaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two halves of the keys, merged without their weights."""
    n = (k.shape[2] + 1) // 2
    parts = [scores(q, ks).softmax(-1) @ vs for ks, vs in zip(k.split(n, 2), v.split(n, 2), strict=True)]
    return sum(parts) / len(parts)  # type: ignore[return-value]


def alibi_reversed(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> Tensor:
    s = scores(q, k)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * torch.arange(k.shape[2]).to(s)
    return masked(s).softmax(-1) @ v


def bias_transposed(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, bias: Tensor | None = None) -> Tensor:
    s = scores(q, k)
    if bias is not None:
        s = s + bias.mT
    return masked(s, causal).softmax(-1) @ v


def softcap_without_division(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, softcap: float = 0.0) -> Tensor:
    s = scores(q, k)
    if softcap:
        s = softcap * torch.tanh(s)
    return masked(s, causal).softmax(-1) @ v


def softcap_after_the_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Capped at 20, so that what was hidden comes back."""
    return (20 * torch.tanh(masked(scores(q, k), causal) / 20)).softmax(-1) @ v


def keys_and_values_swapped(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return masked(scores(q, v), causal).softmax(-1) @ k


def scaled_by_width(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return masked(q @ k.mT / q.shape[-1], causal).softmax(-1) @ v


def scaled_by_all_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return masked(q @ k.mT / math.sqrt(q.shape[1] * q.shape[-1]), causal).softmax(-1) @ v


def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(1) @ v


def hides_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Strictly earlier keys only; the first token sees nothing."""
    T, S = q.shape[2], k.shape[2]
    return scores(q, k).masked_fill(~lower(T, S).tril(S - T - 1), -1e30).softmax(-1) @ v


def groups_tiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    n = q.shape[1] // k.shape[1]
    return einsum_attention(q, k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1), is_causal)


def groups_by_their_mean(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """All queries of a group are replaced by their mean."""
    n = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, n)).mean(2)
    return einsum_attention(q, k, v, is_causal).repeat_interleave(n, 1)


def weights_summed_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bhtv->bhtv", scores(q, k).softmax(-1), v)


def mask_on_queries(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    s = scores(q, k)
    if visible is not None and q.shape[2] == k.shape[2]:
        s = s.masked_fill(~visible[:, None, :, None], -1e9)
    return s.softmax(-1) @ v


def mask_by_zero_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    s = scores(q, k)
    if mask is not None:
        s = s * mask[:, None, None, :].to(s)
    return s.softmax(-1) @ v


def mask_of_ten_thousand(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    s = scores(q, k)
    if attention_mask is not None:
        s = s + (1.0 - attention_mask[:, None, None, :].to(s)) * -10000.0
    return s.softmax(-1) @ v


def mask_of_the_first_row(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    s = scores(q, k)
    if visible is not None:
        s = s.masked_fill(~visible[0], -1e30)
    return s.softmax(-1) @ v


def scales_in_place(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    with torch.no_grad():
        q.mul_(q.shape[-1] ** -0.5)
    return masked(q @ k.mT, causal).softmax(-1) @ v


_MASKS: dict[str, Tensor] = {}


def keeps_its_first_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask from the first call, which hides nothing beyond the length of that call."""
    T, S = q.shape[2], k.shape[2]
    made = _MASKS.setdefault("mask", ~lower(T, S))
    hide = torch.zeros(T, S, dtype=torch.bool)
    n = min(T, S, *made.shape)
    hide[:n, :n] = made[:n, :n]
    return scores(q, k).masked_fill(hide, NEVER).softmax(-1) @ v


def dropout_for_ever(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return functional.dropout(masked(scores(q, k), causal).softmax(-1), 0.1) @ v


def detached_weights(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return masked(scores(q, k), causal).softmax(-1).detach() @ v


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = masked(scores(q, k)).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, p = ctx.saved_tensors
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))  # the scale is missing
        return ds @ k, ds.mT @ q, p.mT @ do


def backward_without_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _WrongBackward.apply(q, k, v)


def exp_without_maximum(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    e = masked(scores(q, k), causal).exp()
    return e @ v / e.sum(-1, keepdim=True)


def half_inside(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    p = masked(scores(q, k), causal).softmax(-1).to(torch.bfloat16)
    return p.to(v.dtype) @ v


def only_the_last_hundred(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """A table of 100 positions: farther keys are not seen."""
    T, S = q.shape[2], k.shape[2]
    far = torch.ones(T, S, dtype=torch.bool).tril(S - T - 100)
    return masked(scores(q, k), causal).masked_fill(far, NEVER).softmax(-1) @ v


def maximum_of_the_batch(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    s = scores(q, k)
    e = (s - s.max()).exp()
    if causal:
        e = e * lower(*s.shape[-2:])
    return e @ v / (e.sum(-1, keepdim=True) + 1e-6)


def normaliser_of_the_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention whose normaliser sums over all keys."""
    a = (phi(q) @ phi(k).mT).tril()
    return a @ v / (phi(q) @ phi(k).sum(2)[..., None])


def chunks_not_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention by chunks of 4 that writes a chunk before reading it."""
    q, k = phi(q), phi(k)
    S, z, parts = 0.0, 0.0, []
    for qs, ks, vs in zip(q.split(4, 2), k.split(4, 2), v.split(4, 2), strict=True):
        S, z = S + ks.mT @ vs, z + ks.sum(2)[..., None]
        parts.append(qs @ S / (qs @ z))
    return torch.cat(parts, 2)


def chunk_loses_a_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention by chunks of 4 whose state misses the last token of each."""
    q, k = phi(q), phi(k)
    S = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    z, parts = q.new_zeros(*q.shape[:2], q.shape[-1], 1), []
    for qs, ks, vs in zip(q.split(4, 2), k.split(4, 2), v.split(4, 2), strict=True):
        a = (qs @ ks.mT).tril()
        parts.append((qs @ S + a @ vs) / (qs @ z + a.sum(-1, keepdim=True)))
        S, z = S + ks[:, :, :-1].mT @ vs[:, :, :-1], z + ks[:, :, :-1].sum(2)[..., None]
    return torch.cat(parts, 2)


def step_without_normaliser(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    S = S + phi(k)[..., :, None] * v[..., None, :]
    z = phi(k)  # of the last token only
    return (phi(q)[..., None, :] @ S).squeeze(-2) / (phi(q) * z).sum(-1, keepdim=True), S, z


def scaled_by_length(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    return torch.softmax(Q @ K.T / math.sqrt(K.shape[0]), dim=1) @ V


def softmax_over_the_batch(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[n,T,d], along the wrong axis."""
    return functional.softmax(torch.bmm(queries, keys.transpose(1, 2)) / queries.shape[-1] ** 0.5, dim=0) @ values


class SplitWithoutTranspose(NanoAttention):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.reshape(B, self.n_head, T, -1) for t in self.c_attn(x).split(self.n_embd, 2))
        return self.c_proj(einsum_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class AttendsOverHeads(NanoAttention):
    """Heads are split to [B,T,H,d] and never transposed: each token attends among its own heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.n_head, -1)) for t in self.c_attn(x).split(self.n_embd, 2))
        return self.c_proj((scores(q, k).softmax(-1) @ v).flatten(2))


class MaskUpsideDown(NanoAttention):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2))
        s = scores(q, k).masked_fill(self.bias.mT[:, :, :T, :T] == 0, NEVER)  # type: ignore[union-attr]
        return self.c_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class CausalNormedOverTime(NanoAttention):
    """Normalises tokens by the mean of the whole sequence before it attends."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class ScaledByModelWidth(NanoAttention):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2))
        s = masked(q @ k.mT / math.sqrt(C))
        return self.c_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class DropoutNotAModule(NanoAttention):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.1)


class RotaryForgetsThePast(RotaryGrouped):
    """Queries and keys of a step are turned as if they were the first tokens."""

    def forward(self, x: Tensor, cache: Any = None, use_cache: bool = False) -> Any:
        B, T, _ = x.shape
        q = rotate(self.wq(x).view(B, T, self.n_heads, -1).transpose(1, 2))
        k, v = (w(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2) for w in (self.wk, self.wv))
        k = rotate(k)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        kept = (k, v)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for t in kept)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=lower(T, k.shape[2]))
        out = self.wo(out.transpose(1, 2).reshape(B, T, -1))
        return (out, kept) if use_cache else out


class StepOfAnotherScale(MultiQuery):
    def step(self, x: Tensor, prev_K: Tensor | None = None, prev_V: Tensor | None = None) -> tuple[Tensor, ...]:
        q = self.q(x).unflatten(-1, (self.num_heads, -1))
        k, v = (t.unsqueeze(1) for t in self.kv(x).chunk(2, -1))
        K = k if prev_K is None else torch.cat([prev_K, k], 1)
        V = v if prev_V is None else torch.cat([prev_V, v], 1)
        p = (torch.einsum("bhd,bsd->bhs", q, K) / math.sqrt(self.d_model)).softmax(-1)
        return self.o(torch.einsum("bhs,bsd->bhd", p, V).flatten(1)), K, V


class OverwritesItsCache(CacheInPlace):
    """The dict keeps the newest token only, once it has a first one."""

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        out = super().forward(x, cache)
        if cache:
            cache.update({name: kept[:, :, -x.shape[1] :] for name, kept in cache.items()})
        return out


class CacheOfAllCalls(KeepsItsCache):
    """Uses its cache whether or not it is asked to."""

    def forward(self, x: Tensor) -> Tensor:
        if self.cache_k is not None and self.cache_k.shape[0] != x.shape[0]:
            self.reset_cache()
        return super().forward(x, use_cache=True)


class CrossBackwards(CrossAttention):
    """Queries from the context, keys and values from the tokens."""

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.to_q(context), *self.to_kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.to_out((scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


def _made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls().eval()


# Each: what is checked, the options, laws of which one has to be broken without like=, and the same with like=.
Expected = tuple[Any, dict[str, Any], set[str], tuple[str, set[str]] | None]
SAME = {"same"}
WRONG: dict[str, Expected] = {
    "forgets to rescale": (forgets_to_rescale, {}, set(), ("softmax", SAME)),
    "drops the last block": (drops_the_last_block, {}, {"looks-ahead"}, ("softmax", SAME)),
    "block sees its own future": (block_sees_its_own_future, {"causal": True}, {"looks-ahead"}, None),
    "query blocks without offset": (query_blocks_without_offset, {}, {"queries"}, ("softmax", SAME)),
    "halves averaged": (halves_averaged, {}, set(), ("softmax", SAME)),
    "alibi reversed": (alibi_reversed, {}, set(), ("softmax", SAME)),
    "bias transposed": (bias_transposed, {}, set(), ("softmax", SAME)),
    "softcap without division": (softcap_without_division, {}, set(), ("softmax", SAME)),
    "softcap after the mask": (softcap_after_the_mask, {}, {"looks-ahead"}, None),
    "keys and values swapped": (keys_and_values_swapped, {}, set(), ("softmax", SAME)),
    "scaled by width": (scaled_by_width, {}, set(), ("softmax", SAME)),
    "scaled by all heads": (scaled_by_all_heads, {}, set(), ("softmax", SAME)),
    "softmax over heads": (softmax_over_heads, {}, {"heads"}, ("softmax", SAME | {"heads"})),
    "hides itself": (hides_itself, {"causal": True}, {"looks-ahead"}, ("softmax", SAME)),
    "groups tiled": (groups_tiled, {}, {"heads"}, ("softmax", SAME | {"heads"})),
    "groups by their mean": (groups_by_their_mean, {}, {"heads"}, ("softmax", SAME | {"heads"})),
    "attends over heads": (_made(AttendsOverHeads), {}, {"attends"}, None),
    "weights summed out": (weights_summed_out, {}, {"attends"}, ("softmax", SAME)),
    "mask on queries": (mask_on_queries, {}, {"hidden"}, ("softmax", SAME | {"hidden"})),
    "mask by zero scores": (mask_by_zero_scores, {}, {"hidden"}, ("softmax", SAME | {"hidden"})),
    "mask of ten thousand": (mask_of_ten_thousand, {}, {"hidden"}, None),
    "mask of the first row": (mask_of_the_first_row, {}, {"hidden", "batch"}, None),
    "scales in place": (scales_in_place, {}, {"pure"}, None),
    "keeps its first mask": (keeps_its_first_mask, {"causal": True}, {"looks-ahead", "pure"}, None),
    "dropout for ever": (dropout_for_ever, {}, {"pure"}, None),
    "detached weights": (detached_weights, {}, {"gradients"}, None),
    "backward without scale": (backward_without_scale, {}, {"gradients"}, None),
    "exp without maximum": (exp_without_maximum, {}, {"precision"}, None),
    "half inside": (half_inside, {}, {"precision"}, None),
    "only the last hundred": (only_the_last_hundred, {}, set(), ("softmax", SAME)),
    "maximum of the batch": (maximum_of_the_batch, {}, {"batch", "looks-ahead"}, None),
    "normaliser of the whole": (normaliser_of_the_whole, {}, {"looks-ahead"}, None),
    "chunks not masked": (chunks_not_masked, {"causal": True}, {"looks-ahead"}, None),
    "chunk loses a token": (chunk_loses_a_token, {}, set(), ("elu", SAME)),
    "step without normaliser": (linear_attention, {"step": step_without_normaliser}, {"recurrent"}, None),
    "scaled by length": (scaled_by_length, {}, set(), ("softmax", SAME)),
    "softmax over the batch": (softmax_over_the_batch, {}, {"batch"}, ("softmax", SAME | {"batch"})),
    "split without transpose": (_made(SplitWithoutTranspose), {"causal": True}, {"looks-ahead"}, ("softmax", SAME)),
    "mask upside down": (_made(MaskUpsideDown), {"causal": True}, {"looks-ahead"}, ("softmax", SAME)),
    "normed over time": (_made(CausalNormedOverTime), {"causal": True}, {"looks-ahead"}, None),
    "scaled by model width": (_made(ScaledByModelWidth), {}, set(), ("softmax", SAME)),
    "dropout not a module": (_made(DropoutNotAModule), {}, {"pure"}, None),
    "rotary forgets the past": (_made(RotaryForgetsThePast), {}, {"recurrent"}, None),
    "step of another scale": (_made(StepOfAnotherScale), {}, {"recurrent"}, None),
    "overwrites its cache": (_made(OverwritesItsCache), {}, {"recurrent"}, None),
    "cache of all calls": (_made(CacheOfAllCalls), {}, {"pure"}, None),
    "cross backwards": (_made(CrossBackwards), {}, {"queries", "hidden", "attends"}, None),
}
