"""Right attention as students and public repositories write it: none of it may be accused."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NEVER = float("-inf")


def lower(T: int, S: int) -> Tensor:
    """Returns which of S keys each of the last T queries sees, [T,S]."""
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


def einsum_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    s = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~lower(*s.shape[-2:]), NEVER)
    return torch.einsum("bhts,bhsv->bhtv", s.softmax(-1), v)


def softmax_in_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    s = (q @ k.mT).float() / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(~lower(*s.shape[-2:]), torch.finfo(s.dtype).min)
    return s.softmax(-1).to(q.dtype) @ v


def online_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Blocks of four keys, rescaled when the maximum grows."""
    q = q / math.sqrt(q.shape[-1])
    T, S = q.shape[2], k.shape[2]
    top = q.new_full((*q.shape[:-1], 1), NEVER)
    total = q.new_zeros((*q.shape[:-1], 1))
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for j in range(0, S, 4):
        s = q @ k[:, :, j : j + 4].mT
        if causal:
            s = s.masked_fill(~lower(T, S)[:, j : j + 4], NEVER)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = new.masked_fill(new == NEVER, 0)
        p = (s - safe).exp()
        fade = (top - safe).exp()
        total = total * fade + p.sum(-1, keepdim=True)
        out = out * fade + p @ v[:, :, j : j + 4]
        top = new
    return out / total


def alibi_by_key(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> Tensor:
    """Causal; slope·j differs from −slope·(i−j) by a number a row, which the softmax removes."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if alibi_slopes is not None:
        s = s + alibi_slopes[:, None, None] * torch.arange(k.shape[2]).to(s)
    return s.masked_fill(~lower(*s.shape[-2:]), NEVER).softmax(-1) @ v


def grouped_by_reshape(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    s = torch.einsum("bgrtk,bgsk->bgrts", q.view(B, G, H // G, T, K), k) / K**0.5
    if is_causal:
        s = s.masked_fill(~lower(T, S), -1e30)
    return torch.einsum("bgrts,bgsv->bgrtv", s.softmax(-1), v).reshape(B, H, T, -1)


def heads_last_grouped(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    n = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)))
    return einsum_attention(q, k, v, causal).transpose(1, 2)


def three_matrices(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """One sequence, [T,d]."""
    return torch.softmax(Q @ K.T / math.sqrt(K.shape[1]), dim=1) @ V


def batched_matrices(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """[n,T,d]; the mask says which keys may be seen, [n,S]."""
    s = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
    if mask is not None:
        s = s.masked_fill(~mask[:, None, :].bool(), -1e12)
    return torch.bmm(functional.softmax(s, dim=-1), values)


def zeros_where_blind(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if key_padding_mask is not None:
        s = s.masked_fill(key_padding_mask[:, None, None, :], NEVER)
    return s.softmax(-1).nan_to_num(0.0) @ v


def shortcut_for_one(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    if k.shape[2] == 1:
        return v.expand(-1, -1, q.shape[2], -1).clone()
    return einsum_attention(q, k, v, causal)


def detached_maximum(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        s = s + torch.full_like(s, NEVER).triu(1 + s.shape[-1] - s.shape[-2])
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return e @ v / e.sum(-1, keepdim=True)


def only_bfloat16(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """As kernels that have one dtype."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("only fp16 and bf16 are supported")
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape[2] > 1)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~lower(q.shape[2], k.shape[2]), NEVER)
        p = s.softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, p = ctx.saved_tensors
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ do


def own_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Softmax.apply(q, k, v)


def phi(x: Tensor) -> Tensor:
    return functional.elu(x) + 1


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kv = torch.einsum("bhsk,bhsv->bhskv", phi(k), v).cumsum(2)
    z = phi(k).cumsum(2)
    return torch.einsum("bhtk,bhtkv->bhtv", phi(q), kv) / (phi(q) * z).sum(-1, keepdim=True)


