"""Attention within a window, block by block, against its definition over all pairs."""

import pytest
import torch
from torch.nn import functional

from regard.kernels import fast, plain
from regard.mechanisms import mechanism
from regard.shapes import Mask

NAMES = [("elu", {}), ("linear", {}), ("quadratic", {}), ("performer", {"features": 32, "width": 8})]
NAMES += [("fourier", {"features": 32, "width": 8})]


SOFTMAX = ("softmax", {})


def _rules(name, T):
    """Rules beside a causal window: packed documents, and padding before all other tokens, one row of nothing else."""
    documents = torch.arange(T).div(70, rounding_mode="floor").expand(2, T)
    visible = torch.arange(T) >= torch.tensor([[T // 3], [0]])
    hidden = torch.arange(T) >= torch.tensor([[T], [65]])
    return {
        "documents": {"documents": documents},
        "padding": {"visible": visible},
        "nothing but padding": {"visible": hidden},
        "both": {"documents": documents, "visible": visible},
    }[name]


def _inputs(T):
    g = torch.Generator().manual_seed(T)
    shapes = ((2, 4, T, 8), (2, 2, T, 8), (2, 2, T, 6))
    return [torch.randn(shape, generator=g).div(2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("name", "options"), NAMES, ids=lambda x: str(x))
@pytest.mark.parametrize(("T", "window"), [(129, 1), (200, 64), (331, 65), (331, 100)])
def test_blocks_are_the_definition(name, options, T, window):
    m = mechanism(name, **options)
    mask = Mask(causal=True, window=window)
    found = []
    for choose in (plain, lambda m: fast(m, "blocks")):
        inputs = _inputs(T)
        out = choose(m)(*inputs, mask)
        found.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    scale = max(x.abs().max() for x in found[0])  # within a window of 1, the gradients of q and k are zero
    for want, got in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-4 * scale
    assert fast(m).select_kernel("forward", *inputs, mask) is not None


@pytest.mark.parametrize(("name", "options"), [SOFTMAX, *NAMES[:1], NAMES[3]], ids=lambda x: str(x))
@pytest.mark.parametrize("rules", ["documents", "padding", "nothing but padding", "both"])
def test_blocks_know_documents_and_padding(name, options, rules):
    T = 331
    m = mechanism(name, **options)
    mask = Mask(causal=True, window=65, **_rules(rules, T))
    found = []
    for choose in (plain, lambda m: fast(m, "sdpa" if name == "softmax" else "blocks")):
        inputs = _inputs(T)
        with torch.no_grad():  # what is hidden may be anything
            if mask.visible is not None:
                hidden = ~mask.visible[:, None, :, None]
                inputs[1].masked_fill_(hidden, torch.nan)
                inputs[2].masked_fill_(hidden, torch.inf)
        out = choose(m)(*inputs, mask)
        found.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    scale = max(x.abs().max() for x in found[0])
    for want, got in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-4 * scale


def test_softmax_takes_a_window_by_blocks_with_documents_and_padding(monkeypatch):
    """No call sees more keys than a block and the one before it."""
    seen = []
    usual = functional.scaled_dot_product_attention

    def watch(q, k, v, **options):
        seen.append(k.shape[2])
        return usual(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watch)
    inputs = _inputs(331)
    for rules in ("documents", "padding", "both"):
        mechanism("softmax")(*inputs, Mask(causal=True, window=65, **_rules(rules, 331)))
    assert max(seen) == 130
    visible = torch.ones(2, 331, dtype=torch.bool)
    visible[0, 100:] = False  # the queries behind see the last 64 tokens that are visible, however far away
    mechanism("softmax")(*inputs, Mask(causal=True, window=65, visible=visible))
    assert max(seen) == 130
    visible[1, 100:250] = False  # and here those behind the gap
    visible[1, 50] = False
    mechanism("softmax")(*inputs, Mask(causal=True, window=65, visible=visible))
    assert max(seen) == 331


def test_what_is_not_a_number_stays_within_the_window():
    q, k, v = (x.detach() for x in _inputs(300))
    k[0, 0, 100] = torch.nan
    v[1, 1, 20] = torch.inf
    out = fast(mechanism("elu"), "blocks")(q, k, v, Mask(causal=True, window=64))
    broken = out.isnan().any(-1)
    assert broken[0, :2, 100:164].all() and broken[1, 2:, 20:84].all()
    assert int(broken.sum()) == 4 * 64


def test_other_rules_go_by_all_pairs():
    inputs = _inputs(300)
    visible = torch.ones(2, 300, dtype=torch.bool)
    visible[0, 250:260] = False  # a gap
    for mask in (Mask(window=64), Mask(causal=True, window=64, visible=visible), Mask(causal=True, window=299)):
        assert fast(mechanism("elu")).select_kernel("forward", *inputs, mask) is None
