"""Worked facts: what the formulas say about numbers, each small enough to check by hand or by a seeded experiment."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import Mask, Size, kernels
from regard.errors import LengthError, ZeroRowError
from regard.mechanisms import Softmax, fitted, random_features, scores

ALL = ["softmax", "argmax", "elu", "quadratic", "linear", "performer", "fourier", "synthesizer", "synthesizer-random"]
LINEAR = ["elu", "quadratic", "linear", "performer", "fourier"]
RANDOM = ["performer", "fourier"]
CROSSING = ["softmax", "argmax", *LINEAR]
HALF = [torch.bfloat16, torch.float16]


def normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)


def qkv(B=2, H=6, G=3, T=13, S=None, K=5, V=7, seed=0, **how):
    S = T if S is None else S
    shapes = (B, H, T, K), (B, G, S, K), (B, G, S, V)
    return tuple(normal(*shape, seed=3 * seed + n, **how) for n, shape in enumerate(shapes))


def made(name, q, k, v, **options):
    """The mechanism for these tensors; its parameters are the same each time and have their type."""
    if name in RANDOM:
        options = {"features": 29} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = fitted(name, Size.of(q, k, v), **options)
    return built.to(v.dtype) if v.dtype == torch.float64 else built


def distance(a, b):
    """Norm of the difference, relative to the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gradients(mechanism, q, k, v, mask, extra=()):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = mechanism(*inputs, mask)
    return torch.autograd.grad(out, [*inputs, *extra], normal(*out.shape, seed=99).to(out), allow_unused=True)


def padded(x, at):
    """x with a junk token put in before each token number in `at`."""
    parts, before = [], 0
    for n in at:
        parts += [x[:, :, before:n], normal(*x.shape[:2], 1, x.shape[3], seed=71 + n, scale=9.0).to(x)]
        before = n
    return torch.cat([*parts, x[:, :, before:]], 2)


def seen_after(at, T, B):
    """Which tokens of `padded` are real."""
    row = []
    for n in range(T):
        row += [False] * at.count(n) + [True]
    return torch.tensor(row).expand(B, -1)


# Argmax


def test_argmax_picks_the_value_of_the_largest_inner_product():
    k = torch.tensor([[1, 2, 0], [0, 3, 4], [5, 0, 0], [0, 0, 1]]).float()[None, None]
    v = torch.tensor([[2, 0, 1], [1, 4, 3], [0, -1, 4], [1, 0, -1]]).float()[None, None]
    q = torch.tensor([1.0, 1, 2]).view(1, 1, 1, 3)
    argmax = regard.mechanism("argmax")
    assert torch.equal(argmax(q, k, v).flatten(), torch.tensor([1.0, 4, 3]))
    assert torch.equal(argmax.weights(q, k).flatten(), torch.tensor([0.0, 1, 0, 0]))
    # Hidden before the argmax, not after it: the next best is taken.
    visible = torch.tensor([[True, False, True, True]])
    assert torch.equal(argmax(q, k, v, Mask(visible=visible)).flatten(), torch.tensor([0.0, -1, 4]))


def test_argmax_gives_ties_to_the_first_visible_key():
    k = torch.tensor([[2.0, 1], [1, 2], [3, 0], [0, 0]])[None, None]
    q = torch.ones(1, 1, 1, 2)
    argmax = regard.mechanism("argmax")
    for hidden, first in ((None, 0), (0, 1), (1, 0)):
        visible = torch.arange(4)[None] != (-1 if hidden is None else hidden)
        assert argmax.weights(q, k, Mask(visible=visible)).argmax().item() == first
    # All scores equal, and negative: a mask put in after the fact (as zeros) would win here.
    assert argmax.weights(q, -torch.ones(1, 1, 4, 2), Mask(visible=torch.arange(4)[None] > 1)).argmax().item() == 2


