"""More ways in which attention is written: what is called as it is meant is neither accused nor let off."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import Heads, scores

import regard

DRAWS = 5


def broken(thing, *only, **options):
    """Returns the names of the laws that are broken."""
    return {v.law for v in regard.check(thing, only=only, draws=DRAWS, **options).broken}


class General(nn.Module):
    """A decoder's step: one query [B,D] over what an encoder gave, [B,S,D]."""

    def __init__(self, hidden_size=12):
        super().__init__()
        self.hidden_size = hidden_size
        self.W = nn.Linear(hidden_size, hidden_size, bias=False)

    def hide(self, score, mask):
        return score.masked_fill(mask == 0, -1e9)

    def forward(self, decoder_hidden, encoder_outputs, mask=None):
        score = torch.bmm(encoder_outputs, self.W(decoder_hidden).unsqueeze(2)).squeeze(2)
        if mask is not None:
            score = self.hide(score, mask)
        weights = self.normalise(score)
        return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights

    def normalise(self, score):
        return score.softmax(1)


class OverTheBatch(General):
    def normalise(self, score):
        return score.softmax(0)


class HidesAlmost(General):
    def hide(self, score, mask):
        return score + (1 - mask.to(score.dtype)) * -10


class Additive(nn.Module):
    """A query [B,D] that is broadcast over [B,S,D]: given [B,T,D], it would be broadcast against the batch."""

    def __init__(self, hidden_size=12):
        super().__init__()
        self.hidden_size = hidden_size
        self.W1 = nn.Linear(hidden_size, 10)
        self.W2 = nn.Linear(hidden_size, 10)
        self.V = nn.Linear(10, 1)

    def forward(self, query, values):
        score = self.V(torch.tanh(self.W1(query.unsqueeze(1)) + self.W2(values)))
        return (score.softmax(1) * values).sum(1)


class WeightsOnly(nn.Module):
    """The state of a GRU [1,B,D] over [S,B,D]; the weights [B,1,S] are all that it gives."""

    def __init__(self, hidden_size=12):
        super().__init__()
        self.attn = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden, encoder_outputs):
        energy = torch.sum(hidden * self.attn(encoder_outputs), dim=2)
        return energy.t().softmax(1).unsqueeze(1)


def of_a_state(hidden, encoder_outputs):
    weights = torch.einsum("obd,sbd->bs", hidden, encoder_outputs).softmax(-1)
    return torch.einsum("bs,sbd->bd", weights, encoder_outputs)


@pytest.mark.parametrize("thing", [General, Additive, WeightsOnly, of_a_state])
def test_a_single_query_a_call_is_asked_about_many(thing):
    verdicts = regard.check(thing, draws=3)
    assert verdicts.ok and not verdicts.problems, str(verdicts)
    assert {"batch", "gradients", "heads", "queries", "pure", "attends", "precision"} <= {
        v.law for v in verdicts.having("holds")
    }
    told = " ".join(verdicts.unasked)
    assert "a single query" in told and "both directions" not in told


class NeverSaysBatchFirst(nn.Module):
    """x [B,T,D] over a context, by a layer that wants tokens first."""

    def __init__(self, embed_dim=12):
        super().__init__()
        self.embed_dim = embed_dim
        self.layer = nn.MultiheadAttention(embed_dim, 3)

    def forward(self, x, context):
        return self.layer(x, context, context)[0]


def test_one_row_of_queries_is_no_excuse_for_attending_over_the_batch():
    assert broken(NeverSaysBatchFirst, "batch") == {"batch"}


def test_faults_over_a_single_query_are_found():
    assert broken(OverTheBatch, "batch", "gradients") == {"batch"}
    assert broken(HidesAlmost, "hidden") == {"hidden"}
    assert not broken(General, "hidden")


class Neighbours(nn.Module):
    """Vectors h [N,F] of nodes, and who is next to whom [N,N]: no attention over sequences."""

    def __init__(self, in_features=8):
        super().__init__()
        self.W = nn.Linear(in_features, in_features)

    def forward(self, h, adj):
        n = len(h)
        moved = self.W(h)
        return torch.where(adj > 0, (moved[:, None] * moved[None].expand(n, n, -1)).sum(-1), -9e15).softmax(1) @ moved


