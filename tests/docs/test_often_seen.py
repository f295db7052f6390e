"""Errors often seen (docs/errors.md): the proofs that no other test holds, and that every entry has one."""

from __future__ import annotations

import ast
import json
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


def test_a_query_read_as_width_by_heads_fails_or_silently_sums_over_heads():
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 6, generator=draw), torch.randn(2, 5, 6, generator=draw)  # [b,h,k] and [b,n,k]
    with pytest.raises(RuntimeError):
        torch.einsum("bkh,bnk->bhn", q, k)
    q, k = torch.randn(2, 6, 6, generator=draw), torch.randn(2, 5, 6, generator=draw)  # as many heads as numbers in one
    misread = torch.einsum("bkh,bnk->bhn", q, k)
    assert torch.allclose(misread, torch.einsum("bhk,bnk->bhn", q.mT, k))
    assert (misread - torch.einsum("bhk,bnk->bhn", q, k)).abs().max() > 1


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


@pytest.mark.parametrize("length", [4.0, 10.0])
def test_a_token_that_is_a_sum_finds_itself_and_not_what_it_shares_a_part_with(length):
    a, b, c, d = length * torch.linalg.qr(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))[0].T

    def second(*tokens):
        """What the second token reads where tokens are their own queries, keys and values."""
        x = torch.stack(tokens)[None, None]
        return regard.mechanism("softmax", scale=1.0)(x, x, x)[0, 0, 1]

    assert torch.allclose(second(d + b, a, c + b), a, atol=1e-3)
    assert torch.allclose(second(d + b, a + d, c + b), a + d, atol=1e-3)
    assert (second(d + b, a + d, c + b) - b).norm() > length
    # However much of d there is in it, what is read is never b.
    for share in (0.5, 2.0, 5.0):
        read = second(d + b, a + share * d, c + b)
        assert (read - b).norm() > 0.9 * length


def test_performer_is_a_third_worse_than_softmax_on_summaries():
    measured = json.loads((ROOT / "benchmarks" / "results" / "summarize-h200-2026-11-15.json").read_text())
    loss = {run["name"]: run["best"]["dev/loss"] for run in measured["runs"]}
    assert loss["performer"] / loss["softmax"] == pytest.approx(1.34, abs=0.005)
    text = ENTRIES["Performer on summaries"]
    assert f"{loss['performer']:.2f} against {loss['softmax']:.2f}" in text and "34%" in text
    rows = re.sub("<!--.*?-->", "", (ROOT / "docs" / "summarize.md").read_text())
    copied = [re.search(rf"^\| {name}, 4 heads .*\| (\d+%) \|$", rows, re.M)[1] for name in ("performer", "softmax")]
    assert all(share in text for share in copied)


def test_batch_norm_in_evaluation_mode_uses_its_running_statistics():
    draw = torch.Generator().manual_seed(0)
    norm = torch.nn.BatchNorm1d(3, eps=1e-12, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
        norm.bias.fill_(0.5)
    x = 5 + 3 * torch.randn(64, 3, generator=draw, dtype=torch.float64)
    for _ in range(200):  # until the running statistics have forgotten where they began
        norm(x)
    norm.eval()
    assert torch.allclose(norm.running_mean, x.mean(0)) and torch.allclose(norm.running_var, x.var(0))
    out = norm(x)
    assert torch.allclose(out, (x - x.mean(0)) / x.var(0).sqrt() * norm.weight + norm.bias)
    assert (out - x).abs().max() > 1, "it is not switched off"
    assert torch.allclose(norm(x[:1]), out[:1]), "and the batch no longer matters"
    assert torch.equal(torch.nn.Dropout(0.5).eval()(x), x), "dropout is"


def test_a_gpt_has_no_weight_above_the_diagonal_and_a_bert_has():
    gpt = regard.load(regard.lens.shipped())
    for weights in regard.lens.attention_maps(
        gpt, torch.tensor([gpt.tokenizer.encode("Nora was born. Nora was born.")])
    ):
        assert (weights.triu(1) == 0).all()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=50, initializer_range=0.5, attn_implementation="eager")
    with torch.no_grad():
        model = transformers.BertModel(config).eval()
        maps = model(torch.arange(12)[None], output_attentions=True).attentions
    for weights in maps:
        assert (weights.triu(1).amax((2, 3)) > 0.05).all()
        assert ((weights - weights.mT).abs().amax((2, 3)) > 0.05).all(), "no head is symmetric"


def test_symmetric_scores_do_not_make_symmetric_weights():
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(x @ x.mT, (x @ x.mT).mT)
    weights = regard.mechanism("softmax").weights(x, x)
    assert (weights - weights.mT).abs().max() > 0.05