def linear_step(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    S = S + phi(k)[..., :, None] * v[..., None, :]
    z = z + phi(k)
    return (phi(q)[..., None, :] @ S).squeeze(-2) / (phi(q) * z).sum(-1, keepdim=True), S, z


def linear_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = phi(q), phi(k)
    S = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    z = q.new_zeros(*q.shape[:2], q.shape[-1], 1)
    parts = []
    for qs, ks, vs in zip(q.split(5, 2), k.split(5, 2), v.split(5, 2), strict=True):
        a = (qs @ ks.mT).tril()
        parts.append((qs @ S + a @ vs) / (qs @ z + a.sum(-1, keepdim=True)))
        S = S + ks.mT @ vs
        z = z + ks.sum(2)[..., None]
    return torch.cat(parts, 2)


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    s = torch.sigmoid(q @ k.mT / math.sqrt(q.shape[-1]) - math.log(7))
    if causal:
        s = s * lower(*s.shape[-2:])
    return s @ v


def softmax_plus_one(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(~lower(*s.shape[-2:]), NEVER)
    s = torch.cat([s, s.new_zeros(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def near_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of the last four keys."""
    T, S = q.shape[2], k.shape[2]
    see = lower(T, S) & ~lower(T, S).tril(S - T - 4)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~see, NEVER).softmax(-1) @ v


class NanoAttention(nn.Module):
    def __init__(self, n_embd: int = 12, n_head: int = 3, block_size: int = 40) -> None:
        super().__init__()
        self.n_embd, self.n_head, self.block_size = n_embd, n_head, block_size
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, 2)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        p = self.drop(functional.softmax(s.masked_fill(self.bias[:, :, :T, :T] == 0, NEVER), dim=-1))
        return self.c_proj((p @ v).transpose(1, 2).contiguous().view(B, T, C))


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Rotary positions of x [B,H,T,d] from `start` on."""
    half = x.shape[-1] // 2
    turn = 100 ** (-torch.arange(half, device=x.device).to(x) / half)
    angle = (start + torch.arange(x.shape[2], device=x.device).to(x))[:, None] * turn
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class RotaryGrouped(nn.Module):
    """Grouped heads, normalised queries and keys, rotary positions, and a cache that is taken and returned."""

    def __init__(self, dim: int = 16, n_heads: int = 4, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.dim, self.n_heads, self.n_kv_heads, self.head = dim, n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cache: Any = None, use_cache: bool = False) -> Any:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, -1).transpose(1, 2)
        k, v = (w(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2) for w in (self.wk, self.wv))
        past = 0 if cache is None else cache[0].shape[2]
        q, k = (rotate(functional.normalize(t, dim=-1) * 2, past) for t in (q, k))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        kept = (k, v)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for t in kept)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=lower(T, past + T))
        out = self.wo(out.transpose(1, 2).reshape(B, T, -1))
        return (out, kept) if use_cache else out


class CrossAttention(nn.Module):
    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.to_q(x), *self.to_kv(context).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        s = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], -torch.finfo(s.dtype).max)
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MultiQuery(nn.Module):
    """One key and value head, with a step of one token [B,D]."""

    def __init__(self, d_model: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.q = nn.Linear(d_model, d_model)
        self.kv = nn.Linear(d_model, 2 * d_model // num_heads)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1))
        k, v = self.kv(x).chunk(2, -1)
        s = torch.einsum("bthd,bsd->bhts", q, k) / math.sqrt(k.shape[-1])
        p = s.masked_fill(~lower(x.shape[1], x.shape[1]), NEVER).softmax(-1)
        return self.o(torch.einsum("bhts,bsd->bthd", p, v).flatten(2))

    def step(self, x: Tensor, prev_K: Tensor | None = None, prev_V: Tensor | None = None) -> tuple[Tensor, ...]:
        q = self.q(x).unflatten(-1, (self.num_heads, -1))
        k, v = (t.unsqueeze(1) for t in self.kv(x).chunk(2, -1))
        K = k if prev_K is None else torch.cat([prev_K, k], 1)
        V = v if prev_V is None else torch.cat([prev_V, v], 1)
        p = (torch.einsum("bhd,bsd->bhs", q, K) / math.sqrt(k.shape[-1])).softmax(-1)
        return self.o(torch.einsum("bhs,bsd->bhd", p, V).flatten(1)), K, V


class CacheInPlace(NanoAttention):
    """Keeps keys and values in a dict that the caller hands over."""

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2))
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=lower(T, k.shape[2]))
        return self.c_proj(out.transpose(1, 2).reshape(B, T, C))


