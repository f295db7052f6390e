"""Attention by a similarity: by name, by a function, and what is refused."""

import math

import pytest
import torch

import regard
from regard.errors import MaskError, NegativeSimilarityError, OptionError, ZeroRowError
from regard.shapes import Mask


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv():
    return draw(2, 4, 6, 3), draw(2, 2, 6, 3, seed=1), draw(2, 2, 6, 5, seed=2)


def normalised(similarities, causal):
    if causal:
        similarities = similarities.tril()
    return similarities / similarities.sum(-1, keepdim=True)


def repeated(x):
    return x.repeat_interleave(2, 1)


class TestByName:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("sigma", [None, 0.7])
    def test_gaussian_is_the_kernel_of_distances(self, sigma, causal):
        q, k, _ = qkv()
        variance = math.sqrt(3) if sigma is None else sigma**2
        similarities = torch.exp(-torch.cdist(q, repeated(k)).square() / (2 * variance))
        weights = regard.mechanism("gaussian", sigma=sigma).weights(q, k, Mask(causal=causal))
        torch.testing.assert_close(weights, normalised(similarities, causal))

    def test_gaussian_of_keys_of_one_length_is_softmax(self):
        q, k, v = qkv()
        k = torch.nn.functional.normalize(k, dim=-1)
        torch.testing.assert_close(regard.attend(q, k, v, "gaussian"), regard.attend(q, k, v))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("degree", "offset"), [(1, 3.0), (2, 0.0), (2, 1.0), (3, 1.0), (4, 0.5)])
    def test_polynomial_is_a_power(self, degree, offset, causal):
        q, k, _ = qkv()
        similarities = (q @ repeated(k).mT + offset) ** degree
        made = regard.mechanism("polynomial", degree=degree, offset=offset)
        weights = made.weights(q, k, Mask(causal=causal))
        torch.testing.assert_close(weights, normalised(similarities, causal), rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize(("degree", "offset"), [(1, 0.0), (2, 0.0), (3, 1.0), (5, 2.0)])
    def test_its_features_are_as_many_as_it_says_and_give_it_exactly(self, degree, offset):
        x, y = draw(1, 1, 7, 4), draw(1, 1, 7, 4, seed=1)
        made = regard.mechanism("polynomial", degree=degree, offset=offset)
        phi, psi = made.features(x)[0], made.features(y)[0]
        assert phi.shape[-1] == made.feature_count(4) == math.comb(4 + (offset > 0) + degree - 1, degree)
        torch.testing.assert_close(phi @ psi.mT, (x @ y.mT + offset) ** degree)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("gaussian", {"sigma": 0}),
            ("gaussian", {"sigma": math.nan}),
            ("polynomial", {"degree": 0}),
            ("polynomial", {"degree": 2.5}),
            ("polynomial", {"offset": -1}),
            ("similarity", {"sim": 3}),
        ],
    )
    def test_options_that_mean_nothing_are_refused(self, name, options):
        with pytest.raises(OptionError, match=f"{name}.*expected"):
            regard.mechanism(name, **options)


class TestByAFunction:
    @pytest.mark.parametrize("causal", [False, True])
    def test_a_function_of_two_vectors_is_a_mechanism(self, causal):
        q, k, v = qkv()
        out = regard.attend(q, k, v, lambda q, k: torch.exp(q @ k / math.sqrt(3)), causal=causal)
        torch.testing.assert_close(out, regard.attend(q, k, v, causal=causal))

    def test_it_decodes_and_learns(self):
        q, k, v = qkv()
        made = regard.mechanism(lambda q, k: (q - k).abs().sum() + 0.1)
        whole = made(q, k, v, Mask(causal=True))
        state = made.empty(regard.Size.of(q, k, v))
        steps = []
        for t in range(6):
            out, state = made.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            steps.append(out)
        torch.testing.assert_close(torch.cat(steps, 2), whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        assert torch.autograd.gradcheck(lambda *x: made(*x, Mask(causal=True)), leaves)

    def test_a_module_that_learns_is_part_of_the_mechanism(self):
        class Bilinear(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.form = torch.nn.Parameter(torch.eye(3, dtype=torch.float64))

            def forward(self, q, k):
                return torch.exp(q @ self.form @ k)

        made = regard.mechanism(Bilinear())
        made(*qkv()).sum().backward()
        assert [name for name, x in made.named_parameters() if x.grad is not None] == ["sim.form"]

    @pytest.mark.parametrize(
        ("function", "says"),
        [
            (lambda q, k: q * k, "returned \\[3\\]"),
            (lambda q, k: 1.0, "returned float"),
            (lambda q, k: q.sum() if q.sum() > 0 else k.sum(), "torch.where"),
            (lambda q, k, v: v, "regard.check\\(f\\)"),
            (lambda q: q, "no similarity of a query and a key"),
            (torch.nn.functional.scaled_dot_product_attention, "is a whole attention and no similarity"),
        ],
    )
    def test_others_are_refused_in_words(self, function, says):
        with pytest.raises(OptionError, match=says):
            regard.attend(*qkv(), function)

    def test_rules_about_scores_are_refused(self):
        with pytest.raises(MaskError, match="softcap"):
            regard.attend(*qkv(), "similarity", softcap=5.0)
        with pytest.raises(MaskError, match="slopes"):
            regard.mechanism("similarity").empty(regard.Size(H=2), Mask(slopes=torch.ones(2)))

    def test_strict_tells_negative_similarities_and_rows_of_zeros(self):
        q, k, v = qkv()
        with pytest.raises(NegativeSimilarityError):
            regard.attend(q, k, v, torch.dot, strict=True)
        with pytest.raises(ZeroRowError):
            regard.attend(q, k, v, lambda q, k: 0 * q.sum(), strict=True)
        assert not regard.attend(q, k, v, lambda q, k: 0 * q.sum()).any()


PACKED = Mask(causal=True, documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, window=2), PACKED])
def test_weights_that_are_no_softmax_are_normalised_by_the_mask(mask):
    """`Mask.normalise` of exponentials is the softmax, under every rule that hides."""
    scores = draw(2, 3, 7, 7)
    torch.testing.assert_close(mask.normalise(scores.exp()), mask.softmax(scores))
    assert not mask.normalise(torch.zeros(1, 1, 7, 7)).any()
    with pytest.raises(MaskError, match="'softcap' changes scores"):
        mask.but(softcap=5.0).normalise(scores.exp())
