"""Dropout on a CPU: what is dropped, how often, by which seed, and that gradients are those of the drawn mask."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.kernels import plain
from regard.kernels.dropout import attention as dropout_attention
from regard.kernels.dropout.mask import DropRate, dropout
from regard.mechanisms import RandomSynthesizer, Softmax, fitted
from regard.shapes import Mask, Size

F64 = torch.float64
P = 0.3


def seeded(run, *args, seed=0):
    torch.manual_seed(seed)
    return run(*args)


@given(st.floats(0, 1, exclude_max=True))
def test_the_share_is_exact_to_16_bits_and_something_is_kept(p):
    share = DropRate(p)
    assert share.kept > 0
    assert abs(1 - p - share.kept) <= 2**-16
    dropped = sum(bits < share.first_kept for bits in range(-(2**15), 2**15))
    assert dropped / 2**16 == 1 - share.kept


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_kept_elements_are_scaled_and_the_mean_stays(dtype):
    x, n = torch.randn(301, 1009, dtype=dtype), 301 * 1009
    out = seeded(dropout, x, 0.1)
    kept = out != 0
    share = DropRate(0.1).kept
    torch.testing.assert_close(out[kept], x[kept] / share, rtol=1e-6, atol=0)
    assert abs(kept.double().mean() - share) < 5 * (share * (1 - share) / n) ** 0.5
    beside = (kept[:, 1:] & kept[:, :-1]).double().mean()  # neighbours are independent
    assert abs(beside - share**2) < 5 * (share**2 * (1 - share**2) / n) ** 0.5


def test_the_torch_seed_alone_decides():
    x = torch.ones(999)
    want = seeded(dropout, x, P)
    torch.randn(7)
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    assert torch.equal(seeded(dropout, x, P), want)
    assert np.array_equal(np.random.get_state()[1], before)
    assert not torch.equal(dropout(x, P), want)
    assert not torch.equal(seeded(dropout, x, P, seed=1), want)


def test_gradients_of_dropout_are_those_of_its_mask():
    x = torch.randn(7, 11, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: seeded(dropout, x, P), x)
    assert torch.autograd.gradgradcheck(lambda x: seeded(dropout, x.square(), P), x)


def masks():
    visible = torch.tensor([[True] * 7, [False, True, True, False, True, True, False], [False] * 7])
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1], [3, 3, 3, 3, 4, 4, 4]])
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(3, 1, 7, 7, dtype=F64, generator=generator)
    bias[0, 0, 2] = -torch.inf
    return {
        "none": (7, Mask()),
        "causal": (7, Mask(causal=True)),
        "the last queries": (5, Mask(causal=True)),
        "across": (5, Mask()),
        "visible": (7, Mask(causal=True, visible=visible)),
        "window": (7, Mask(causal=True, window=3)),
        "documents": (7, Mask(causal=True, documents=documents)),
        "slopes": (7, Mask(causal=True, slopes=torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=F64))),
        "bias": (7, Mask(bias=bias)),
        "bias and visible": (7, Mask(visible=visible, bias=bias)),
    }


@pytest.mark.parametrize("at_a_time", [1, 100, 1 << 20])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", masks())
def test_attention_is_weights_times_the_drawn_mask(name, groups, at_a_time, monkeypatch):
    monkeypatch.setattr(dropout_attention, "_AT_A_TIME", at_a_time)
    T, mask = masks()[name]
    torch.manual_seed(1)
    q = torch.randn(3, 4, T, 5, dtype=F64, requires_grad=True)
    k = torch.randn(3, groups, 7, 5, dtype=F64, requires_grad=True)
    v = torch.randn(3, groups, 7, 11, dtype=F64, requires_grad=True)
    softmax = Softmax()
    softmax.dropout = P
    # With unit vectors for values the output is the matrix of weights that were used.
    units = torch.eye(7, dtype=F64).expand(3, groups, 7, 7)
    used, out = seeded(softmax, q, k, units, mask).detach(), seeded(softmax, q, k, v, mask)
    weights = softmax.weights(q, k, mask)
    seen = weights > 0
    factor = torch.where(seen, used / weights, 0.0).detach()
    share = DropRate(P).kept
    assert bool(((factor == 0) | ((factor - 1 / share).abs() < 1e-9)).all())
    assert abs((factor == 0)[seen].double().mean() - P) < 5 * (P * (1 - P) / seen.sum()) ** 0.5
    want = (weights * factor) @ v.repeat_interleave(4 // groups, 1)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    d = torch.randn_like(out)
    got, wanted = (torch.autograd.grad(x, (q, k, v), d) for x in (out, want))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_attention_follows_the_seed():
    q = torch.randn(2, 3, 7, 4)
    softmax = Softmax()
    softmax.dropout = P
    want = seeded(softmax, q, q, q)
    assert not torch.equal(softmax(q, q, q), want)
    assert not torch.equal(seeded(softmax, q, q, q, seed=1), want)
    assert torch.equal(seeded(softmax, q, q, q), want)


def test_gradients_of_attention_with_dropout():
    q, k, v = (torch.randn(2, 2, 5, 3, dtype=F64, requires_grad=True) for _ in range(3))
    softmax = Softmax(scale=0.7)
    softmax.dropout = P
    assert torch.autograd.gradcheck(lambda *x: seeded(softmax, *x, Mask(causal=True)), (q, k, v))


def test_the_mean_over_seeds_is_attention_without_dropout():
    q, k, v = (seeded(torch.randn, 1, 2, 9, 4, seed=i) for i in range(3))
    many = 4000
    softmax = Softmax()
    want = softmax(q, k, v, Mask(causal=True))
    softmax.dropout = P
    out = seeded(softmax, *(x.expand(many, -1, -1, -1) for x in (q, k, v)), Mask(causal=True))
    error = out.std(0) / many**0.5
    assert bool(((out.mean(0) - want).abs() < 5 * error).all())


def test_hidden_keys_are_inert_with_dropout():
    visible = torch.tensor([[True, False, True, True, False], [False] * 5])
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    softmax = Softmax()
    softmax.dropout = P
    outs, grads = [], []
    for filling in (0.0, float("nan")):
        parts = [x.masked_fill(~visible[:, None, :, None], filling).requires_grad_() for x in (k, v)]
        own = q.clone().requires_grad_()
        outs.append(seeded(softmax, own, *parts, Mask(visible=visible)))
        grads.append(torch.autograd.grad(outs[-1].square().sum(), (own, *parts)))
    assert torch.equal(*outs) and bool((outs[0][1] == 0).all())
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*grads, strict=True))


def test_no_tokens():
    softmax = Softmax()
    softmax.dropout = P
    for B, T, S in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        q, k, v = (torch.randn(B, 2, n, 4, requires_grad=True) for n in (T, S, S))
        out = softmax(q, k, v)
        assert out.shape == q.shape and bool((out == 0).all() | (S > 0))
        out.sum().backward()


def test_a_learned_bias_keeps_its_gradient():
    mechanism = fitted(RandomSynthesizer, Size(T=5, S=5, H=2, G=2))
    mechanism.dropout = P
    mechanism(None, None, torch.randn(2, 2, 5, 4), Mask(causal=True)).square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in mechanism.parameters())


def test_half_precision_and_autocast_are_left_to_pytorch():
    x = torch.ones(4, 50, dtype=torch.bfloat16)
    assert torch.equal(seeded(dropout, x, P), seeded(torch.nn.functional.dropout, x, P))
    q = torch.randn(1, 2, 5, 4)
    softmax = Softmax()
    softmax.dropout = P
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = seeded(softmax, q, q, q)
        want = seeded(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=P))
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)


def test_dropout_compiles_to_one_graph():
    softmax = Softmax()
    softmax.dropout = P
    x = torch.randn(1, 2, 5, 4)
    compiled = torch.compile(lambda x: dropout(softmax(x, x, x, Mask(causal=True)), P), fullgraph=True, backend="eager")
    assert bool((compiled(x) == 0).any())


def model(**changes):
    torch.manual_seed(0)
    attention = {"heads": 3, "dropout": P}
    return regard.GPT(width=12, layers=2, length=9, vocabulary=13, attention=attention, dropout=P, **changes)


def test_recomputed_activations_draw_the_same_dropout():
    tokens = torch.randint(13, (3, 9))
    grads = []
    for checkpoint in (False, True):
        trained = model(checkpoint=checkpoint)
        seeded(trained.loss, tokens, tokens).backward()
        grads.append([p.grad for p in trained.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_evaluation_draws_nothing_and_training_follows_the_seed():
    tokens = torch.randint(13, (3, 9))
    trained = model()
    assert torch.equal(seeded(trained, tokens), seeded(trained, tokens))
    assert not torch.equal(trained(tokens), trained(tokens))
    trained.eval()
    before = torch.get_rng_state()
    torch.testing.assert_close(trained(tokens), plain(trained)(tokens))
    assert torch.equal(torch.get_rng_state(), before)
