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
