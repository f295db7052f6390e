"""Packed documents and padding on a CPU, stretch by stretch, against attention by its definition over all pairs."""

import pytest
import torch
from torch.nn import functional

from regard.kernels import fast, plain, stretches
from regard.mechanisms import mechanism
from regard.shapes import Mask

T = 150
places = torch.arange(T)
VISIBLE = {
    "on the left": places >= torch.tensor([[40], [0]]),
    "on the right": places < torch.tensor([[T], [90]]),
    "on both sides": (places >= torch.tensor([[7], [0]])) & (places < torch.tensor([[101], [60]])),
    "everywhere": places >= torch.tensor([[T], [5]]),
    "nowhere": places >= torch.tensor([[0], [0]]),
}
DOCUMENTS = torch.stack([places // 45, places // 64])


def _compare(name, mask, choose=fast):
    """Asks that outputs and gradients are those of the definition, whatever is written where nobody may see."""
    found = []
    for use in (plain, choose):
        g = torch.Generator().manual_seed(0)
        shapes = ((2, 4, T, 8), (2, 2, T, 8), (2, 2, T, 6))
        inputs = [torch.randn(shape, generator=g) for shape in shapes]
        if mask.visible is not None:
            hidden = ~mask.visible[:, None, :, None]
            inputs[1].masked_fill_(hidden, torch.nan)
            inputs[2].masked_fill_(hidden, torch.inf)
        for x in inputs:
            x.requires_grad_()
        out = use(mechanism(name))(*inputs, mask)
        found.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    scale = max(x.abs().max() for x in found[0])
    for want, got in zip(*found, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5 * scale


@pytest.fixture
def calls(monkeypatch):
    """Takes small inputs by stretches too; a list of the pairs of each fused call, and of the masks it was given."""
    listed = []
    usual = functional.scaled_dot_product_attention

    def watch(q, k, v, attn_mask=None, **options):
        listed.append((q.shape[0] * q.shape[2] * k.shape[2], attn_mask))
        return usual(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(stretches, "LEAST_PAIRS", 1)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watch)
    return listed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [None, DOCUMENTS, DOCUMENTS[:1].expand(2, T)], ids=["no", "unlike", "alike"])
@pytest.mark.parametrize("padding", [None, *VISIBLE])
def test_stretches_are_the_definition(calls, padding, documents, causal):
    mask = Mask(causal=causal, visible=VISIBLE.get(padding), documents=documents)
    _compare("softmax", mask)
    assert all(dense is None for _, dense in calls)


@pytest.mark.parametrize("window", [1, 2, 30, 65, 149])
@pytest.mark.parametrize("padding", ["on the left", "on the right", "on both sides", "everywhere"])
@pytest.mark.parametrize("name", ["softmax", "elu"])
def test_a_window_ends_with_its_stretch(calls, name, padding, window):
    for documents in (None, DOCUMENTS):
        _compare(name, Mask(causal=True, window=window, visible=VISIBLE[padding], documents=documents))


def test_padding_behind_all_tokens_keeps_a_linear_window_within_blocks(monkeypatch):
    monkeypatch.setattr(stretches, "LEAST_PAIRS", 1)
    mask = Mask(causal=True, window=30, visible=VISIBLE["on the right"])
    _compare("elu", mask, lambda m: fast(m, "blocks"))


def test_pairs_that_do_not_see_each_other_are_not_computed(calls):
    x = torch.zeros(2, 4, T, 8)
    mechanism("softmax")(x, x, x, Mask(causal=True, documents=DOCUMENTS, visible=VISIBLE["nowhere"]))
    assert sum(pairs for pairs, _ in calls) == 3 * 45**2 + 15**2 + 2 * 64**2 + 22**2
    calls.clear()
    mechanism("softmax")(x, x, x, Mask(visible=VISIBLE["on the left"]))
    assert sum(pairs for pairs, _ in calls) == T * (T - 40) + T * T
    calls.clear()
    mechanism("softmax")(x, x, x, Mask(causal=True, visible=VISIBLE["nowhere"]))  # rows are alike: one call for all
    assert calls == [(2 * T * T, None)]


def test_gaps_and_many_small_documents_keep_one_mask(calls, monkeypatch):
    x = torch.zeros(2, 4, T, 8)
    gap = VISIBLE["nowhere"].clone()
    gap[1, 50:60] = False
    _compare("softmax", Mask(causal=True, visible=gap))
    mechanism("softmax")(x, x, x, Mask(causal=True, visible=gap))
    assert len(calls) == 2 and all(dense is not None for _, dense in calls)
    calls.clear()
    monkeypatch.setattr(stretches, "LEAST_PAIRS", 2 * 4 * T * T // 59)  # of 60 documents one too many
    unlike = torch.stack([places // 5, (places + 1) // 5])
    mechanism("softmax")(x, x, x, Mask(causal=True, documents=unlike))
    assert len(calls) == 1
    monkeypatch.setattr(stretches, "LEAST_PAIRS", 2 * 4 * T * T // 61)
    mechanism("softmax")(x, x, x, Mask(causal=True, documents=unlike))
    assert len(calls) == 1 + 61
