"""Argmax attention in Triton, by its interpreter: choices, ties, and the gradient of the values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.kernels.argmax import register
from regard.mechanisms import mechanism
from regard.shapes import Mask, Rows

PROGRAM = """
import interpreted
import torch
from regard.kernels.argmax.ops import argmax_attention
from regard.kernels import plain
from regard.mechanisms import mechanism
from regard.shapes import Mask

torch.manual_seed(0)
m = plain(mechanism("argmax"))
CASES = [
    (2, 4, 2, 150, 150, 8, 5, {"causal": True}),
    (1, 2, 1, 70, 200, 8, 16, {"causal": True}),
    (1, 2, 2, 130, 67, 8, 8, {}),
    (2, 2, 1, 200, 200, 8, 8, {"causal": True, "visible": None}),
    (2, 2, 1, 33, 140, 8, 8, {"visible": None}),
    (1, 2, 2, 300, 300, 8, 8, {"causal": True, "window": 70}),
    (1, 1, 1, 300, 300, 8, 8, {"window": 9}),
    (1, 1, 1, 64, 300, 8, 8, {"causal": True, "window": 65}),
]
for B, H, G, T, S, K, V, rules in CASES:
    # Small integers: products are exact, and there are many ties.
    q, k = (torch.randint(-3, 4, (B, n, N, K)).bfloat16() for n, N in ((H, T), (G, S)))
    v = torch.randn(B, G, S, V).bfloat16().requires_grad_()
    if "visible" in rules:
        rules["visible"] = torch.rand(B, S) > 0.3
        rules["visible"][0, :75] = False
        k[~rules["visible"][:, None].expand(B, G, S)] = torch.nan
    mask = Mask(**rules)
    got, chosen = argmax_attention(q, k, v, mask.visible, mask.causal, mask.window)
    want = m(q, k, v, mask)
    assert torch.equal(got, want), (rules, (got != want).sum())
    grad = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, v, grad), torch.autograd.grad(want.float(), v, grad.float()), strict=True):
        assert (a - b).abs().max() <= 2**-7 * b.abs().max(), rules
k = torch.randn(1, 1, 200, 8).bfloat16()
k[0, 0, 120] = torch.nan
out, _ = argmax_attention(k.nan_to_num(), k, k.nan_to_num(), None, True, None)
assert out[0, 0, 120:].isnan().all() and not out[0, 0, :120].isnan().any()
print("same")
"""


def test_the_programs_choose_what_the_reference_chooses():
    pytest.importorskip("triton")
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": helpers}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.stdout == "same\n", done.stderr


def test_a_step_of_decoding_does_not_read_all_keys_in_one_program(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    m = mechanism("argmax")
    q, k = torch.randn(1, 2, 1, 16).bfloat16(), torch.randn(1, 2, 500, 16).bfloat16()
    assert "few queries" in (register._when(m, q, k, k, Mask(causal=True)) or "")
    assert register._when(m, k, k, k, Mask(causal=True)) is None
    m.use = "triton"
    assert register._when(m, q, k, k, Mask(causal=True)) is None


def test_it_refuses_what_it_would_leave_out():
    q = torch.randn(1, 2, 32, 16)
    limit = torch.arange(1, 33)[None]
    visible = torch.ones(1, 32, dtype=torch.bool)
    m = mechanism("argmax")
    for mask in (
        Mask(bias=torch.zeros(1, 1, 32, 32)),
        Mask(softcap=3.0),
        Mask(slopes=torch.ones(2)),
        Mask(causal=True, documents=torch.zeros(1, 32, dtype=torch.long)),
        Mask(causal=True, rows=Rows(limit - 1, limit)),
        Mask(causal=True, window=3, visible=visible),
    ):
        assert register.unsupported_rules(m, q, q, q, mask) is not None
    assert register.unsupported_rules(m, q, q, q, Mask(causal=True, visible=visible)) is None
    m.dropout = 0.1
    assert register.unsupported_rules(m, q, q, q, Mask()) is not None
    assert register.unsupported_rules(m.eval(), q, q, q, Mask()) is None
