"""Attention whose outputs look otherwise than its inputs, whose heads share keys, or that takes one value of a flag."""

import pytest
import torch
from torch.nn import functional
from zoo import scores, see

import regard

DRAWS = 6


def judged(thing, *only, **options):
    """Returns the verdicts by the names of their laws."""
    return {v.law: v for v in regard.check(thing, only=only, draws=DRAWS, **options)}


def as_in_transformers(query, key, value, attention_mask=None, scaling=None):
    raw = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        raw = raw + attention_mask
    weights = raw.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def merged_heads(q, k, v, causal=True):
    return (scores(q, k, causal).softmax(-1) @ v).transpose(1, 2).flatten(2)


def merged_tokens_first(q, k, v):
    """q, k, v [seq, batch, heads, dim], as (T, B, H, D): seq first."""
    out = scores(*(x.permute(1, 2, 0, 3) for x in (q, k)), causal=False).softmax(-1) @ v.permute(1, 2, 0, 3)
    return out.permute(2, 0, 1, 3).flatten(2)


def merged_from_heads_last(q, k, v):
    return merged_heads(*(x.transpose(1, 2) for x in (q, k, v)), causal=False)


@pytest.mark.parametrize(
    "thing", [as_in_transformers, merged_heads, merged_tokens_first, merged_from_heads_last], ids=lambda f: f.__name__
)
def test_outputs_in_another_form_than_inputs_are_not_accused(thing):
    verdicts = judged(thing, "heads", "batch", "queries", "looks-ahead", like="softmax")
    assert verdicts["same"].status == verdicts["heads"].status == "holds", verdicts
    assert "broken" not in {v.status for v in verdicts.values()}, verdicts


def merged_without_a_transpose(q, k, v, causal=True):
    out = scores(q, k, causal).softmax(-1) @ v
    return out.reshape(out.shape[0], out.shape[2], -1)


def sees_the_next(query, key, value):
    """Causal attention, of which later tokens are seen."""
    raw = scores(query, key, causal=False).masked_fill(~see(query.shape[2], key.shape[2], 1), -torch.inf)
    return (raw.softmax(-1) @ value).transpose(1, 2)


def test_outputs_in_another_form_are_still_judged():
    assert judged(merged_without_a_transpose, "heads")["heads"].status == "broken"
    assert judged(sees_the_next, "looks-ahead")["looks-ahead"].status == "broken"


def multi_query(q, k, v):
    """Causal attention of heads that share their keys."""
    raw = torch.einsum("bhtd,bsd->bhts", q, k) * q.shape[-1] ** -0.5
    return raw.masked_fill(~see(*raw.shape[-2:]), -torch.inf).softmax(-1) @ v[:, None]


def multi_query_heads_last(q, k, v):
    """Causal attention of heads that share their keys."""
    return multi_query(q.transpose(1, 2), k, v).transpose(1, 2)


def multi_query_of_the_next_head(q, k, v):
    """Causal attention of heads that share their keys."""
    return multi_query(q.roll(1, 1), k, v)


def test_heads_that_share_keys_without_an_axis_of_heads_are_asked():
    for thing in (multi_query, multi_query_heads_last):
        verdicts = judged(thing, "heads", "looks-ahead", like="softmax")
        assert {v.status for v in verdicts.values()} == {"holds"}, (thing.__name__, verdicts)
    assert judged(multi_query_of_the_next_head, "heads")["heads"].status == "broken"


def chunked(q, k, v, causal, carried):
    """Linear attention in chunks of four; `carried` says whether the normaliser goes from chunk to chunk."""
    if not causal:
        raise NotImplementedError("causal only")
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    state = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    total = q.new_zeros(*k.shape[:2], k.shape[3], 1)
    parts = []
    for n in range(0, q.shape[2], 4):
        some_q, some_k, some_v = (x[:, :, n : n + 4] for x in (q, k, v))
        near = (some_q @ some_k.mT).tril()
        sums = near.sum(-1, keepdim=True) + some_q @ total
        parts.append((near @ some_v + some_q @ state) / sums)
        state = state + some_k.mT @ some_v
        if carried:
            total = total + some_k.sum(2)[..., None]
    return torch.cat(parts, 2)


def chunked_rightly(q, k, v, causal):
    return chunked(q, k, v, causal, carried=True)


def chunked_and_restarted(q, k, v, causal=True):
    return chunked(q, k, v, causal, carried=False)


def both_ways_only(q, k, v, causal):
    if causal:
        raise NotImplementedError("not causal")
    return scores(q, k, causal=False).softmax(-1) @ v


def test_a_flag_of_one_value_is_given_that():
    verdicts = judged(chunked_rightly, "averages", "looks-ahead", like="elu")
    assert {v.status for v in verdicts.values()} == {"holds"}, verdicts
    assert judged(chunked_and_restarted, "averages")["averages"].status == "broken"
    verdicts = judged(both_ways_only, "averages", "looks-ahead", "queries", like="softmax")
    assert {law: v.status for law, v in verdicts.items()} == {
        "averages": "holds",
        "looks-ahead": "does not apply",
        "queries": "holds",
        "same": "holds",
    }


def of_lengths(q, k, v, lengths, more=0):
    seen = torch.arange(k.shape[2]) < (lengths + more)[:, None]
    return scores(q, k, causal=False).masked_fill(~seen[:, None, None], -1e30).softmax(-1) @ v


def one_key_too_many(q, k, v, valid_lens=None):
    return of_lengths(q, k, v, torch.full((len(q),), k.shape[2]) if valid_lens is None else valid_lens, 1)


def lengths_of_the_first(q, k, v, lengths):
    return of_lengths(q, k, v, lengths[:1].expand(len(q)))


