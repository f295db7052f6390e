"""Attention that people write: what is wrong is found by the law that names the fault, what is right is not accused."""

import math

import pytest
import torch
from torch import nn
from zoo import RIGHT, SOFTMAX, WRONG, Heads, Pooled, PooledOverPadding, scores, see

import regard

DRAWS = 16


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_found_and_named(name):
    thing, law, words = WRONG[name]
    verdicts = regard.check(thing, like="softmax", only=[law, "same"], draws=DRAWS)
    assert law in {v.law for v in verdicts.broken}, repr(verdicts)
    assert words in " ".join(v.detail for v in verdicts), repr(verdicts)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_accused(name):
    like = "softmax" if name in SOFTMAX else None
    verdicts = regard.check(RIGHT[name], like=like, draws=6)
    assert verdicts.ok and verdicts.asked and not verdicts.problems, str(verdicts)
    kept = {v.law for v in verdicts.having("holds")}
    noted = {v.law for v in verdicts.having("noted")}
    assert {"batch", "heads", "pure", "attends", "precision"} <= kept | noted
    assert ("same" in kept) == (name in SOFTMAX)


def test_a_module_with_positions_inside_cannot_be_compared_and_is_not_accused():
    (verdict,) = regard.check(RIGHT["RotaryInside"], like="softmax", only=["same"], draws=4)
    assert verdict.status == "could not be asked" and "positions" in verdict.detail


def test_what_gives_a_vector_a_sequence_is_asked_what_can_be():
    verdicts = regard.check(Pooled, draws=6)
    assert verdicts.ok and not verdicts.problems, str(verdicts)
    assert {"hidden", "batch", "gradients", "attends", "precision"} <= {v.law for v in verdicts.having("holds")}
    assert {v.law for v in regard.check(PooledOverPadding, draws=6).broken} == {"hidden", "batch"}


def test_states_of_others_are_asked():
    for name in ("Cached", "EluFromAState"):
        (verdict,) = regard.check(RIGHT[name], only=["recurrent"], draws=4)
        assert verdict.status == "holds", str(verdict)


class SwitchedOff(Heads):
    """Its output projection begins with zeros."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.c_proj.weight)


def test_a_layer_that_begins_with_zeros_is_not_accused():
    verdicts = regard.check(SwitchedOff, like="softmax", draws=4, only=["attends", "heads", "batch"])
    assert verdicts.ok and {v.law for v in verdicts.having("noted")} == {"attends"}, str(verdicts)
    assert "c_proj.weight is all zero" in str(verdicts)


def test_rounding_ahead_is_no_looking_ahead():
    (verdict,) = regard.check(RIGHT["LongConvolution"], only=["looks-ahead"], draws=6)
    assert verdict.status == "holds"


def test_a_verdict_ends_with_what_was_not_asked():
    text = str(regard.check(RIGHT["heads_last"], draws=4))
    assert "heads_last was taken for attention over q, k, v [B,T,H,K]" in text
    assert text.endswith(
        "On one case it gives what softmax gives; like='softmax' (--like softmax) asks that everywhere."
    )
    text = str(regard.check(RIGHT["both_ways_in_a_window"], draws=4))
    assert "Not asked of both_ways_in_a_window: 'looks-ahead'" in text and "None is near" in text


def scales_weights(q, k, v):
    return (q @ k.mT).softmax(-1) / math.sqrt(q.shape[-1]) @ v


def hides_itself(q, k, v, causal=True):
    """The first query sees nothing, and by a large number instead of −∞ that becomes all keys evenly."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~see(q.shape[2], k.shape[2], -1), -1e9).softmax(-1) @ v


def reads_one_head(q, k, v, causal=True):
    return scores(q, k[:, :1], causal).softmax(-1) @ v[:, :1]


def capped(q, k, v):
    return (30 * torch.tanh(scores(q, k, causal=False) / 30)).softmax(-1) @ v


def with_alibi(q, k, v, causal=True):
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, dtype=q.dtype)
    return (scores(q, k) + slopes[:, None, None] * torch.arange(k.shape[2])).softmax(-1) @ v


def identity(q, k, v, causal=True):
    return v


def no_groups(q, k, v, causal=True):
    """One output head for each key/value head, of whatever queries."""
    return scores(q[:, : k.shape[1]], k, causal).softmax(-1) @ v


def keeps_its_scale(q, k, v, kept={}):  # noqa: B006
    """The scale of the first call, whatever the width of later ones."""
    scale = kept.setdefault("scale", q.shape[-1] ** -0.5)
    return (q @ k.mT * scale).softmax(-1) @ v


SAID = {
    scales_weights: "divided by √K: the factor belongs to the scores",
    hides_itself: "no query sees itself, and the first one sees all",
    reads_one_head: "every query head reads the first key/value head",
    capped: "30·tanh(scores/30)",
    with_alibi: "a bias, or positions",
    identity: "the values themselves",
    no_groups: "[2, 4, 11, 13] from q [2, 8, 11, 9], k [2, 4, 11, 9], expected [2, 8, 11, 13]",
    keeps_its_scale: "its scores are 1.22 times as large",
}


@pytest.mark.parametrize("thing", SAID, ids=lambda thing: thing.__name__)
def test_it_is_said_how_attention_differs_from_softmax(thing):
    (verdict,) = regard.check(thing, like="softmax", only=["same"], draws=6)
    assert verdict.status == "broken" and SAID[thing] in verdict.detail, str(verdict)


def test_a_cache_that_grows_is_no_dropout():
    kept = []

    def grows(q, k, v, causal=True):
        kept.append(v)
        return scores(q, k, causal).softmax(-1) @ v * len(kept)

    (verdict,) = regard.check(grows, only=["pure"], draws=2)
    assert "is a state kept between calls" in verdict.detail


def test_a_mask_that_hides_what_is_true_is_told():
    def hides_the_true(q, k, v, mask=None):
        raw = scores(q, k, causal=False)
        if mask is not None:
            raw = raw.masked_fill(mask == 1, -1e9)
        return raw.softmax(-1) @ v

    assert "hides_the_true was taken to hide what is True in mask" in str(regard.check(hides_the_true, draws=2))


def adds_its_mask(q, k, v, attention_mask=None):
    """Right with 0 and −∞; with 1 and 0, as in BERT's masks before they are extended, it hides nothing."""
    raw = scores(q, k, causal=False)
    if attention_mask is not None:
        raw = raw + (attention_mask[:, None, None, :] - 1.0)
    return raw.softmax(-1) @ v


def test_what_a_mask_was_taken_for_is_told_where_it_is_unusual():
    verdicts = regard.check(adds_its_mask, like="softmax", draws=4)
    assert verdicts.ok
    assert "add attention_mask [B,S] to its scores" in str(verdicts)


def attend_to_own_keys(q, k, v, causal=True):
    """Right self-attention, a query at a time; it reads as many keys as it has queries, and is not made for more."""
    T = q.shape[2]
    outs = []
    for t in range(T):
        n = t + 1 if causal else T
        scores = q[:, :, t : t + 1] @ k[:, :, :n].mT / q.shape[-1] ** 0.5
        outs.append(scores.softmax(-1) @ v[:, :, :n])
    return torch.cat(outs, 2)


def test_attention_of_its_own_keys_is_noted_and_not_accused():
    laws = ["queries", "same", "looks-ahead"]
    found = {v.law: v.status for v in regard.check(attend_to_own_keys, like="softmax", only=laws)}
    assert found == {"queries": "noted", "same": "noted", "looks-ahead": "holds"}