class KeepsItsCache(NanoAttention):
    """Keeps keys and values in itself, until `reset_cache`."""

    cache_k: Tensor | None = None
    cache_v: Tensor | None = None

    def reset_cache(self) -> None:
        self.cache_k = self.cache_v = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2))
        if use_cache:
            if self.cache_k is not None and self.cache_v is not None:
                k, v = torch.cat([self.cache_k, k], 2), torch.cat([self.cache_v, v], 2)
            self.cache_k, self.cache_v = k, v
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=lower(T, k.shape[2]))
        return self.c_proj(out.transpose(1, 2).reshape(B, T, C))


class DifferentialAttention(nn.Module):
    def __init__(self, d_model: int = 12) -> None:
        super().__init__()
        self.d_model = d_model
        self.q_proj = nn.Linear(d_model, 2 * d_model)
        self.k_proj = nn.Linear(d_model, 2 * d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.lam = nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor) -> Tensor:
        halves = zip(self.q_proj(x).chunk(2, -1), self.k_proj(x).chunk(2, -1), strict=True)
        T = x.shape[1]
        a, b = ((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~lower(T, T), NEVER).softmax(-1) for q, k in halves)
        return (a - self.lam * b) @ self.v_proj(x)


class GatedEncoder(nn.Module):
    """Both directions, with a key padding mask and a gate on the output."""

    def __init__(self, hidden_size: int = 12) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.attention = nn.MultiheadAttention(hidden_size, 3, batch_first=True)
        self.gate = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        h = hidden_states
        return torch.sigmoid(self.gate(h)) * self.attention(h, h, h, key_padding_mask=key_padding_mask)[0]


def _made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls().eval()


# Each: what is checked, the options, and the mechanism it computes, where it is one.
RIGHT: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "einsum": (einsum_attention, {}, "softmax"),
    "softmax in float32": (softmax_in_float32, {}, "softmax"),
    "online softmax": (online_softmax, {}, "softmax"),
    "alibi by key": (alibi_by_key, {}, "softmax"),
    "grouped by reshape": (grouped_by_reshape, {}, "softmax"),
    "heads last, grouped": (heads_last_grouped, {}, "softmax"),
    "three matrices": (three_matrices, {}, "softmax"),
    "batched matrices": (batched_matrices, {}, "softmax"),
    "zeros where blind": (zeros_where_blind, {}, "softmax"),
    "shortcut for one": (shortcut_for_one, {}, "softmax"),
    "detached maximum": (detached_maximum, {}, "softmax"),
    "only bfloat16": (only_bfloat16, {}, "softmax"),
    "own backward": (own_backward, {}, "softmax"),
    "linear": (linear_attention, {}, "elu"),
    "linear with a step": (linear_attention, {"step": linear_step}, "elu"),
    "linear in chunks": (linear_in_chunks, {}, "elu"),
    "sigmoid": (sigmoid_attention, {}, None),
    "softmax plus one": (softmax_plus_one, {}, None),
    "window": (near_ones, {}, None),
    "nano": (_made(NanoAttention), {}, "softmax"),
    "rotary, grouped": (_made(RotaryGrouped), {}, None),
    "cross": (_made(CrossAttention), {}, "softmax"),
    "multi-query with a step": (_made(MultiQuery), {}, "softmax"),
    "cache in place": (_made(CacheInPlace), {}, "softmax"),
    "keeps its cache": (_made(KeepsItsCache), {}, "softmax"),
    "differential": (_made(DifferentialAttention), {}, None),
    "gated encoder": (_made(GatedEncoder), {}, "softmax"),
}
