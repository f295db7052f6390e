"""Errors often seen (docs/errors.md): the proofs that no other test holds, and that every entry has one."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import regard
from regard import Mask, Size
from regard.data.batch import IGNORE, Batch
from regard.nn import Attention, shift_matrix, sinusoids
from regard.train.tasks.lm import LanguageModel, LMData

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
ENTRIES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def named(text):
    return re.findall(r"`(tests/[a-z_/]+\.py)::(\w+)`", text)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_names_tests_that_exist(entry):
    proofs = named(ENTRIES[entry])
    assert proofs, "an entry without a proof"
    for file, name in proofs:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_every_row_of_the_last_table_names_one():
    rows = [line for line in ENTRIES["And in code"].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 5 and all(len(named(row)) == 1 for row in rows)


def test_every_entry_says_what_is_said_why_it_is_wrong_and_what_is_right():
    for entry, text in ENTRIES.items():
        if entry != "And in code":
            assert all(part in text for part in ("**Often:**", "**Wrong, because**", "**Right:**", "*Proved by*")), (
                entry
            )


def test_values_twice_as_wide_change_the_value_projection_the_merge_and_the_output():
    D, H, G, K = 12, 4, 2, 3
    torch.manual_seed(0)
    layer = Attention(D, H, G=G, K=K, V=2 * K, causal=True).double()
    assert layer.project.weight.shape == (H * K + G * K + G * 2 * K, D)
    assert layer.out.weight.shape == (D, H * 2 * K)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    parts = functional.linear(x, layer.project.weight, layer.project.bias).split([H * K, G * K, G * 2 * K], -1)
    q, k, v = (y.unflatten(-1, (n, -1)).transpose(1, 2) for y, n in zip(parts, (H, G, G), strict=True))
    scores = q @ k.repeat_interleave(2, 1).mT
    hidden = torch.ones(5, 5).triu(1).bool()

    def out(scale):
        heads = (scores * scale).masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
        return functional.linear(heads.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias)

    assert (layer(x) - out(K**-0.5)).abs().max() < 1e-12
    assert (layer(x) - out((2 * K) ** -0.5)).abs().max() > 1e-4, "the scale is that of the keys, not of the values"


def test_multi_query_keys_have_no_letter_for_heads():
    b, h, n, K = 2, 6, 11, 5
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(b, *s, K, generator=draw, dtype=torch.float64) for s in ((h, 1), (1, n), (1, n)))
    softmax = regard.mechanism("softmax")
    state = softmax.write(softmax.empty(Size(B=b, S=n, H=h, G=1, K=K, V=K, dtype=torch.float64)), k, v)
    assert state.k.shape[1] == 1, "the cache holds one head"
    right = torch.einsum("bhk,bnk->bhn", q[:, :, 0], state.k[:, 0, :n])
    # The letters with heads on the keys need a cache h times as large, for the same scores.
    repeated = state.k[:, :, :n].expand(b, h, n, K).contiguous()
    assert torch.allclose(torch.einsum("bhk,bhnk->bhn", q[:, :, 0], repeated), right)
    assert repeated.nbytes == h * state.k[:, :, :n].nbytes
    by_hand = torch.einsum("bhn,bnv->bhv", (right / math.sqrt(K)).softmax(-1), v[:, 0])
    assert torch.allclose(softmax.read(q, state)[:, :, 0], by_hand)


@pytest.mark.parametrize("d", [2, 8, 16])
def test_a_shift_matrix_exists_only_where_sine_and_cosine_share_their_frequency(d):
    t = torch.arange(400, dtype=torch.float64)[:, None]
    i = torch.arange(d, dtype=torch.float64)

    def table(exponent):
        angles = t * 10000**-exponent
        return torch.where(i % 2 == 0, angles.sin(), angles.cos())

    def residual(p):
        """What the best matrix leaves of p_{t+1} − M p_t, relative to p."""
        best = torch.linalg.lstsq(p[:-1], p[1:], driver="gelsd").solution
        return ((p[:-1] @ best - p[1:]).norm() / p[1:].norm()).item()

    right, wrong = table(2 * (i // 2) / d), table(i / d)
    assert torch.allclose(right, sinusoids(400, d))
    assert residual(right) < 1e-9 and torch.allclose(right[:-1] @ shift_matrix(d).mT, right[1:])
    assert residual(wrong) > 1e-2


def test_perplexity_is_the_exponential_of_the_mean_over_all_tokens(tmp_path):
    # By hand: tokens of probability 1/2 and 1/8 have the perplexity 4, and not the mean 5 of their exponentials.
    losses = -torch.tensor([1 / 2, 1 / 8]).log()
    assert losses.mean().exp() == pytest.approx(4) and losses.exp().mean() == pytest.approx(5)
    # Batches of unequal size: neither the mean of their perplexities nor the exponential of the mean of their means.
    batches = losses[:1], losses[1:].repeat(3)
    truth = torch.cat(batches).mean().exp()
    assert abs(torch.stack([b.mean().exp() for b in batches]).mean() - truth) > 0.5
    assert abs(torch.stack([b.mean() for b in batches]).mean().exp() - truth) > 0.5
    # regard's own: two parts with one and with sixteen targets.
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question; " * 20)
    task = LanguageModel(LMData(text=str(tmp_path / "text.txt"), block=16), 0, torch.device("cpu"), tmp_path, None)
    torch.manual_seed(0)
    model = regard.GPT.preset("nano", vocabulary=task.tokenizer.size, length=16).eval()
    one, many = task.batch(0, 1), task.batch(1, 1)
    x, y = one.x, one.y.clone()
    y[:, 1:] = IGNORE
    with torch.no_grad():
        each = [
            functional.cross_entropy(model(x)[0, :1], y[0, :1]),
            functional.cross_entropy(model(many.x)[0], many.y[0]),
        ]
        found = task.mean_loss(model, [Batch(x, y), many])
    assert found == pytest.approx((each[0] + 16 * each[1]).item() / 17, rel=1e-5)
    assert found != pytest.approx(sum(each).item() / 2, rel=1e-5)


def test_minus_infinity_throughout_a_row_is_nan_in_plain_softmax_and_zero_here():
    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden = torch.tensor([True, False, False])[:, None].expand(3, 3)
    naive = (q @ q.mT).masked_fill(hidden, -math.inf).softmax(-1) @ q
    assert naive[..., 0, :].isnan().all() and naive[..., 1:, :].isfinite().all()
    (gradient,) = torch.autograd.grad(naive[..., 1:, :].sum(), q)
    assert gradient.isnan().any(), "one hidden row spoils gradients although nobody uses its output"
    bias = torch.zeros(3, 3).masked_fill(hidden, -math.inf)
    out = regard.mechanism("softmax")(q, q, q, Mask(bias=bias))
    assert (out[..., 0, :] == 0).all() and out.isfinite().all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()
