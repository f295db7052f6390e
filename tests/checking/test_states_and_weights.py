"""States of somebody else's attention, its weights, and the example that a broken law is shown by."""

import math

import pytest
import torch
from public_attention_right import NanoAttention, linear_attention, linear_step, lower, phi
from torch import nn

import regard
from regard.laws import LAWS, subject
from regard.testing import assert_lawful


def recurrent(thing, **options):
    """Returns the verdict of the recurrent law."""
    return regard.check(thing, only=["recurrent"], draws=4, **options)[0]


@pytest.mark.parametrize(
    "step",
    [
        linear_step,
        lambda q, k, v, state: (lambda out, *sums: (out, sums))(*linear_step(q, k, v, *(state or (0, 0)))),
    ],
    ids=["two sums", "a pair that begins as None"],
)
def test_a_step_that_is_a_function(step):
    assert recurrent(linear_attention, step=step).status == "holds"


def test_keys_and_values_that_begin_empty():
    torch.manual_seed(0)
    q_weight, k_weight, v_weight = torch.randn(3, 12, 4, dtype=torch.float64)

    def whole(x):
        q, k, v = (x @ w.to(x) for w in (q_weight, k_weight, v_weight))
        s = (q @ k.mT / 2).masked_fill(~lower(x.shape[1], x.shape[1]), -math.inf)
        return s.softmax(-1) @ v

    def incremental(x, prev_K, prev_V):
        q, k, v = (x @ w.to(x) for w in (q_weight, k_weight, v_weight))
        K, V = torch.cat([prev_K, k[:, None]], 1), torch.cat([prev_V, v[:, None]], 1)
        return ((q[:, None] @ K.mT / 2).softmax(-1) @ V)[:, 0], K, V

    assert recurrent(whole, step=incremental, width=12).status == "holds"
    assert recurrent(whole, step=lambda x, K, V: incremental(2 * x, K, V), width=12).status == "broken"


def test_a_step_that_does_not_run_is_told_and_the_other_laws_are_asked():
    verdicts = regard.check(linear_attention, step=lambda q, k, v, state: 1 / 0, draws=2)
    told = {v.law: v for v in verdicts}
    assert told["recurrent"].status == "could not be asked"
    assert "step(x, state) -> y, state" in told["recurrent"].detail
    assert told["looks-ahead"].status == "holds"


@pytest.mark.parametrize("returned", [False, True])
def test_a_state_that_is_taken_and_never_used_is_no_state_but_one_that_comes_back_as_it_was_is_wrong(returned):
    """minGPT's attention has the parameter `layer_past` and ignores it."""

    class Past(NanoAttention):
        def forward(self, x, layer_past=None):
            out = super().forward(x)
            return (out, layer_past) if returned and layer_past is not None else out

    assert recurrent(Past()).status == ("broken" if returned else "does not apply")


@pytest.mark.parametrize("once", [False, True], ids=["fades by each token", "fades once a chunk"])
def test_a_state_that_fades_too_little_over_a_chunk(once):
    def fading(q, k, v, state=None, return_state=False):
        n = torch.arange(q.shape[2]).to(q)
        out = q @ k.mT * torch.where(n[:, None] >= n, 0.9 ** (n[:, None] - n).abs(), 0) @ v
        kept = (k * 0.9 ** n.flip(0)[:, None]).mT @ v
        if state is not None:
            out = out + 0.9 ** (n + 1)[:, None] * (q @ state)
            kept = kept + 0.9 ** (1 if once else len(n)) * state
        return (out, kept) if return_state else out

    expected = "holds"
    if once:
        expected = "broken"
    assert recurrent(fading).status == expected


def test_a_method_that_is_not_there():
    with pytest.raises(regard.errors.PluginError, match="no method 'stepp'"):
        _ = subject(NanoAttention(), step="stepp").state_call


def test_multihead_attention_is_compared_by_its_weights():
    class NoScale(nn.MultiheadAttention):
        def forward(self, query, key, value, attn_mask=None):
            B, _, E = query.shape
            projected = zip((query, key, value), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
            q, k, v = (
                nn.functional.linear(x, w, b).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
                for x, w, b in projected
            )
            s = q @ k.mT
            if attn_mask is not None:
                s = s.masked_fill(~attn_mask, -math.inf)
            return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, -1, E)), None

    for options in ({"batch_first": True}, {"batch_first": False}, {"batch_first": True, "bias": False}):
        right = nn.MultiheadAttention(12, 3, **options).eval()
        assert regard.check(right, like="softmax", only=["same"], draws=4)[0].status == "holds"
    wrong = regard.check(NoScale(12, 3, batch_first=True).eval(), like="softmax", only=["same"], draws=4)[0]
    assert wrong.status == "broken" and "1/√K missing" in wrong.detail