@pytest.mark.parametrize("K", [3, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_argmax_of_integers_is_exact_on_every_face(K, dtype):
    draw = torch.Generator().manual_seed(K)
    q, k, v = (torch.randint(-3, 4, (2, n, 13, w), generator=draw).to(dtype) for n, w in ((6, K), (3, K), (3, 7)))
    argmax, mask = regard.mechanism("argmax"), Mask(causal=True)
    raw = q @ k.repeat_interleave(2, 1).mT
    raw = raw.masked_fill(torch.ones(13, 13).triu(1).bool(), -math.inf)
    best = raw.argmax(-1)
    assert ((raw == raw.amax(-1, keepdim=True)).sum(-1) > 1).any(), "no tie to decide"
    want = v.repeat_interleave(2, 1).gather(2, best[..., None].expand(-1, -1, -1, 7))
    assert torch.equal(argmax.weights(q, k, mask), functional.one_hot(best, 13).to(dtype))
    assert torch.equal(argmax(q, k, v, mask), want)
    state, steps = argmax.empty(Size.of(q, k, v)), []
    for n in (slice(0, 5), slice(5, 6), slice(6, 13)):
        out, state = argmax.extend(q[:, :, n], k[:, :, n], v[:, :, n], state)
        steps.append(out)
    assert torch.equal(torch.cat(steps, 2), want)


def test_straight_through_lends_softmax_gradients_to_q_and_k_and_keeps_argmax_ones_for_v():
    q, k, v = qkv(dtype=torch.float64)
    mask = Mask(causal=True, visible=torch.arange(13)[None].expand(2, -1) != 4)
    hard, lent = regard.mechanism("argmax"), regard.mechanism("argmax", gradient="straight_through")
    assert torch.allclose(lent(q, k, v, mask), hard(q, k, v, mask), atol=1e-15)
    soft = gradients(regard.mechanism("softmax"), q, k, v, mask)
    got = gradients(lent, q, k, v, mask)
    assert max(distance(got[i], soft[i]) for i in (0, 1)) < 1e-12
    none = gradients(hard, q, k, v, mask)
    assert none[0] is None and none[1] is None
    assert distance(got[2], none[2]) < 1e-12 < 1e-2 < distance(got[2], soft[2])


# A row with nothing to see


@pytest.mark.parametrize("name", ALL)
def test_a_row_that_sees_nothing_is_zero_and_its_gradients_are_finite(name):
    q, k, v = qkv()
    visible = torch.ones(2, 13, dtype=torch.bool)
    visible[0], visible[1, :3] = False, False
    for mask in (Mask(visible=visible), Mask(causal=True, visible=visible)):
        for use in ("auto", "plain"):
            mechanism = made(name, q, k, v)
            mechanism.use = use
            out = mechanism(q, k, v, mask)
            assert (out[0] == 0).all() and out.isfinite().all() and (out[1, :, 3:] != 0).any()
            assert not mask.causal or (out[1, :, :3] == 0).all()
            assert all(g is None or g.isfinite().all() for g in gradients(mechanism, q, k, v, mask))
        assert (mechanism.weights(q, k, mask)[0] == 0).all()


@pytest.mark.parametrize("name", CROSSING)
def test_attention_over_no_keys_at_all_is_zero(name):
    q, k, v = qkv(S=1)
    assert torch.equal(made(name, q, k, v)(q, k[:, :, :0], v[:, :, :0]), torch.zeros(2, 6, 13, 7))


def test_minus_1e9_averages_a_fully_masked_row_where_zeros_are_right():
    q, k, v = qkv(B=1, H=1, G=1, T=3)
    visible = torch.zeros(1, 3, dtype=torch.bool)
    # In float32 every score is lost beside 1e9, so that hidden keys share the row evenly.
    naive = torch.softmax(q @ k.mT / math.sqrt(5) - 1e9, -1) @ v
    assert torch.allclose(naive, v.mean(2, keepdim=True).expand_as(naive), atol=1e-6)
    assert (regard.attend(q, k, v, visible=visible) == 0).all()


def test_minus_infinity_throughout_a_row_of_the_bias_gives_zeros():
    q, k, v = qkv()
    bias = normal(6, 13, 13, seed=5)
    bias[:, 4] = -math.inf
    for use in ("auto", "plain"):
        softmax = regard.mechanism("softmax")
        softmax.use = use
        out = softmax(q, k, v, Mask(bias=bias))
        assert (out[:, :, 4] == 0).all() and out.isfinite().all() and (out[:, :, 3] != 0).all()
        assert all(g.isfinite().all() for g in gradients(softmax, q, k, v, Mask(bias=bias)))


# Scale


def test_inner_products_of_gaussian_vectors_have_the_stated_mean_and_variance():
    n, d, sigma = 200_000, 17, 0.7
    mu = normal(d, seed=8, scale=0.5, dtype=torch.float64)
    q, k = (mu + normal(n, 1, 1, d, seed=s, scale=sigma, dtype=torch.float64) for s in (1, 2))
    products = scores(q, k, Mask()).flatten()
    mean, variance = mu.square().sum(), d * sigma**4 + 2 * sigma**2 * mu.square().sum()
    centred = products - products.mean()
    # Four standard errors: a right formula passes but once in 16,000 seeds.
    assert abs(products.mean() - mean) < 4 * (variance / n).sqrt()
    error = 4 * ((centred**4).mean() - variance**2).sqrt() / math.sqrt(n)
    assert abs(centred.square().mean() - variance) < error
    assert abs(centred.square().mean() - d * sigma**4) > 5 * error, "no power to tell the second term"


@pytest.mark.parametrize(("K", "diagonal"), [(4, 0.10), (16, 0.37), (64, 0.94)])
def test_attention_of_a_sequence_to_itself_nears_the_identity_as_keys_widen(K, diagonal):
    q = normal(256, 1, 64, K, seed=K)
    each = regard.mechanism("softmax").weights(q, q)[:, 0].diagonal(dim1=1, dim2=2).mean(1)
    assert abs(each.mean() - diagonal) < 0.005 + 4 * each.std() / math.sqrt(256)


def test_a_value_is_copied_when_its_score_exceeds_each_other_and_not_their_sum():
    k = torch.tensor([[1.0], [0.9], [0.9], [0.9]])[None, None]
    weights = Softmax(scale=1.0).weights(torch.full((1, 1, 1, 1), 100.0), k).flatten()
    assert k.flatten()[0] < k.flatten()[1:].sum() and weights[0] > 0.999


# Softmax


def test_values_may_be_twice_as_wide_as_keys():
    q, k, v = qkv(K=5, V=10)
    want = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(5)).softmax(-1) @ v.repeat_interleave(2, 1)
    assert torch.allclose(regard.attend(q, k, v), want, atol=1e-6)


def test_cross_attention_takes_another_length():
    q, k, v = qkv(T=7, S=11)
    softmax = regard.mechanism("softmax")
    want = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(5)).softmax(-1) @ v.repeat_interleave(2, 1)
    assert torch.allclose(softmax(q, k, v), want, atol=1e-6)
    assert torch.allclose(softmax.read(q, softmax.write(softmax.empty(Size.of(q, k, v)), k, v)), want, atol=1e-6)