def row_by_row(q, k, v, seq_lens):
    """Real tokens attend to real ones, and the others get zeros."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, n in enumerate(seq_lens.tolist()):
        out[b, :, :n] = scores(q[b : b + 1, :, :n], k[b : b + 1, :, :n], False).softmax(-1)[0] @ v[b, :, :n]
    return out


def row_by_row_and_causal(q, k, v, seq_lens):
    """Causal attention, whose lengths are those of queries, too."""
    T = q.shape[2]
    heads = [
        scores(*(x[b : b + 1, :, :n] for x in (q, k))).softmax(-1) @ v[b : b + 1, :, :n]
        for b, n in enumerate(seq_lens.tolist())
    ]
    return torch.cat([functional.pad(x, (0, 0, 0, T - x.shape[2])) for x in heads])


class OverLengths(torch.nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, x, lengths):
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return of_lengths(q, k, v, lengths)[:, 0]


def test_lengths_are_given_and_padding_is_asked_about():
    laws = ("hidden", "batch", "gradients", "pure")
    for thing in (of_lengths, row_by_row, row_by_row_and_causal, OverLengths):
        verdicts = judged(thing, *laws)
        assert judged(thing, "queries")["queries"].status != "broken", thing
        assert {v.status for v in verdicts.values()} == {"holds"}, (thing, verdicts)
    assert judged(row_by_row, like="softmax")["same"].status == "holds"
    for thing in (one_key_too_many, lengths_of_the_first):
        assert judged(thing, "hidden")["hidden"].status == "broken", thing
    verdicts = regard.check(lengths_of_the_first, only=["same"], like="softmax", draws=DRAWS)
    assert "the batch's first row" in str(verdicts)


def in_chunks(q, k, v, cut=False):
    """Causal attention without a softmax, in chunks of 20 tokens."""
    state = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    parts = []
    for some_q, some_k, some_v in zip(*(x.split(20, 2) for x in (q, k, v)), strict=True):
        parts.append((some_q @ some_k.mT).tril() @ some_v + some_q @ state)
        state = state + some_k.mT @ some_v
        if cut:
            state = state.detach()
    return torch.cat(parts, 2)


def cut_between_chunks(q, k, v):
    return in_chunks(q, k, v, cut=True)


def without_gradients_of_far_keys(q, k, v, causal=True):
    near = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs() < 20
    raw = scores(q, k, causal)
    return torch.where(near, raw, raw.detach()).softmax(-1) @ v


def the_best_three(q, k, v):
    raw = scores(q, k, causal=False)
    least = raw.topk(min(3, raw.shape[-1]), -1).values[..., -1:]
    return raw.masked_fill(raw < least, -torch.inf).softmax(-1) @ v


def test_gradients_that_are_cut_late_are_found():
    options = {"only": ["gradients"], "draws": 24}
    for thing in (cut_between_chunks, without_gradients_of_far_keys):
        (verdict,) = regard.check(thing, **options)
        assert verdict.status == "broken" and "detached on the way" in verdict.detail, verdict
    for thing in (in_chunks, the_best_three):
        assert regard.check(thing, **options).ok, thing


def over_heads(q, k, v, causal=False):
    """q, k, v: (batch, seqlen, nheads, headdim), as flash attention has them."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def over_heads_by_its_code(q, k, v):
    batch, seq_len, heads, _ = q.shape
    return (q @ k.mT / q.shape[3] ** 0.5).softmax(-1).view(batch, seq_len, heads, -1) @ v


def over_tokens(q, k, v, causal=False):
    """q, k, v: (batch, seqlen, nheads, headdim), as flash attention has them."""
    return over_heads(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2)


def over_tokens_of_heads_first(q, k, v):
    """q, k, v: [B, H, T, D]; returns [B, T, H, D]."""
    return (scores(q, k, causal=False).softmax(-1) @ v).transpose(1, 2)


def test_heads_that_attend_to_heads_are_found_where_the_layout_is_said():
    for thing in (over_heads, over_heads_by_its_code):
        verdicts = judged(thing, "attends", like="softmax")
        assert verdicts["attends"].status == "broken", thing
        assert "over the heads of each token" in verdicts["same"].detail
    for thing in (over_tokens, over_tokens_of_heads_first):
        verdicts = judged(thing, "attends", "heads", like="softmax")
        assert {v.status for v in verdicts.values()} == {"holds"}, (thing, verdicts)


class Bahdanau(torch.nn.Module):
    """A query [B,D] over keys [B,S,D]."""

    axis = 1

    def __init__(self, hidden_size=12):
        super().__init__()
        self.W, self.U = torch.nn.Linear(hidden_size, 12), torch.nn.Linear(hidden_size, 12)
        self.v = torch.nn.Linear(12, 1)

    def forward(self, query, keys):
        weights = self.v(torch.tanh(self.W(query)[:, None] + self.U(keys))).softmax(self.axis)
        return (weights * keys).sum(1)


class OverOneScore(Bahdanau):
    axis = 2


def keys_ask(q, k, v):
    return scores(k, k, causal=False).softmax(-1) @ v


def mean_so_far(q, k, v):
    return v.cumsum(2) / torch.arange(1, 1 + v.shape[2])[:, None]


def test_queries_that_do_not_matter_are_found():
    torch.manual_seed(0)
    assert judged(Bahdanau, "attends")["attends"].status == "holds"
    verdict = judged(OverOneScore, "attends")["attends"]
    assert verdict.status == "broken" and "an axis of one number" in verdict.detail
    assert judged(keys_ask, "attends")["attends"].status == "broken"
    assert judged(mean_so_far, "attends")["attends"].status == "noted"
