"""Masks of others: what they do to gradients, what they mean, and what hides no key in any of the ways tried."""

import pytest
import torch
from zoo import scores, see

import regard

WRONG = {}
RIGHT = []


def wrong(law, words):
    def put(f):
        WRONG[f.__name__] = (f, law, words)
        return f

    return put


def right(f):
    RIGHT.append(f)
    return f


def bias(q, k, mask, causal):
    """Returns 0 for what may be seen and −∞ for what may not, [B,1,T,S]."""
    allowed = see(q.shape[2], k.shape[2]) if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.expand(q.shape[0], 1, *allowed.shape)
    if mask is not None:
        allowed = allowed & mask[:, None, None].bool()
    return torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, -torch.inf)


@wrong("gradients", "the gradient of q and k is NaN: is a query that sees nothing cleaned after its softmax?")
def cleans_weights(q, k, v, attention_mask=None, causal=True):
    weights = (scores(q, k, causal=False) + bias(q, k, attention_mask, causal)).softmax(-1)
    return torch.where(weights.isnan(), 0.0, weights) @ v


@wrong("gradients", "the gradient of v is NaN")
def cleans_outputs(q, k, v, key_padding_mask=None, causal=True):
    mask = None if key_padding_mask is None else ~key_padding_mask
    raw = scores(q, k, causal=False).masked_fill(bias(q, k, mask, causal) < 0, -torch.inf)
    return (raw.softmax(-1) @ v).nan_to_num()


@wrong("gradients", "the gradient of q and k is NaN")
def cleans_weights_in_float32(q, k, v, mask=None, causal=True):
    weights = (scores(q, k, causal=False) + bias(q, k, mask, causal)).softmax(-1, dtype=torch.float32)
    return weights.nan_to_num().to(v.dtype) @ v


@right
def gives_blind_queries_scores_first(q, k, v, attention_mask=None, causal=True):
    added = bias(q, k, attention_mask, causal)
    blind = added.isinf().all(-1, keepdim=True)
    return (scores(q, k, causal=False) + added.masked_fill(blind, 0.0)).softmax(-1).masked_fill(blind, 0.0) @ v


@right
def masks_after_all(q, k, v, attention_mask=None, causal=True):
    """NaN in the weights, which masked_fill keeps out of the gradients of scores."""
    hidden = bias(q, k, attention_mask, causal) < 0
    return scores(q, k, causal=False).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num() @ v


@right
def smallest_of_float16(q, k, v, attention_mask=None, causal=True):
    return (scores(q, k, causal=False) + bias(q, k, attention_mask, causal).clamp(min=-65504.0)).softmax(-1) @ v


@pytest.mark.parametrize("name", WRONG)
def test_a_mask_that_is_wrong_is_named(name):
    f, law, words = WRONG[name]
    (verdict,) = regard.check(f, only=[law], draws=4)
    assert verdict.status == "broken" and words in verdict.detail, str(verdict)


@pytest.mark.parametrize("f", RIGHT, ids=lambda f: f.__name__)
def test_a_mask_that_is_right_is_not_accused(f):
    verdicts = regard.check(f, only=["hidden", "batch", "gradients", "looks-ahead"], draws=4)
    assert verdicts.ok and not verdicts.problems, str(verdicts)
    assert {"hidden", "batch"} <= {v.law for v in verdicts.having("holds")}, repr(verdicts)