def test_one_decoding_step_is_the_last_row_of_the_whole():
    q, k, v = qkv(G=1)
    for use in ("auto", "plain"):
        softmax = regard.mechanism("softmax")
        softmax.use = use
        whole = softmax(q, k, v, Mask(causal=True))
        _, state = softmax.extend(q[:, :, :12], k[:, :, :12], v[:, :, :12], softmax.empty(Size.of(q, k, v)))
        step, _ = softmax.extend(q[:, :, 12:], k[:, :, 12:], v[:, :, 12:], state)
        assert distance(step, whole[:, :, 12:]) < 1e-6
    # Multi-query scores of a step contract bhk,bnk->bhn, and need the scale as a whole sequence does.
    weights = torch.einsum("bhk,bnk->bhn", q[:, :, 12], k[:, 0])
    by_hand = torch.einsum("bhn,bnv->bhv", (weights / math.sqrt(5)).softmax(-1), v[:, 0])
    unscaled = torch.einsum("bhn,bnv->bhv", weights.softmax(-1), v[:, 0])
    assert distance(step[:, :, 0], by_hand) < 1e-6 < 1e-1 < distance(step[:, :, 0], unscaled)


@pytest.mark.parametrize("name", CROSSING)
def test_grouped_heads_are_each_key_head_repeated_side_by_side(name):
    q, k, v = qkv(dtype=torch.float64)
    for causal in (False, True):
        mechanism = made(name, q, k, v)
        out = mechanism(q, k, v, Mask(causal=causal))
        side = mechanism(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), Mask(causal=causal))
        tiled = mechanism(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), Mask(causal=causal))
        assert distance(out, side) < 1e-9 < 1e-2 < distance(out, tiled)


def test_a_multi_query_cache_takes_one_share_of_a_multi_head_cache():
    softmax, sizes = regard.mechanism("softmax"), [Size(2, 1, 31, 6, G, 5, 7, dtype=torch.bfloat16) for G in (6, 1)]
    many, one = (softmax.empty(size) for size in sizes)
    assert many.k.nbytes + many.v.nbytes == 6 * (one.k.nbytes + one.v.nbytes) == 2 * 6 * 31 * (5 + 7) * 2
    assert [regard.cost(softmax, size).state for size in sizes] == [
        many.k.nbytes + many.v.nbytes,
        one.k.nbytes + one.v.nbytes,
    ]