def test_what_holds_no_weights_to_compare_is_said_not_to_be_asked():
    class Nameless(nn.Module):
        d_model = 12

        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 12, 12))

        def forward(self, x):
            q, k, v = (x @ weight for weight in self.weights)
            return (q @ k.mT).softmax(-1) @ v

    verdict = regard.check(Nameless(), like="softmax", only=["same"], draws=2)[0]
    assert verdict.status == "could not be asked" and "in_proj_weight" in verdict.detail


def test_always_causal_attention_is_compared_with_causal_attention():
    def causal(q, k, v):
        s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~lower(q.shape[2], k.shape[2]), -math.inf)
        return s.softmax(-1) @ v

    assert regard.check(causal, like="softmax", causal=True, only=["same"], draws=8)[0].status == "holds"


def test_kernels_that_take_few_widths_and_dtypes():
    def kernel(q, k, v, causal=True):
        if q.shape[-1] % 16 or q.dtype not in (torch.bfloat16, torch.float32):
            raise RuntimeError("heads of 16, 32, …, in float32 and bfloat16")
        s = (q @ k.mT).float() / q.shape[-1] ** 0.5
        if causal:
            s = s.masked_fill(~lower(q.shape[2], k.shape[2]), -math.inf)
        return s.softmax(-1).to(v.dtype) @ v

    for dtype in ("fp32", "bf16"):
        verdicts = regard.check(kernel, like="softmax", dtype=dtype, draws=3)
        assert verdicts.ok and not verdicts.problems
    with pytest.raises(regard.errors.OptionError, match="cannot be used here"):
        regard.check(kernel, device="cuda:99")


def test_a_mask_of_tokens_is_not_taken_for_one_of_pairs():
    class Unpadding(nn.Module):
        """Takes visible tokens out of the batch, and puts them back, as linear attention libraries do."""

        d_model = 4

        def forward(self, x, attention_mask=None):
            if attention_mask is None:
                return x.cumsum(1)
            chosen = attention_mask.flatten().nonzero()[:, 0]
            rows = (attention_mask.bool()[..., None] * x[: len(attention_mask)]).cumsum(1)
            out = torch.zeros_like(x).flatten(0, 1)
            return out.index_copy(0, chosen, rows.flatten(0, 1)[chosen]).view_as(x)

    assert subject(Unpadding(), causal=True).takes_visible
    assert regard.check(Unpadding(), causal=True, draws=6, only=["batch", "hidden"]).ok


def test_a_leak_is_shown_by_ordinary_inputs_where_they_show_it():
    def leaks(q, k, v):
        a = (phi(q) @ phi(k).mT).tril()
        return a @ v / (phi(q) @ phi(k).sum(2)[..., None])

    verdict = regard.check(leaks, causal=True, only=["looks-ahead"])[0]
    assert "30" not in verdict.detail and verdict.error > 1e-3
    thing = subject(leaks, causal=True)
    assert LAWS["looks-ahead"](thing, verdict.case).error == verdict.error


def test_an_exception_in_some_cases_is_told():
    def not_three(q, k, v, causal=True):
        if q.shape[0] == 3:
            raise ValueError("three rows are not supported")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    verdicts = regard.check(not_three, only=["heads"], draws=8)
    assert verdicts[0].status == "holds" and verdicts.ok and verdicts.asked
    assert not verdicts.problems
    assert "not judged" in verdicts.unasked[0] and "three rows are not supported" in verdicts.unasked[0]


def test_assert_lawful_fails_where_nothing_could_be_compared():
    class Turned(nn.Module):
        """Positions inside: no softmax of the projected queries and keys."""

        def __init__(self):
            super().__init__()
            self.width, self.qkv = 12, nn.Linear(12, 36)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            turn = torch.arange(x.shape[1]).to(x)[:, None]
            return (q * (1 + turn.cos()) @ k.mT).softmax(-1) @ v

    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="positions, norms or gates"):
        assert_lawful(Turned(), like="softmax", only=["same"], draws=2)