def test_a_first_argument_named_h_is_a_tensor_and_no_number_of_heads():
    verdicts = regard.check(Neighbours, draws=DRAWS)
    assert verdicts.ok and not verdicts.asked
    assert "x [7, 5, 8], context [7, 5, 8]" in verdicts.problems[0] and "h=1" not in verdicts.problems[0]


def in_its_own_autocast(q, k, v, causal=True):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        raw = torch.matmul(q.float(), k.float().transpose(-1, -2)) / q.shape[-1] ** 0.5
        if causal:
            ahead = torch.ones_like(raw, dtype=torch.bool).triu(1 + raw.shape[-1] - raw.shape[-2])
            raw = raw.masked_fill(ahead, -torch.inf)
        out = torch.matmul(raw.float().softmax(-1), v.float())
    return out.to(q.dtype)


def cast_by_hand(q, k, v, causal=True):
    return (scores(q, k, causal).softmax(-1).bfloat16() @ v.bfloat16()).to(q.dtype)


def test_what_turns_autocast_on_is_asked_in_that_precision_and_what_casts_by_hand_is_not():
    verdicts = regard.check(in_its_own_autocast, like="softmax", draws=DRAWS)
    assert verdicts.ok and verdicts[-1].status == "holds", str(verdicts)
    assert any("turns autocast to bfloat16 on by itself" in sentence for sentence in verdicts.unasked)
    assert broken(cast_by_hand, "precision") == {"precision"}


def the_best_two(q, k, v, topk=2):
    raw = q @ k.mT * q.shape[-1] ** -0.5
    least = raw.topk(min(topk, raw.shape[-1]), -1).values[..., -1:]
    return raw.masked_fill(raw < least, -torch.inf).softmax(-1) @ v


class ChoosesBeforeItMasks(nn.Module):
    """The best three of all tokens are chosen, and then later ones hidden: what comes later decides what is seen."""

    def __init__(self, dim=12):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        raw = self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5
        T = x.shape[1]
        if T > 3:
            raw = raw.masked_fill(raw < raw.topk(3, -1).values[..., -1:], -1e9)
        raw = raw.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e9)
        return raw.softmax(-1) @ self.v(x)


def test_tokens_that_are_chosen_by_what_they_say_are_no_claim_to_be_causal():
    verdicts = regard.check(the_best_two, draws=DRAWS)
    assert verdicts.ok and not verdicts.having("could not be asked"), str(verdicts)
    torch.manual_seed(0)
    assert broken(ChoosesBeforeItMasks, "looks-ahead") == {"looks-ahead"}