MASKS = {
    "nothing": Mask(),
    "causal": Mask(causal=True),
    "bias": Mask(bias=normal(6, 13, 13, seed=5, dtype=torch.float64)),
    "bias of a batch": Mask(causal=True, bias=normal(2, 1, 13, 13, seed=6, dtype=torch.float64)),
    "slopes": Mask(causal=True, slopes=torch.linspace(0.1, 1, 6, dtype=torch.float64)),
    "window": Mask(causal=True, window=3),
    "window both ways": Mask(window=3),
    "documents": Mask(causal=True, documents=torch.tensor([[0] * 4 + [1] * 9, [5] * 7 + [3] * 2 + [5] * 4])),
    "padding": Mask(causal=True, visible=torch.arange(13)[None] >= torch.tensor([[3], [0]])),
    "all": Mask(
        causal=True,
        visible=torch.arange(13)[None] != torch.tensor([[3], [7]]),
        window=5,
        bias=normal(13, 13, seed=7, dtype=torch.float64),
        slopes=torch.linspace(0.1, 1, 6, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["softmax", "synthesizer", "synthesizer-random"])
def test_the_fused_call_is_the_plain_formula(name, mask):
    q, k, v = qkv(dtype=torch.float64)
    mechanism = made(name, q, k, v)
    fast, slow = [], []
    for use, into in (("sdpa", fast), ("plain", slow)):
        mechanism.use = use
        into += [mechanism(q, k, v, mask), *gradients(mechanism, q, k, v, mask, list(mechanism.parameters()))]
    for a, b in zip(fast, slow, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() < 1e-10


def test_softcap_bends_the_scores_and_is_left_to_the_plain_formula():
    q, k, v = qkv(scale=3.0)
    mask, softmax = Mask(causal=True, softcap=2.0), regard.mechanism("softmax")
    assert softmax.select_kernel("forward", q, k, v, mask) is None
    assert softmax.select_kernel("forward", q, k, v, mask.but(softcap=None)) is not None
    bent = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / math.sqrt(5) / 2)
    weights = bent.masked_fill(torch.ones(13, 13).triu(1).bool(), -math.inf).softmax(-1)
    assert distance(softmax(q, k, v, mask), weights @ v.repeat_interleave(2, 1)) < 1e-6
    assert distance(softmax(q, k, v, mask), softmax(q, k, v, mask.but(softcap=None))) > 1e-1


def test_alibi_takes_slope_times_distance_from_the_score():
    q, k, _ = qkv(B=1, H=2, G=2, T=4)
    slopes = torch.tensor([0.5, 0.25])
    i, j = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    raw = q @ k.mT / math.sqrt(5) - slopes[None, :, None, None] * (i - j)
    want = raw.masked_fill(j > i, -math.inf).softmax(-1)
    assert torch.allclose(regard.mechanism("softmax").weights(q, k, Mask(True, slopes=slopes)), want, atol=1e-6)


@pytest.mark.parametrize("at", [[0, 0, 0], [2, 2, 9], [5]], ids=["left", "inside", "one"])
@pytest.mark.parametrize("rule", ["slopes", "window"])
@pytest.mark.parametrize("use", ["auto", "plain"])
def test_alibi_and_windows_count_visible_tokens_so_padding_changes_nothing(at, rule, use):
    q, k, v = qkv()
    rules = Mask(slopes=torch.linspace(0.5, 1, 6)) if rule == "slopes" else Mask(window=3)
    softmax = regard.mechanism("softmax")
    softmax.use = use
    wide, seen = [padded(x, at) for x in (q, k, v)], seen_after(at, 13, 2)
    for causal in (True, False):
        mask = rules.but(causal=causal)
        want = softmax(q, k, v, mask)
        assert distance(want, softmax(q, k, v, Mask(causal=causal))) > 1e-2, "the rule does nothing"
        got = softmax(*wide, mask.but(visible=seen))
        assert distance(got[:, :, seen[0]], want) < 1e-6
    out, state = [], softmax.empty(Size.of(q, k, v), rules)
    for n in torch.arange(len(seen[0])).split(4):
        step, state = softmax.extend(*(x[:, :, n] for x in wide), state, seen[:, n])
        out.append(step)
    assert distance(torch.cat(out, 2)[:, :, seen[0]], softmax(q, k, v, rules.but(causal=True))) < 1e-6


@pytest.mark.parametrize("use", ["auto", "plain"])
def test_nan_in_hidden_columns_of_a_bias_is_inert(use):
    q, k, v = qkv()
    visible = torch.ones(2, 13, dtype=torch.bool)
    visible[:, 4] = False
    clean = normal(1, 6, 13, 13, seed=5)
    softmax = regard.mechanism("softmax")
    softmax.use = use
    results = []
    for poison in (0.0, math.nan, math.inf):
        bias = clean.clone()
        bias[..., 4] = poison
        bias.requires_grad_()
        mask = Mask(causal=True, visible=visible, bias=bias)
        results.append([softmax(q, k, v, mask), *gradients(softmax, q, k, v, mask, [bias])])
        assert (results[-1][-1][..., 4] == 0).all() and (results[-1][-1][..., 5, :4] != 0).all()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_causal_weights_are_lower_triangular_with_queries_as_rows(name):
    q, k, v = qkv()
    weights = made(name, q, k, v).weights(q, k, Mask(causal=True))
    assert (weights.triu(1) == 0).all()
    assert torch.allclose(weights[:, :, 0, 0], torch.ones(2, 6)) and (weights.tril(-1) != 0).any()
    assert torch.allclose(weights.sum(-1), torch.ones(2, 6, 13), atol=1e-4)


# Quadratic


def test_the_quadratic_map_gives_the_kernel_exactly_and_only_with_its_root_two():
    K = 5
    quadratic = regard.mechanism("quadratic")
    q, k = normal(1, 1, 7, K, seed=1, dtype=torch.float64), normal(1, 1, 11, K, seed=2, dtype=torch.float64)
    (a, none), (b, _) = quadratic.features(q), quadratic.features(k)
    assert none is None and a.shape[-1] == quadratic.feature_count(K) == (K + 1) * (K + 2) // 2 == 21
    kernel = (q @ k.mT + 1) ** 2
    assert (a @ b.mT - kernel).abs().max() < 1e-12
    single = torch.ones(21, dtype=torch.float64)
    single[1 : K + 1] = single[2 * K + 1 :] = 1 / math.sqrt(2)
    assert ((a * single) @ (b * single).mT - kernel).abs().max() > 1
    assert distance(quadratic.weights(q, k), kernel / kernel.sum(-1, keepdim=True)) < 1e-12


def test_a_strongly_negative_inner_product_gets_a_large_quadratic_weight():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([-9.0, 1.0, 3.0]).view(1, 1, 3, 1)
    weights = regard.mechanism("quadratic").weights(q, k).flatten()
    assert torch.allclose(weights, torch.tensor([64.0, 4, 16]) / 84)


# Random features


def estimates(mechanism, x, y, block):
    """φ(x)·φ(y) of each block of features on its own: independent estimates of exp(q·k/√K)."""
    (a, ca), (b, cb) = (mechanism.features(z.view(1, 1, 1, -1).double()) for z in (x, y))
    each = (a * b * (ca + cb).exp()).flatten() * mechanism.count
    return each.view(-1, block).mean(1)


def deviation(samples, truth):
    """How many standard errors the mean of the samples lies from the truth."""
    return abs((samples.mean() - truth) / (samples.std() / math.sqrt(len(samples)))).item()


def qr_as_it_comes(F, K, seed):
    """Orthogonal directions without the signs fixed."""
    draw = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(F // K, K, K, generator=draw, dtype=torch.float64))
    lengths = torch.randn(F // K, K, K, generator=draw, dtype=torch.float64).norm(dim=-1)
    return (q.mT * lengths[..., None]).reshape(F, K)


def all_of_one_length(F, K, seed):
    return functional.normalize(random_features.orthogonal(F, K, seed), dim=-1) * math.sqrt(K)


POINTS = {
    "along an axis": ([1.0, 0, 0], [0.8, 0, 0]),
    "along another": ([0, 0, 0.9], [0, 0, 1.1]),
    "anywhere": ([0.7, -0.4, 0.2], [0.5, 0.9, -0.6]),
    "opposite": ([0.9, 0.3, 0], [-0.6, -0.3, 0.5]),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_the_performer_kernel_is_unbiased_with_orthogonal_features(points):
    x, y = map(torch.tensor, points)
    truth = math.exp(x @ y / math.sqrt(3))
    for seed in range(3):
        performer = regard.mechanism("performer", features=120_000, width=3, seed=seed)
        assert deviation(estimates(performer, x, y, 3), truth) < 4


@pytest.mark.parametrize("directions", [qr_as_it_comes, all_of_one_length])
def test_the_performer_kernel_is_biased_without_fixed_signs_or_without_gaussian_lengths(directions, monkeypatch):
    x, y = map(torch.tensor, POINTS["along an axis"])
    monkeypatch.setattr(regard.mechanisms()["performer"], "draw", lambda self, F, K, seed: directions(F, K, seed))
    performer = regard.mechanism("performer", features=120_000, width=3)
    assert deviation(estimates(performer, x, y, 3), math.exp(x @ y / math.sqrt(3))) > 8


def test_performer_directions_are_orthogonal_within_blocks_of_the_width():
    w = regard.mechanism("performer", features=12, width=5).w.double()
    inside = torch.block_diag(torch.ones(5, 5), torch.ones(5, 5), torch.ones(2, 2)).bool()
    cosines = functional.normalize(w, dim=-1) @ functional.normalize(w, dim=-1).mT
    assert (cosines - torch.eye(12))[inside].abs().max() < 1e-6 < 1e-1 < cosines[~inside].abs().mean()


def test_performer_directions_have_the_lengths_of_gaussian_vectors():
    K = 7
    squares = regard.mechanism("performer", features=70_000, width=K).w.double().square().sum(-1)
    # χ²(K): mean K, variance 2K.
    assert deviation(squares, K) < 4 and abs(squares.var() / (2 * K) - 1) < 0.05


@pytest.mark.parametrize("name", RANDOM)
def test_one_seed_draws_the_same_bits_and_another_seed_draws_others(name):
    build = regard.mechanism
    first, same, other = (build(name, features=13, width=5, seed=s).w for s in (3, 3, 4))
    assert torch.equal(first, same) and not torch.equal(first, other)
    again = build(name, features=13, width=5, seed=4)
    again.redraw(3)
    assert torch.equal(again.w, first)


@pytest.mark.parametrize("name", RANDOM)
def test_directions_drawn_at_first_use_are_those_of_the_seed_and_are_saved(name):
    q, k, v = qkv()
    lazy = regard.mechanism(name, features=13, seed=5)
    out = lazy(q, k, v)
    assert torch.equal(out, regard.mechanism(name, features=13, seed=5, width=5)(q, k, v))
    loaded = regard.mechanism(name, features=13, seed=6)
    loaded.load_state_dict(lazy.state_dict())
    assert torch.equal(loaded(q, k, v), out)


def test_the_fourier_kernel_is_unbiased_with_variance_one_over_sigma_squared(monkeypatch):
    K, F = 5, 100_000
    x, y = normal(K, seed=1, scale=0.6), normal(K, seed=2, scale=0.6)
    truth = math.exp(x @ y / math.sqrt(K))

    def off():
        fourier = regard.mechanism("fourier", features=F, width=K)
        (a, ca), (b, cb) = (fourier.features(z.view(1, 1, 1, -1).double()) for z in (x, y))
        assert a.shape[-1] == 2 * F
        each = (a * b).view(2, F).sum(0) * F * (ca + cb).exp().item()
        return deviation(each, truth)

    assert off() < 4
    gaussian = random_features.gaussian
    monkeypatch.setattr(random_features, "gaussian", lambda F, K, seed: math.sqrt(K) * gaussian(F, K, seed))
    assert off() > 8, "w of variance σ² instead of 1/σ² goes unnoticed"


@pytest.mark.parametrize("F", [3, 16])
@pytest.mark.parametrize("delta", [0.5, 1.0, 2.0])
def test_a_fourier_kernel_entry_has_the_stated_variance(F, delta):
    K, n = 5, 4000
    step = functional.normalize(normal(K, seed=3), dim=0) * delta * K**0.25
    pair = torch.stack([step, torch.zeros(K)]).view(1, 1, 2, K).double() + normal(K, seed=4).double()
    entries = []
    fourier = regard.mechanism("fourier", features=F, width=K)
    for seed in range(n):
        fourier.redraw(seed)
        psi = fourier.features(pair)[0][0, 0]
        entries.append(psi[0] @ psi[1])
    entries = torch.stack(entries)
    variance = (1 - math.exp(-(delta**2))) ** 2 / (2 * F)
    centred = entries - math.exp(-(delta**2) / 2)
    error = ((centred**4).mean() - variance**2).sqrt().item() / math.sqrt(n)
    assert abs(centred.square().mean().item() - variance) < 4 * error
    assert error < variance / 20, "too few draws to say anything"


def test_features_means_frequencies_for_fourier_and_features_for_performer():
    q, k, v = qkv()
    for name, entries in (("fourier", 2 * 29), ("performer", 29)):
        mechanism = made(name, q, k, v)
        assert mechanism.feature_count(5) == mechanism.features(q)[0].shape[-1] == entries
        assert mechanism.empty(Size.of(q, k, v)).sums.shape == (2, 3, entries, 8)


def test_fourier_weights_may_be_negative_and_rows_still_sum_to_one():
    q, k, v = qkv(dtype=torch.float64)
    weights = made("fourier", q, k, v, features=7).weights(q, k)
    assert (weights < 0).any() and (weights.sum(-1) - 1).abs().max() < 1e-9


def approximation(name, K, F, variance, seeds=11, N=64):
    """Median relative error of the output against softmax."""
    errors = []
    for seed in range(seeds):
        q, k, _ = qkv(B=1, H=1, G=1, T=N, K=K, seed=seed, scale=math.sqrt(variance))
        v = normal(1, 1, N, K, seed=1000 + seed)
        out = regard.mechanism(name, features=F, width=K, seed=seed)(q, k, v)
        errors.append(distance(out, regard.attend(q, k, v)))
    return sorted(errors)[seeds // 2]


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("K", [16, 64])
def test_the_error_falls_with_the_root_of_the_features_where_inputs_shrink_with_the_width(name, K):
    F = torch.tensor([64.0, 256, 1024, 4096])
    errors = torch.tensor([approximation(name, K, int(f), 1 / K) for f in F])
    x, y = F.log() - F.log().mean(), errors.log()
    assert -0.65 < (x @ y / (x @ x)).item() < -0.35


@pytest.mark.parametrize("name", RANDOM)
def test_wider_keys_err_less_only_where_inputs_shrink_with_the_width(name):
    shrinking = [approximation(name, K, 256, 1 / K) for K in (4, 16, 64)]
    assert shrinking[0] > 1.3 * shrinking[1] > 1.3**2 * shrinking[2]
    constant = [approximation(name, K, 4096, 1.0) for K in (4, 64)]
    assert constant[0] < 0.6 < 1 < constant[1]


# Never looking ahead


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("T", [7, 131, 257])
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_the_last_key_changes_no_bit_of_earlier_rows(name, T, scale):
    q, k, v = qkv(T=T, scale=scale)
    q = q / scale
    mechanism, other = made(name, q, k, v), k.clone()
    other[:, :, -1] = mechanism.w[3] * 5**0.25  # y = w_f: no key of its length has a larger feature
    changed = False
    for last in (other, torch.cat([k[:, :, :-1], 1000 * k[:, :, -1:]], 2)):
        before, after = mechanism(q, k, v, Mask(causal=True)), mechanism(q, last, v, Mask(causal=True))
        assert torch.equal(before[:, :, :-1], after[:, :, :-1])
        assert (before[:, :, :-1] != 0).any()
        changed |= not torch.equal(before[:, :, -1], after[:, :, -1])
    assert changed


# Large inputs and long sequences


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_large_inputs_give_finite_outputs(name, dtype):
    for scale in (1.0, 10.0, 100.0):
        for causal in (False, True):
            q, k, v = qkv(T=131, scale=scale, dtype=dtype)
            assert made(name, q, k, v)(q, k, v, Mask(causal=causal)).isfinite().all()


# Not in float16: there a gradient times an input of a hundred is past its largest number.
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_inputs_give_finite_gradients(name, dtype):
    for scale in (1.0, 10.0, 30.0, 100.0):
        for causal in (False, True):
            q, k, v = qkv(T=131, scale=scale, dtype=dtype)
            found = gradients(made(name, q, k, v), q, k, v, Mask(causal=causal))
            assert all(g is None or g.isfinite().all() for g in found)


def linear_by_hand(phi, q, k, v, C=512):
    """Causal linear attention in float64, a plain sum over chunks without any rescaling."""
    total, out = 0.0, []
    for qs, ks, vs in zip(q.split(C), k.split(C), v.split(C), strict=True):
        a, b, ones = phi(qs), phi(ks), torch.cat([vs, torch.ones_like(vs[:, :1])], 1)
        sums = (a @ b.mT).tril() @ ones + a @ (total if len(out) else torch.zeros_like(b.mT @ ones))
        total = total + b.mT @ ones
        out.append(sums[:, :-1] / sums[:, -1:])
    return torch.cat(out)


@pytest.mark.parametrize("tokens", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["elu", "performer"])
def test_long_sequences_in_bfloat16_stay_close_to_float64(name, tokens):
    q, k, v = qkv(B=1, H=1, G=1, T=tokens, K=16, V=16, dtype=torch.bfloat16)
    v = v + 1
    mechanism = made(name, q, k, v, **({"features": 64} if name == "performer" else {}))
    with torch.no_grad():
        out = mechanism(q, k, v, Mask(causal=True))
    if name == "performer":
        w = mechanism.w.double()

        def phi(x):
            return torch.exp(x / 2 @ w.mT - (x / 2).square().sum(-1, keepdim=True) / 2)
    else:

        def phi(x):
            return functional.elu(x) + 1

    want = linear_by_hand(phi, *(x[0, 0].double() for x in (q, k, v)))
    assert distance(out[0, 0], want) < 4e-3 and distance(out[0, 0, -4096:], want[-4096:]) < 4e-3


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_states_are_float32_or_better_and_do_not_grow(name, dtype):
    q, k, v = qkv(dtype=dtype)
    mechanism = made(name, q, k, v)
    state = mechanism.empty(Size.of(q, k, v))
    expected = torch.float64 if name in ("quadratic", "fourier") else torch.float32
    entries = mechanism.feature_count(5)
    for _ in range(3):
        out, state = mechanism.extend(q, k, v, state)
        assert out.dtype == dtype and state.sums.dtype == state.peak.dtype == expected
        assert state.sums.shape == (2, 3, entries, 8)
    assert state.tokens.tolist() == [39, 39]
    assert regard.cost(mechanism, Size.of(q, k, v)).state == state.sums.nbytes


def test_running_sums_in_bfloat16_would_lose_most_of_the_tokens():
    N = 4096
    k = normal(1, 1, N, 5, seed=1, dtype=torch.bfloat16)
    v = torch.ones_like(k)
    elu = regard.mechanism("elu")
    truth = (functional.elu(k.double()) + 1).sum(2)
    state, naive = elu.empty(Size.of(k, k, v)), torch.zeros(1, 1, 5, dtype=torch.bfloat16)
    for n in range(N):
        state = elu.write(state, k[:, :, n : n + 1], v[:, :, n : n + 1])
        naive = naive + (functional.elu(k[:, :, n]) + 1)
    assert distance(state.sums[..., -1], truth) < 1e-5
    assert (naive / truth).max() < 0.25


# Synthesizers


def test_a_dense_synthesizer_is_softmax_attention_with_learned_keys():
    q, k, v = qkv()
    dense = made("synthesizer", q, k, v)
    with torch.no_grad():
        dense.offset.copy_(normal(6, 13, seed=17))
    queries = torch.cat([q.relu(), torch.ones(2, 6, 13, 1)], -1)
    keys = torch.cat([dense.keys, dense.offset[..., None]], -1).expand(2, -1, -1, -1)
    for mask in (Mask(), Mask(causal=True), Mask(causal=True, window=4)):
        want = Softmax(scale=1.0)(queries, keys, v.repeat_interleave(2, 1), mask)
        for use in ("auto", "plain"):
            dense.use = use
            assert distance(dense(q, None, v, mask), want) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_a_relative_synthesizer_scores_distances(causal):
    q, k, v = qkv()
    dense = made("synthesizer", q, k, v, relative=True)
    with torch.no_grad():
        dense.offset.copy_(normal(6, 25, seed=17))
    scores = torch.full((2, 6, 13, 13), -torch.inf)
    for i in range(13):
        for j in range(i + 1 if causal else 13):
            column = i - j + 12
            scores[:, :, i, j] = (q[:, :, i].relu() * dense.keys[:, column]).sum(-1) + dense.offset[:, column]
    want = scores.softmax(-1)
    assert distance(dense.weights(q, k, Mask(causal=causal)), want) < 1e-6
    # What a token attends to within a window of four does not depend on where it stands.
    window = Mask(causal=causal, window=4)
    later = dense(q, None, v, window)[:, :, 7:]
    alone = dense(q[:, :, 4:], None, v[:, :, 4:], window)[:, :, 3:]
    assert distance(later, alone) < 1e-6


@pytest.mark.parametrize("name", ["synthesizer", "synthesizer-random"])
def test_a_synthesizer_caches_values_and_no_keys(name):
    q, k, v = qkv(dtype=torch.bfloat16)
    mechanism = made(name, q, k, v)
    state = mechanism.empty(Size.of(q, k, v))
    _, state = mechanism.extend(q, k, v, state)
    assert state.k is None
    assert state.v.nbytes == regard.cost(mechanism, Size.of(q, k, v)).state == 2 * 3 * 13 * 7 * 2


@pytest.mark.parametrize("options", [("synthesizer", None), ("synthesizer-random", None), ("synthesizer-random", 3)])
@pytest.mark.parametrize("at", [[0, 0, 0], [2, 2, 9]], ids=["left", "inside"])
def test_synthesizer_rows_and_columns_are_positions_so_padding_takes_none(options, at):
    name, rank = options
    q, k, v = qkv()
    mechanism = made(name, q, k, v, **({} if rank is None else {"rank": rank}))
    wide, seen = [padded(x, at) for x in (q, k, v)], seen_after(at, 13, 2)
    for mask in (Mask(), Mask(causal=True)):
        want = mechanism(q, k, v, mask)
        for use in ("auto", "plain"):
            mechanism.use = use
            got = mechanism(*wide, mask.but(visible=seen))
            assert distance(got[:, :, seen[0]], want) < 1e-6
        with pytest.raises(LengthError, match="16 visible tokens, but it was built for length = 13"):
            mechanism(*wide, mask)


def test_a_factorised_random_synthesizer_is_the_full_one_of_the_product():
    q, k, v = qkv()
    thin, full = (made("synthesizer-random", q, k, v, rank=rank) for rank in (3, None))
    with torch.no_grad():
        full.left.copy_(thin.left @ thin.right.mT)
    mask = Mask(causal=True)
    assert distance(thin(q, k, v, mask), full(q, k, v, mask)) < 1e-6
    by_hand = full.left.masked_fill(torch.ones(13, 13).triu(1).bool(), -math.inf).softmax(-1)
    assert distance(thin.weights(q, k, mask), by_hand.expand(2, -1, -1, -1)) < 1e-6


# Row sums of zero


@pytest.mark.parametrize("causal", [False, True])
def test_similarities_that_sum_to_zero_give_zeros_or_under_strict_an_error(causal):
    q, k, v = qkv()
    q, mask = -q.abs(), Mask(causal=causal)
    assert (regard.mechanism("linear", phi=torch.relu)(q, k, v, mask) == 0).all()
    strict = regard.mechanism("linear", phi=torch.relu, strict=True)
    for run in (
        lambda: strict(q, k, v, mask),
        lambda: strict.weights(q, k, mask),
        lambda: strict.extend(q, k, v, strict.empty(Size.of(q, k, v))),
        lambda: strict.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], strict.empty(Size.of(q, k, v))),
    ):
        with pytest.raises(ZeroRowError, match="sum to zero"):
            run()


def test_strict_leaves_rows_that_may_see_nothing_alone():
    q, k, v = qkv()
    strict = regard.mechanism("linear", phi=functional.softplus, strict=True)
    visible = torch.arange(13)[None] >= torch.tensor([[3], [13]])
    for mask in (
        Mask(causal=True, visible=visible),
        Mask(visible=visible),
        Mask(causal=True, visible=visible, window=2),
    ):
        assert (strict(q, k, v, mask)[1] == 0).all() and (strict.weights(q, k, mask)[1] == 0).all()


# Costs


@pytest.mark.parametrize("G", [1, 2, 6])
def test_a_decoding_step_costs_what_its_products_count(G):
    b, n, D, H, K, V, e = 3, 10, 19, 6, 5, 7, 4
    x, wq, wo = normal(b, D), normal(D, H * K), normal(H * V, D)
    wk, wv = normal(D, G * K), normal(D, G * V)
    softmax = kernels.plain(regard.mechanism("softmax"))
    cache = softmax.empty(Size(b, 1, n + 1, H, G, K, V))
    cache = softmax.write(cache, normal(b, G, n, K), normal(b, G, n, V))
    with FlopCounterMode(display=False) as counter:
        q, k, v = (x @ w for w in (wq, wk, wv))
        out, cache = softmax.extend(q.view(b, H, 1, K), k.view(b, G, 1, K), v.view(b, G, 1, V), cache)
        y = out.reshape(b, H * V) @ wo
    step = regard.cost.decode(b, n, D, H, G, K, V, e)
    assert step.flops == counter.get_total_flops()
    moved = [wq, wk, wv, wo, cache.k, cache.v, x, q, k, v, out, y]
    assert step.bytes == sum(t.nbytes for t in moved) and step.intensity == step.flops / step.bytes


def test_multi_query_decoding_reads_one_share_of_the_cache_for_the_same_products():
    b, D, H, K = 2, 64, 8, 8

    def grown(G, of, d=1):
        one, two = (getattr(regard.cost.decode(b, n, D, H, G, d * K, d * K), of) for n in (1000, 2000))
        return two - one

    assert grown(1, "flops") == grown(H, "flops") and H * grown(1, "bytes") == grown(H, "bytes")
    # Attention over the cache is O(bnd): it doubles with the width of the heads.
    assert grown(H, "flops", 2) == 2 * grown(H, "flops") == 2 * 2 * b * H * 1000 * 2 * K
    long = [regard.cost.decode(b, 10**7, D, H, G, K, K).intensity for G in (H, 1)]
    assert long == pytest.approx([1, H], rel=1e-3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("causal", [False, True])
def test_pairwise_products_are_quadratic_in_length_and_linear_ones_linear(name, causal):
    once, twice = (
        regard.cost(name, Size(2, N, N, 6, 3, 5, 7, causal), **({"features": 29} if name in RANDOM else {}))
        for N in (1024, 2048)
    )
    assert twice.matmul == (2 if name in LINEAR else 4) * once.matmul
    assert twice.state == (1 if name in LINEAR else 2) * once.state


def test_quadratic_products_grow_with_the_square_of_the_width():
    sizes = [Size(1, 128, 128, 1, 1, K, 7, False) for K in (63, 127)]
    assert [regard.cost("quadratic", size).matmul for size in sizes] == [
        2 * 128 * 2 * F * (7 + 1) for F in (64 * 65 // 2, 128 * 129 // 2)
    ]
    softmax = regard.cost("softmax", Size(2, 32, 48, 6, 3, 5, 7, False))
    assert softmax.matmul == 2 * 2 * 6 * 32 * 48 * (5 + 7)


# Compilers and autocast


def compiled_is_eager(name, backend, tolerance):
    q, k, v = qkv(T=131)
    mechanism = made(name, q, k, v).eval()
    padding = torch.arange(131)[None] >= torch.tensor([[3], [0]])
    for visible in (None, padding):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, k, v, seen: mechanism(q, k, v, Mask(causal=True, visible=seen)), fullgraph=True, backend=backend
        )
        want = mechanism(q, k, v, Mask(causal=True, visible=visible))
        assert (compiled(q, k, v, visible) - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("name", ALL)
def test_each_mechanism_compiles_to_one_graph(name):
    compiled_is_eager(name, "aot_eager", 1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["softmax", "elu", "performer"])
def test_inductor_code_gives_the_same(name):
    compiled_is_eager(name, "inductor", 1e-5)


@pytest.mark.parametrize("name", LINEAR)
def test_autocast_does_not_reach_into_linear_mechanisms(name):
    q, k, v = qkv(T=131)
    mechanism = made(name, q, k, v)

    def faces():
        state = mechanism.write(mechanism.empty(Size.of(q, k, v)), k, v)
        grown = mechanism.extend(q, k, v, mechanism.empty(Size.of(q, k, v)))[0]
        whole = [mechanism(q, k, v, Mask(causal=causal)) for causal in (False, True)]
        return [*whole, mechanism.weights(q, k), mechanism.read(q, state), grown, state.sums]

    plain = faces()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (q @ k.repeat_interleave(2, 1).mT).dtype == torch.bfloat16
        cast = faces()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("use", ["plain", "sdpa"])
def test_a_random_synthesizer_needs_only_values(use):
    built = regard.mechanism("synthesizer-random", heads=6, length=7)
    built.use = use
    v = torch.randn(3, 2, 7, 5)
    q = torch.randn(3, 6, 7, 4)
    assert torch.equal(built(None, None, v), built(q, None, v))


# Names


def test_packages_that_can_be_called_still_hold_their_modules():
    names = ("lab.design", "mechanisms.base", "generate.decode", "lens.recording", "cost.devices")
    code = [f"assert regard.{name}.__name__ == 'regard.{name}'" for name in names]
    code.append("assert callable(regard.mechanisms) and callable(regard.generate) and callable(regard.cost)")
    # A fresh interpreter: here, other tests have imported everything already.
    subprocess.run([sys.executable, "-c", "; ".join(["import regard", *code])], check=True)
