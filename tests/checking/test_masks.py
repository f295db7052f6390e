"""Masks of others: what they do to gradients, what they mean, and what hides no key in any of the ways tried."""

import pytest
import torch
from torch.nn import functional
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


@wrong("hidden", "attn_mask is said to be boolean, and then hides no key: it is added to the scores as 0 and 1")
def adds_a_boolean(q, k, v, attn_mask=None):
    """attn_mask, broadcastable to (batch, heads, q_len, k_len), may be boolean (True = attend) or added."""
    raw = scores(q, k, causal=False)
    return (raw if attn_mask is None else raw + attn_mask).softmax(-1) @ v


@wrong("hidden", "what is said of key_mask makes it hide keys, and given so it hides none")
def zeroes_keys_before_features(q, k, v, key_mask=None):
    """key_mask: (B, S) bool, True = token, False = pad."""
    if key_mask is not None:
        k = k * key_mask[:, None, :, None]
    features, keys = functional.elu(q) + 1, functional.elu(k) + 1
    return features @ (keys.mT @ v) / (features @ keys.sum(2)[..., None])


@wrong("hidden", "what is said of valid_mask")
def hides_queries(q, k, v, valid_mask=None):
    """valid_mask [B, T]: True for valid tokens."""
    raw = scores(q, k, causal=False)
    if valid_mask is not None:
        raw = raw.masked_fill(~valid_mask[:, None, :, None], -1e9)
    return raw.softmax(-1) @ v


@wrong("hidden", "what is said of context_mask")
def hides_keys_from_sums_of_values_only(q, k, v, context_mask=None):
    """context_mask (batch, keys): 1 = attend, 0 = ignore."""
    features, keys = functional.elu(q) + 1, functional.elu(k) + 1
    total = keys.sum(2)[..., None]
    if context_mask is not None:
        keys = keys * context_mask[:, None, :, None]
    return features @ (keys.mT @ v) / (features @ total)


@wrong("hidden", "hidden keys changed to large scores")
def hides_by_almost_nothing(q, k, v, attention_mask=None):
    """Other forms of its mask are broadcast to five axes, which is no fault of its heads."""
    raw = scores(q, k, causal=False)
    if attention_mask is not None:
        raw = raw.masked_fill(attention_mask[:, None, None] == 0, -1e-9)
    return raw.softmax(-1) @ v


def hide_beyond(raw, lengths):
    return raw.masked_fill(torch.arange(raw.shape[-1]) >= lengths[:, None, None, None], -torch.inf)


@wrong("hidden", "the first key beyond lengths is seen: is its position compared by ≤")
def sees_one_beyond(q, k, v, lengths=None):
    raw = scores(q, k, causal=False)
    return (raw if lengths is None else hide_beyond(raw, lengths + 1)).softmax(-1) @ v


@wrong("hidden", "the first key beyond src_lens is seen")
def must_have_lengths(q, k, v, src_lens):
    return hide_beyond(scores(q, k, causal=False), src_lens + 1).softmax(-1) @ v


@wrong("batch", "padded right")
def sees_one_fewer(q, k, v, seq_lengths=None):
    raw = scores(q, k, causal=False)
    return (raw if seq_lengths is None else hide_beyond(raw, (seq_lengths - 1).clamp(min=1))).softmax(-1) @ v


@wrong("hidden", "what is said of valid_lens makes it hide the keys beyond")
def forgets_lengths(q, k, v, valid_lens=None):
    """valid_lens [B]: how many tokens of each sequence are no padding."""
    return scores(q, k, causal=False).softmax(-1) @ v


@right
def with_lengths(q, k, v, lengths=None):
    raw = scores(q, k, causal=False)
    return (raw if lengths is None else hide_beyond(raw, lengths)).softmax(-1) @ v


@right
def takes_booleans_and_numbers(q, k, v, attn_mask=None):
    """attn_mask may be boolean (True = attend) or float (added)."""
    raw = scores(q, k, causal=False)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        raw = raw.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        raw = raw + attn_mask
    return raw.softmax(-1) @ v


@right
def takes_a_column(q, k, v, key_mask=None):
    """key_mask: [B, S, 1], True for tokens to keep."""
    raw = scores(q, k, causal=False)
    if key_mask is not None:
        raw = raw.masked_fill(~key_mask.bool()[:, None].mT, -1e9)
    return raw.softmax(-1) @ v


@right
def hides_pad_in_features(q, k, v, key_mask=None):
    """key_mask: (B, S) bool, True = token, False = pad."""
    features, keys = functional.elu(q) + 1, functional.elu(k) + 1
    if key_mask is not None:
        keys = keys * key_mask[:, None, :, None]
    return features @ (keys.mT @ v) / (features @ keys.sum(2)[..., None])


def divides_again(q, k, v, key_mask=None):
    """Right but for visible weights that underflow beside a hidden key's."""
    weights = scores(q, k, causal=False).softmax(-1)
    if key_mask is not None:
        weights = weights * key_mask[:, None, None]
        weights = weights / weights.sum(-1, keepdim=True)
    return weights @ v


def by_documents(q, k, v, attention_mask=None):
    raw = scores(q, k, causal=False)
    if attention_mask is not None:
        apart = attention_mask[:, :, None] != attention_mask[:, None]
        raw = raw.masked_fill(apart[:, None], -1e9)
    return raw.softmax(-1) @ v


def with_factors(q, k, v, mask=None):
    """mask [B, S]: factors that weights are multiplied with after the softmax."""
    weights = scores(q, k, causal=False).softmax(-1)
    return (weights if mask is None else weights * mask[:, None, None]) @ v


def biased_by_its_mask(q, k, v, key_mask=None):
    raw = scores(q, k, causal=False)
    return (raw if key_mask is None else raw + 0.1 * key_mask[:, None, None]).tanh() @ v


def scaled_by_lengths(q, k, v, lengths=None):
    """Sharper where sequences are long, as some count it."""
    raw = scores(q, k, causal=False)
    return (raw if lengths is None else raw * (1 + lengths).log()[:, None, None, None]).softmax(-1) @ v


NOTED = {
    scaled_by_lengths: "lengths changes outputs and hides no key beyond",
    divides_again: "visible keys lose all weight: is a mask laid over weights",
    by_documents: "attention_mask hides a token's key from all others and not from itself",
    with_factors: "mask hides no key, and is said to be another kind of mask",
    biased_by_its_mask: "key_mask hides no key in any of the ways tried",
}


@pytest.mark.parametrize("f", NOTED, ids=lambda f: f.__name__)
def test_a_mask_of_a_kind_that_is_not_known_is_noted_and_not_accused(f):
    verdicts = regard.check(f, only=["hidden", "batch", "looks-ahead", "gradients"], draws=4)
    noted = {v.law: v.detail for v in verdicts.having("noted")}
    assert verdicts.ok and NOTED[f] in noted["hidden"], str(verdicts)


def test_a_mask_that_hides_nothing_and_one_that_is_added_are_told_at_the_end():
    assert "biased_by_its_mask: key_mask hides no key in any of the ways tried" in str(
        regard.check(biased_by_its_mask, draws=1)
    )

    def adds(q, k, v, attn_mask=None):
        raw = scores(q, k, causal=False)
        return (raw if attn_mask is None else raw + attn_mask).softmax(-1) @ v

    assert "a boolean attn_mask hides no key: it is added to the scores as 0 and 1" in str(regard.check(adds, draws=1))


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
