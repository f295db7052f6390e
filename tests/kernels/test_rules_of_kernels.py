"""No kernel takes a call whose rules it does not know: it would leave them out without a word."""

import pytest
import torch

from regard.kernels.linear import register
from regard.mechanisms import mechanism
from regard.shapes import Mask, Rows

B, H, T, K = 1, 2, 32, 16
LIMIT = torch.arange(1, T + 1)[None].clamp(min=5)  # a prefix of five tokens that all may see
RULES = {
    "window": Mask(causal=True, window=3),
    "window both ways": Mask(window=3),
    "documents": Mask(causal=True, documents=torch.zeros(B, T, dtype=torch.long)),
    "prefix": Mask(causal=True, rows=Rows(LIMIT - 1, LIMIT)),
    "fewer queries": Mask(causal=True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["elu", "quadratic", "performer", "fourier"])
def test_linear_kernels_refuse_what_a_running_sum_cannot_do(name, rule, monkeypatch):
    monkeypatch.setattr(register, "_runs_triton", lambda x: True)
    monkeypatch.setattr(register, "_smem_bytes_per_block", lambda device: 1 << 20)
    m = mechanism(name)
    x = torch.randn(B, H, T, K, dtype=torch.bfloat16)
    q = x[:, :, -4:] if rule == "fewer queries" else x
    kernels = [kernel for kernel in m.kernels.for_face("forward") if kernel.name == "triton"]
    assert kernels
    for kernel in kernels:
        assert kernel.refuses(m, x, x, x, Mask(causal=True)) is None
        assert kernel.refuses(m, q, x, x, RULES[rule]) is not None


@pytest.mark.parametrize("name", ["softmax", "argmax", "elu", "quadratic", "performer", "fourier"])
def test_queries_at_places_of_their_own_are_the_weights(name):
    m = mechanism(name).double()
    g = torch.Generator().manual_seed(0)  # of other keys, argmax may choose the first for the first query of both heads
    q, k, v = (torch.randn(B, H, T, K, dtype=torch.float64, generator=g) for _ in range(3))
    mask = RULES["prefix"]
    torch.testing.assert_close(m(q, k, v, mask), m.weights(q, k, mask) @ v)
    assert m.weights(q, k, mask)[..., 0, 1:5].any()  # the first query sees what comes after it