class NormedOverTime(Heads):
    """Causal retention; the norm of a group is taken over all tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 24)

    def forward(self, x):
        q, k, v = (self.split(part) for part in self.c_attn(x).chunk(3, -1))
        out = self.merge((q @ k.mT).tril() @ v)
        return self.norm(out.transpose(1, 2)).transpose(1, 2)


def test_a_docstring_that_begins_with_causal_claims_it():
    assert broken(NormedOverTime, "looks-ahead") == {"looks-ahead"}


def sums_over_the_heads(q, k, v):
    """Linear attention, causal, over q, k, v [B, H, T, D]."""
    phi_q = functional.elu(q) + 1
    phi_k = functional.elu(k) + 1
    sums = torch.einsum("bhne,bhnd->bhned", phi_k, v).cumsum(1)  # 2 is meant
    return torch.einsum("bhne,bhned->bhnd", phi_q, sums) / (phi_q * phi_k.cumsum(1)).sum(-1, keepdim=True)


def sums_over_tokens(q, k, v):
    """The same over q, k, v [B, T, H, D]; inside, [B, H, T, D] would be meant by another."""
    return sums_over_the_heads(q, k, v)


def test_a_docstring_that_says_where_heads_are_is_believed():
    assert "heads" in broken(sums_over_the_heads, "heads")
    assert not broken(sums_over_tokens, "heads")


class TokensFirst(nn.Module):
    """Input shape: Time x Batch x Channel"""

    def __init__(self, embed_dim=16, num_heads=4, factor=1.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = factor * (embed_dim // num_heads) ** -0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def split(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1).permute(1, 2, 0, 3)

    def forward(self, query, key, value):
        q = self.split(self.q_proj(query)) * self.scale
        weights = (q @ self.split(self.k_proj(key)).mT).softmax(-1)
        out = (weights @ self.split(self.v_proj(value))).permute(2, 0, 1, 3)
        return self.out_proj(out.flatten(2))


class LearnsItsTemperature(TokensFirst):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))


def test_projections_of_tokens_before_the_batch_are_compared():
    (verdict,) = regard.check(TokensFirst, like="softmax", only=["same"], draws=DRAWS)
    assert verdict.status == "holds", str(verdict)


def test_a_factor_of_the_scores_inside_a_module_is_named_unless_it_is_learned():
    (verdict,) = regard.check(TokensFirst(factor=0.3), like="softmax", only=["same"], draws=DRAWS)
    assert verdict.status == "broken" and "0.3 times as large" in verdict.detail
    (verdict,) = regard.check(LearnsItsTemperature, like="softmax", only=["same"], draws=DRAWS)
    assert verdict.status == "could not be asked"


class ShowsWhatOthersHide(Heads):
    """Its mask of keys goes to PyTorch's function as it is, which hides what is False."""

    def forward(self, x, key_padding_mask=None):
        q, k, v = (self.split(part) for part in self.c_attn(x).chunk(3, -1))
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask[:, None, None]
        return self.c_proj(self.merge(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def over_pairs(q, k, v, mask=None):
    raw = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        raw = raw.masked_fill(mask.unsqueeze(1) == 0, -1e9)
    return raw.softmax(-1) @ v


def test_what_a_mask_was_taken_for_is_told_where_others_mean_something_else_by_it():
    told = " ".join(regard.check(ShowsWhatOthersHide, draws=2).unasked)
    assert "taken to show what is True in key_padding_mask" in told
    told = " ".join(regard.check(over_pairs, draws=2).unasked)
    assert "taken to read mask as [B,T,S]" in told


def padded_to_blocks(q, k, v, block=4):
    T = q.shape[2]
    q, k, v = (functional.pad(x, (0, 0, 0, -T % block)) for x in (q, k, v))
    return ((q @ k.mT / q.shape[3] ** 0.5).softmax(-1) @ v)[:, :, :T]


def values_of_the_next_head(q, k, v, num_heads):
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v.roll(-1, 1)
    return out.transpose(1, 2).flatten(2)


def test_a_slip_of_one_length_is_no_explanation():
    (verdict,) = regard.check(padded_to_blocks, like="softmax", only=["same"], draws=DRAWS)
    assert verdict.status == "broken"
    assert "1 added" not in verdict.detail and "rows of weights sum to" in verdict.detail


def test_weights_are_looked_at_where_values_have_the_keys_width_only():
    (verdict,) = regard.check(values_of_the_next_head, like="softmax", only=["same"], draws=DRAWS)
    assert verdict.status == "broken", str(verdict)


def within_four(q, k, v, causal=True):
    tokens = torch.arange(q.shape[2])
    near = (tokens[:, None] - tokens[None]).abs() < 2
    if causal:
        near = near.tril()
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=near)


def with_an_epsilon(q, k, v):
    raw = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    return raw / (raw.sum(-1, keepdim=True) + 0.1) @ v


def unscaled(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def test_nothing_is_called_near_that_is_far_unless_a_slip_explains_it():
    assert "None is near" in " ".join(regard.check(within_four, draws=2).unasked)
    for thing in (with_an_epsilon, unscaled):
        assert "The nearest is softmax" in " ".join(regard.check(thing, draws=2).unasked)


class DrawnFromBothSides(nn.Module):
    """Tokens that each one sees are drawn once, as some of BigBird's are."""

    def __init__(self, dim=12, max_len=32):
        super().__init__()
        self.max_len = max_len
        drawn = torch.rand(max_len, max_len, generator=torch.Generator().manual_seed(0)) < 0.3
        self.register_buffer("seen", drawn | torch.eye(max_len, dtype=torch.bool))
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        T = x.shape[1]
        q, k, v = (layer(x) for layer in self.layers)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[:T, :T])


def test_a_pattern_that_is_drawn_is_no_claim_to_be_causal():
    assert not broken(DrawnFromBothSides, "looks-ahead")


class Decaying(nn.Module):
    """A memory that fades, causal."""

    def __init__(self, hidden_size=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x) for layer in self.layers)
        n = torch.arange(x.shape[1], dtype=x.dtype)
        fading = 0.9 ** (n[:, None] - n[None]).clamp(min=0)
        return (q @ k.mT * fading.tril()) @ v

    def step(self, x, S=None):
        q, k, v = (layer(x) for layer in self.layers)
        S = self.fade(S, k.mT @ v)
        return q @ S, S

    def fade(self, S, new):
        return new if S is None else 0.9 * S + new


