"""Sinks: one number a head in the denominator of the softmax."""

import pytest
import torch

import regard
from regard.errors import MaskError, ShapeError
from regard.kernels import plain
from regard.mechanisms.base import mechanisms

B, H, G, K, V, S = 2, 4, 2, 6, 5, 11


def tensors(dtype=torch.float64, T=S):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(*shape, generator=g, dtype=dtype) for shape in ((B, H, T, K), (B, G, S, K), (B, G, S, V)))
    sinks = torch.tensor([0.0, 1.5, -2.0, 4.0], dtype=dtype)
    return q, k, v, sinks


def by_formula(q, k, v, sinks, mask):
    """exp(score) over exp(sink) + Σ exp(score), in so many words."""
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    scores = mask.but(sinks=None).adjusted_scores(q @ k.mT / K**0.5)
    allowed = mask.allowed(q.shape[2], S, q.device)
    exps = scores.exp() if allowed is None else scores.exp() * allowed
    return exps / (exps.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "padding": {"causal": True, "visible": torch.arange(S) >= torch.tensor([[0], [4]])},
    "window": {"causal": True, "window": 3},
    "documents": {"causal": True, "documents": torch.tensor([[0] * 5 + [1] * 6] * B)},
    "bias": {"bias": torch.linspace(-1, 1, S * S).view(S, S).double()},
    "slopes": {"causal": True, "slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]).double()},
    "softcap": {"causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("use", ["auto", "plain"])
def test_a_sink_joins_the_denominator_whatever_the_mask(rules, use):
    q, k, v, sinks = tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    mask = regard.Mask(**rules, sinks=sinks)
    softmax = regard.mechanism("softmax")
    softmax.use = use
    out = softmax(q, k, v, mask)
    wanted = by_formula(q, k, v, sinks, mask)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
    weights = softmax.weights(q, k, mask)
    torch.testing.assert_close(weights @ v.repeat_interleave(H // G, 1), wanted, rtol=0, atol=1e-10)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for ours, theirs in zip(
        torch.autograd.grad((out * direction).sum(), inputs),
        torch.autograd.grad((wanted * direction).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("window", [None, 4])
def test_a_state_keeps_its_sinks(window):
    q, k, v, sinks = tensors()
    softmax = regard.mechanism("softmax")
    whole = softmax(q, k, v, regard.Mask(causal=True, window=window, sinks=sinks))
    state = softmax.empty(regard.Size(B=B, H=H, G=G, K=K, V=V, dtype=q.dtype), regard.Mask(window=window, sinks=sinks))
    outs = []
    for part in ([0, 5], [5, 6], [6, 7], [7, 11]):
        out, state = softmax.extend(*(x[:, :, slice(*part)] for x in (q, k, v)), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0, atol=1e-10)


def test_fewer_queries_than_keys_and_cross_attention():
    q, k, v, sinks = tensors(T=4)
    for mask in (regard.Mask(causal=True, sinks=sinks), regard.Mask(sinks=sinks)):
        torch.testing.assert_close(
            regard.mechanism("softmax")(q, k, v, mask), by_formula(q, k, v, sinks, mask), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_without_sinks(dtype):
    """The error against float64 with the same inputs: at most twice that of the fused call without sinks."""
    q, k, v, sinks = (x.to(dtype) for x in tensors())
    mask = regard.Mask(causal=True)
    softmax = regard.mechanism("softmax")

    def error(mask):
        wide = mask if mask.sinks is None else mask.but(sinks=mask.sinks.double())
        exact = plain(regard.mechanism("softmax"))(q.double(), k.double(), v.double(), wide)
        return (softmax(q, k, v, mask).double() - exact).abs().max()

    assert error(mask.but(sinks=sinks)) <= 2 * error(mask) + 4 * torch.finfo(dtype).eps


def test_a_large_sink_takes_all_and_a_row_that_sees_nothing_stays_zero():
    q, k, v, _ = tensors()
    hidden = torch.ones(B, S, dtype=torch.bool)
    hidden[0] = False
    for sinks, visible in ((torch.full((H,), 80.0).double(), None), (torch.zeros(H).double(), hidden)):
        out = regard.attend(q, k, v, visible=visible, sinks=sinks)
        assert out[0].abs().max() < 1e-20
    assert torch.allclose(
        regard.attend(q, k, v, sinks=torch.full((H,), -200.0).double()), regard.attend(q, k, v), atol=1e-12
    )


WITH_A_SUM = {"softmax", "synthesizer", "synthesizer-random", "gaussian"}


@pytest.mark.parametrize("name", sorted(set(mechanisms()) - WITH_A_SUM))
def test_mechanisms_without_a_sum_of_exponentials_refuse_sinks_by_name(name):
    q, k, v, sinks = tensors(torch.float32)
    options = {"phi": torch.relu} if name == "linear" else {}
    if name == "similarity":
        options = {"sim": lambda q, k: (q * k).sum().square()}
    with pytest.raises(MaskError, match="cannot honour 'sinks'"):
        regard.attend(q, k, v, name, causal=True, sinks=sinks, **options)


def test_sinks_need_one_a_head():
    q, k, v, sinks = tensors()
    with pytest.raises(ShapeError, match=r"sinks have shape \[3\], expected one a query head: \[4\]"):
        regard.attend(q, k, v, sinks=sinks[:3])


@pytest.mark.parametrize("name", sorted(WITH_A_SUM - {"softmax"}))
def test_others_that_are_a_softmax_take_sinks(name):
    q, k, v, sinks = tensors(torch.float32)
    mask = regard.Mask(causal=True)
    options = {} if name == "gaussian" else {"heads": H, "length": 16} | ({"width": K} if name == "synthesizer" else {})
    built = regard.mechanism(name, **options)
    size = {"size_override": (S, S)}
    without = built.weights(q, k, mask.but(**size)).double()
    share = built.weights(q, k, mask.but(sinks=sinks, **size)).sum(-1)
    assert ((share > 0) & (share < 1)).all()
    out = built(q, k, v, mask.but(sinks=sinks))
    ratio = share[..., None] * (without @ v.double().repeat_interleave(H // G, 1)).float()
    torch.testing.assert_close(out, ratio, rtol=0, atol=1e-5)
