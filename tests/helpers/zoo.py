"""Right and wrong attention as people write it, in many calling conventions; none has a name that regard knows.

WRONG maps a name to (attention, the law that must name its fault, words of the hint). RIGHT is attention that no law
may accuse; SOFTMAX names those of it that compute softmax attention.
"""

import math

import torch
from torch import nn
from torch.nn import functional

WRONG = {}
RIGHT = {}
SOFTMAX = set()


def wrong(law, words=""):
    def put(thing):
        torch.manual_seed(3)
        WRONG[thing.__name__] = (thing() if isinstance(thing, type) else thing, law, words)
        return thing

    return put


def right(thing, softmax=True):
    torch.manual_seed(3)
    RIGHT[thing.__name__] = thing() if isinstance(thing, type) else thing
    if softmax:
        SOFTMAX.add(thing.__name__)
    return thing


def right_but_no_softmax(thing):
    return right(thing, softmax=False)


def see(T, S, offset=0):
    return torch.ones(T, S, dtype=torch.bool).tril(S - T + offset)


def scores(q, k, causal=True, offset=0, fill=-torch.inf):
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        raw = raw.masked_fill(~see(*raw.shape[-2:], offset), fill)
    return raw


@wrong("looks-ahead", "triu(2) instead of triu(1)")
def sees_one_more(q, k, v, causal=True):
    return scores(q, k, causal, offset=1).softmax(-1) @ v


@wrong("looks-ahead", "weights masked after the softmax")
def masks_weights(q, k, v, causal=True):
    weights = scores(q, k, causal=False).softmax(-1)
    return (weights.tril() if causal else weights) @ v


@wrong("looks-ahead")
def minus_ten_thousand_ahead(q, k, v, causal=True):
    return scores(q, k, causal, fill=-1e4).softmax(-1) @ v


@wrong("same", "divided by √T")
def divides_by_the_length(q, k, v, causal=True):
    return scores(q * (q.shape[-1] / q.shape[-2]) ** 0.5, k, causal).softmax(-1) @ v


@wrong("heads", "softmax normalised over the heads")
def normalises_over_heads(q, k, v, causal=True):
    weights = scores(q, k, causal=False).softmax(1)
    return (weights.tril() if causal else weights) @ v


@wrong("same", "its scores are 0.693 times as large")
def exp2_without_log2e(q, k, v, causal=True):
    raw = scores(q, k, causal)
    weights = torch.exp2(raw - raw.amax(-1, keepdim=True))
    return weights @ v / weights.sum(-1, keepdim=True)


@wrong("same", "wrong from 9 on")
def forgets_to_rescale(q, k, v, causal=True, block=8):
    """An online softmax whose output is not rescaled when the running maximum grows."""
    T, S = q.shape[-2], k.shape[-2]
    out, total = 0.0, 0.0
    top = torch.full_like(q[..., :1], -1e30)
    for a in range(0, S, block):
        raw = q @ k[..., a : a + block, :].mT / math.sqrt(q.shape[-1])
        if causal:
            raw = raw.masked_fill(~see(T, S)[:, a : a + block], -torch.inf)
        new = torch.maximum(top, raw.amax(-1, keepdim=True))
        part = (raw - new).exp()
        total = total * (top - new).exp() + part.sum(-1, keepdim=True)
        out = out + part @ v[..., a : a + block, :]
        top = new
    return out / total


@wrong("precision", "half precision")
def weights_in_bfloat16(q, k, v, causal=True):
    return scores(q, k, causal).softmax(-1).bfloat16().to(v.dtype) @ v


@wrong("pure")
def scales_in_place(q, k, v, causal=True):
    q *= q.shape[-1] ** -0.5
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)


@wrong("pure", "is dropout left on")
def dropout_left_on(q, k, v, causal=True):
    return functional.dropout(scores(q, k, causal).softmax(-1), 0.1) @ v


@wrong("same", "outputs with bias given")
def adds_the_bias_before_the_scale(q, k, v, bias=None, causal=True):
    raw = scores(q, k, causal)
    if bias is not None:
        raw = raw + bias / math.sqrt(q.shape[-1])
    return raw.softmax(-1) @ v