class FadesTheNewToo(Decaying):
    def fade(self, S, new):
        return new if S is None else 0.9 * (S + new)


class ReadsTheNext(Decaying):
    """A memory that fades, causal."""

    def forward(self, x):
        return super().forward(torch.cat([x[:, 1:], x[:, :1]], 1))


def test_a_state_of_any_name_is_found_in_a_step():
    (verdict,) = regard.check(Decaying, only=["recurrent"], draws=DRAWS)
    assert verdict.status == "holds"
    assert broken(FadesTheNewToo, "recurrent") == {"recurrent"}


def test_a_docstring_that_ends_with_causal_claims_it():
    assert broken(ReadsTheNext, "looks-ahead") == {"looks-ahead"}


class SharesItsFirstHead(TokensFirst):
    """Input shape: Time x Batch x Channel. The weights of the first head are those of all."""

    def forward(self, query, key, value):
        q = self.split(self.q_proj(query))[:, :1] * self.scale
        weights = (q @ self.split(self.k_proj(key))[:, :1].mT).softmax(-1)
        out = (weights @ self.split(self.v_proj(value))).permute(2, 0, 1, 3)
        return self.out_proj(out.flatten(2))


def test_heads_that_share_their_weights_are_named():
    (verdict,) = regard.check(SharesItsFirstHead, like="softmax", only=["same"], draws=DRAWS)
    assert verdict.status == "broken" and "do they share one?" in verdict.detail


def adds_to_its_mask(q, k, v, attn_mask):
    """attn_mask [T,S] bool: True hides."""
    T, S = attn_mask.shape
    attn_mask |= torch.ones(T, S, dtype=torch.bool).triu(1 + S - T)
    return scores(q, k).masked_fill(attn_mask, -1e30).softmax(-1) @ v


def joins_its_mask(q, k, v, attn_mask):
    """attn_mask [T,S] bool: True hides."""
    T, S = attn_mask.shape
    hidden = attn_mask | torch.ones(T, S, dtype=torch.bool).triu(1 + S - T)
    return scores(q, k).masked_fill(hidden, -1e30).softmax(-1) @ v


def turns_its_padding(q, k, v, key_padding_mask=None):
    """key_padding_mask [B,S]: True hides."""
    s = scores(q, k)
    if key_padding_mask is not None:
        s = s.masked_fill(~key_padding_mask.logical_not_()[:, None, None], -1e30)
    return s.softmax(-1) @ v


def test_a_mask_that_a_call_writes_into_is_found():
    (verdict,) = regard.check(adds_to_its_mask, only=["pure"], draws=DRAWS).broken
    assert "a mask is modified in place" in verdict.detail
    assert broken(turns_its_padding, "pure") == {"pure"}
    assert broken(joins_its_mask, "pure") == set()


def in_blocks(q, k, v, width=3):
    """Each token attends within its block of `width`, to both sides."""
    T, S = q.shape[2], k.shape[2]
    same = torch.arange(T)[:, None] // width == torch.arange(S) // width
    return scores(q, k).masked_fill(~same, -1e30).softmax(-1) @ v


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
def test_a_last_token_that_is_alone_in_its_block_still_attends(width):
    assert broken(lambda q, k, v: in_blocks(q, k, v, width), "attends") == set()


def test_attention_to_oneself_does_not_attend():
    assert broken(lambda q, k, v: in_blocks(q, k, v, 1), "attends") == {"attends"}


class DropsOut(nn.Module):
    def forward(self, q, k, v):
        return functional.dropout(scores(q, k).softmax(-1), 0.1, training=True) @ v


def test_dropout_left_on_is_not_taken_for_half_precision():
    assert broken(DropsOut(), "pure", "precision") == {"pure"}