@wrong("same", "outputs with slopes given")
def alibi_turned_round(q, k, v, slopes=None, causal=True):
    raw = scores(q, k, causal)
    T, S = raw.shape[-2:]
    if slopes is not None:
        raw = raw + slopes[:, None, None] * (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    return raw.softmax(-1) @ v


@wrong("batch", "set to zero")
def zeroes_hidden_keys(q, k, v, visible=None):
    if visible is not None:
        k, v = (x * visible[:, None, :, None] for x in (k, v))
    return scores(q, k, causal=False).softmax(-1) @ v


class Heads(nn.Module):
    """Causal self-attention with fused projections; a subclass overrides one step."""

    def __init__(self, width=24, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def scale(self, q):
        return q.shape[-1] ** -0.5

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = map(self.split, self.c_attn(x).chunk(3, -1))
        raw = (q @ k.mT * self.scale(q)).masked_fill(~see(x.shape[1], x.shape[1]), -torch.inf)
        return self.c_proj(self.merge(raw.softmax(-1) @ v))


@wrong("same", "the width of all heads")
class DividesByTheModelsWidth(Heads):
    def scale(self, q):
        return (q.shape[-1] * self.n_head) ** -0.5


@wrong("looks-ahead", "merged by a view")
class MergesByAView(Heads):
    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


class Cached(Heads):
    """Takes and returns the keys and values so far."""

    offset = True

    def forward(self, x, past=None, use_cache=False):
        q, k, v = map(self.split, self.c_attn(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        T, S = q.shape[2], k.shape[2]
        allowed = see(T, S) if self.offset else torch.ones(T, S, dtype=torch.bool).tril()
        raw = (q @ k.mT * self.scale(q)).masked_fill(~allowed, -torch.inf)
        out = self.c_proj(self.merge(raw.softmax(-1) @ v))
        return (out, (k, v)) if use_cache else out


@wrong("recurrent")
class MasksACacheFromTheLeft(Cached):
    offset = False


right(Heads)
right(Cached)


@right
def heads_last(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """[B,T,H,K], as flash-attn has it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (scores(q, k, causal).softmax(-1) @ v).transpose(1, 2)


@right
def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """An attention function of transformers: repeated keys, an added mask, output [B,T,H,V]."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    raw = query @ key.mT * scaling
    if attention_mask is not None:
        raw = raw + attention_mask
    return (raw.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(1, 2), None


@right
def one_sequence(q, k, v):
    """[T,K]"""
    if q.dim() != 2:
        raise ValueError("expected [T,K]")
    return torch.softmax(q @ k.T / q.shape[1] ** 0.5, 1) @ v


@right
def packed(qkv, causal=False):
    """[B,T,3,H,K]"""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return (scores(q, k, causal).softmax(-1) @ v).transpose(1, 2)


@right
def merged_heads(q, k, v, num_heads):
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return (scores(q, k, causal=False).softmax(-1) @ v).transpose(1, 2).flatten(2)


@right
def adjustable(q, k, v, bias=None, slopes=None, softcap=None, causal=True):
    raw = scores(q, k, causal=False)
    T, S = raw.shape[-2:]
    if softcap is not None:
        raw = softcap * torch.tanh(raw / softcap)
    if slopes is not None:
        raw = raw - slopes[:, None, None] * (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    if bias is not None:
        raw = raw + bias
    if causal:
        raw = raw.masked_fill(~see(T, S), -torch.inf)
    return raw.softmax(-1) @ v


@right
class OverAContext(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.heads = 4
        self.wq, self.wkv, self.wo = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, memory):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.wq(x), *self.wkv(memory).chunk(2, -1)))
        return self.wo(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@right_but_no_softmax
def both_ways_in_a_window(q, k, v):
    T = q.shape[2]
    if k.shape[2] != T:
        raise ValueError("as many queries as keys")
    far = (torch.arange(T)[:, None] - torch.arange(T)).abs() > 2
    return scores(q, k, causal=False).masked_fill(far, -torch.inf).softmax(-1) @ v


@right_but_no_softmax
def retention(q, k, v, causal=True):
    """Similarities of either sign, not normalised."""
    T, S = q.shape[-2], k.shape[-2]
    distance = (torch.arange(T)[:, None] + S - T - torch.arange(S)).to(q.dtype)
    decay = 0.9 ** distance.abs()
    return (q @ k.mT * (decay * (distance >= 0) if causal else decay)) @ v


class RotaryInside(Heads):
    """Positions within: nothing to compare with softmax, and nothing to accuse."""

    def turn(self, x):
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, x):
        q, k, v = map(self.split, self.c_attn(x).chunk(3, -1))
        return self.c_proj(self.merge(scores(self.turn(q), self.turn(k)).softmax(-1) @ v))


right_but_no_softmax(RotaryInside)


@wrong("averages", "positions applied to values")
class RotaryOnValuesToo(RotaryInside):
    def split(self, x):
        return self.turn(super().split(x))

    def forward(self, x):
        return Heads.forward(self, x)


@right_but_no_softmax
class EluFromAState(nn.Module):
    def forward(self, q, k, v, state=None, use_cache=False):
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        sums = torch.cumsum(k[..., None] * v[..., None, :], 2)
        total = k.cumsum(2)
        if state is not None:
            sums, total = sums + state[0][:, :, None], total + state[1][:, :, None]
        out = torch.einsum("bhtk,bhtkv->bhtv", q, sums) / (q * total).sum(-1, keepdim=True)
        return (out, (sums[:, :, -1], total[:, :, -1])) if use_cache else out


@wrong("precision", "does a maximum begin at zero")
def begins_its_maximum_at_zero(q, k, v, causal=True):
    """As an online softmax does whose maximum is made by zeros: all scores of a row may lie below."""
    raw = scores(q, k, causal)
    weights = (raw - raw.amax(-1, keepdim=True).clamp(min=0)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


@wrong("same", "with weights transposed")
def transposes_its_weights(q, k, v):
    return torch.einsum("bhts,bhtv->bhsv", scores(q, k, causal=False).softmax(-1), v)


@wrong("same", "in every row: are values or outputs scaled?")
def scales_values_too(q, k, v, causal=True):
    q, k, v = (x * q.shape[-1] ** -0.25 for x in (q, k, v))
    return scores(q * q.shape[-1] ** 0.5, k, causal).softmax(-1) @ v


@wrong("batch", "does it want tokens first")
class NeverSaysBatchFirst(nn.Module):
    def __init__(self, d_model=24):
        super().__init__()
        self.d_model, self.attention = d_model, nn.MultiheadAttention(d_model, 4)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@right
def keys_less_their_mean(q, k, v, causal=True):
    """A number less in all scores of a row, but for the rounding of large ones."""
    return scores(q, k - k.mean(2, keepdim=True), causal).softmax(-1) @ v


@right
def by_name(*, query, key, value, is_causal=False):
    return scores(query, key, is_causal).softmax(-1) @ value


@right
class InAnotherOrder(nn.Module):
    def __init__(self, embed_size=24, heads=4):
        super().__init__()
        self.embed_size, self.heads = embed_size, heads
        self.values, self.keys, self.queries = (nn.Linear(embed_size, embed_size) for _ in range(3))

    def forward(self, values, keys, query, mask):
        split = (made.unflatten(-1, (self.heads, -1)) for made in (self.queries(query), self.keys(keys)))
        energy = torch.einsum("nqhd,nkhd->nhqk", *split) / math.sqrt(self.embed_size // self.heads)
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -1e20)
        values = self.values(values).unflatten(-1, (self.heads, -1))
        return torch.einsum("nhqk,nkhd->nqhd", energy.softmax(-1), values).flatten(2)


@right
def with_lengths(queries, keys, values, valid_lens):
    raw = scores(queries, keys, causal=False)
    if valid_lens is not None:
        raw = raw.masked_fill(torch.arange(raw.shape[-1]) >= valid_lens[:, None, None, None], -1e6)
    return raw.softmax(-1) @ values


@right_but_no_softmax
class TokensBeforeTheBatch(Heads):
    """x: Time x Batch x Channel"""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@right_but_no_softmax
class OfOneLength(nn.Module):
    """Projects keys and values along the tokens, of which there are always as many."""

    def __init__(self, dim=24, seq_len=16):
        super().__init__()
        self.dim, self.seq_len = dim, seq_len
        self.to_q, self.to_kv, self.shorten = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(seq_len, 5)

    def forward(self, x):
        k, v = self.shorten(self.to_kv(x).mT).mT.chunk(2, -1)
        return scores(self.to_q(x), k, causal=False).softmax(-1) @ v


@right_but_no_softmax
class DecoderLayer(nn.TransformerDecoderLayer):
    """Its queries attend to one another before they attend to their context."""

    def __init__(self):
        super().__init__(24, 4, 32, batch_first=True)


@wrong("same", "is a score of 0 taken for a hidden one")
def hides_what_is_zero(q, k, v, causal=True):
    raw = scores(q, k, causal=False)
    if causal:
        raw = raw.masked_fill(raw.tril(raw.shape[3] - raw.shape[2]) == 0, -torch.inf)
    return raw.softmax(-1) @ v


@right_but_no_softmax
def rectified(q, k, v, causal=True):
    """Where no score is positive, all weights are zero, and values do not matter."""
    raw = scores(q, k, causal=False).relu()
    return (raw * see(*raw.shape[-2:]) if causal else raw) @ v


@right_but_no_softmax
class EluOverTokens(Heads):
    """Features of tokens that are a hundred times as large vanish together, in any implementation of elu + 1."""

    def forward(self, x):
        q, k, v = map(self.split, self.c_attn(x).chunk(3, -1))
        similar = (functional.elu(q) + 1) @ (functional.elu(k) + 1).mT
        similar = similar * see(*similar.shape[-2:])
        return self.c_proj(self.merge(similar @ v / similar.sum(-1, keepdim=True)))


@right
def with_keys_shown_by_ones(query, key, value, attention_mask):
    """A mask [B,S] that must be given, and gets axes of its own: one of pairs would be broadcast to five axes."""
    raw = scores(query, key, causal=False)
    if attention_mask is not None:
        raw = raw + (1.0 - attention_mask[:, None, None, :].to(raw)) * torch.finfo(raw.dtype).min
    return raw.softmax(-1) @ value


class Pooled(nn.Module):
    """A vector a sequence: tokens weighed by one learned query."""

    def __init__(self, width=24):
        super().__init__()
        self.query, self.made = nn.Parameter(torch.randn(width)), nn.Linear(width, 2 * width)

    def forward(self, x, key_padding_mask=None):
        k, v = self.made(x).chunk(2, -1)
        raw = k @ self.query / self.query.shape[0] ** 0.5
        if key_padding_mask is not None:
            raw = raw.masked_fill(key_padding_mask, -torch.inf)
        return (raw.softmax(-1).unsqueeze(1) @ v).squeeze(1)


class PooledOverPadding(Pooled):
    def forward(self, x, key_padding_mask=None):
        return super().forward(x)


@right
def tokens_before_the_batch(q, k, v):
    """q [sq, b, np, hn], as Megatron has it."""
    raw = torch.einsum("tbhk,sbhk->bhts", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhts,sbhv->tbhv", raw.softmax(-1), v)


@right_but_no_softmax
class LongConvolution(nn.Module):
    """Looks at no later token but for the rounding of FFT, and nobody says that it is causal."""

    def __init__(self, width=24):
        super().__init__()
        self.filters, self.gate = nn.Parameter(torch.randn(64, width) / 8), nn.Linear(width, width)

    def forward(self, x):
        T = x.shape[1]
        filters = functional.pad(self.filters[:T], (0, 0, 0, max(0, T - 64)))
        made = torch.fft.rfft(x * self.gate(x), n=2 * T, dim=1) * torch.fft.rfft(filters, n=2 * T, dim=0)
        return torch.fft.irfft(made, n=2 * T, dim=1)[:, :T]


@right_but_no_softmax
class GatedUnit(nn.Module):
    """The fifth power of its tokens, which float16 does not hold, and no exponential."""

    def __init__(self, width=24):
        super().__init__()
        self.made, self.back = nn.Linear(width, 4 * width), nn.Linear(width, width)

    def forward(self, x):
        gate, v, q, k = functional.silu(self.made(x)).chunk(4, -1)
        return self.back(gate * ((q @ k.mT / x.shape[1]).relu() ** 2 @ v))
