"""Muon: orthogonalised steps of matrices, AdamW's of everything else."""

import pytest
import torch
from torch import nn
from training import gpt

import regard
from regard.config import ConfigError
from regard.train.muon import Muon, orthogonalize
from regard.train.optimizer import build_optimizer
from regard.train.settings import OptimizerConfig


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 24, 64), (2, 64, 24), (2, 3, 16, 40)])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_singular_values_become_about_one_and_vectors_stay(shape, scale):
    """Of each matrix UΣVᵀ comes U·S·Vᵀ with S near one, wherever Σ is above a hundredth of the norm."""
    u, values, v = torch.linalg.svd(draw(*shape).double(), full_matrices=False)
    values = torch.logspace(0, -1.5, values.shape[-1], dtype=torch.float64)
    made = u.mT @ orthogonalize(scale * (u * values) @ v, 5) @ v.mT
    found = made.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(made, torch.diag_embed(found), atol=1e-6, rtol=0)
    above = values > values.norm() / 100
    assert above.sum() > 10 and found[..., above].min() > 0.65 and found[..., above].max() < 1.25


def test_a_gradient_of_zero_moves_nothing_but_by_its_decay():
    weight = nn.Parameter(draw(4, 6))
    weight.grad = torch.zeros(4, 6)
    before = weight.detach().clone()
    Muon([weight], lr=0.1, weight_decay=0.5, matrices=True).step()
    torch.testing.assert_close(weight.detach(), before * 0.95)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon of its own")
@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_a_matrix_goes_where_torchs_own_takes_it(shape):
    """Torch's orthogonalises in bfloat16, and its momentum is the same; steps are scaled to the size of AdamW's."""
    ours, theirs = nn.Parameter(draw(*shape)), nn.Parameter(draw(*shape))
    one = Muon([ours], lr=0.01, weight_decay=0.2, matrices=True)
    other = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for seed in range(1, 6):
        ours.grad, theirs.grad = draw(*shape, seed=seed), draw(*shape, seed=seed)
        one.step()
        other.step()
    moved, expected = ours.detach() - draw(*shape), theirs.detach() - draw(*shape)
    assert (moved - expected).norm() < 0.02 * expected.norm()


def test_what_is_no_matrix_goes_where_adamw_takes_it():
    """The same bits, beside matrices of two shapes."""
    names = {"matrices": [(8, 4), (8, 4), (4, 8)], "others": [(5,), (7, 3)]}
    ours = {kind: [nn.Parameter(draw(*shape)) for shape in shapes] for kind, shapes in names.items()}
    theirs = [nn.Parameter(draw(*shape)) for shape in names["others"]]
    groups = [{"params": ours[kind], "matrices": kind == "matrices"} for kind in names]
    one, other = Muon(groups, lr=0.01, weight_decay=0.2), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.2)
    for seed in range(4):
        for kind in names:
            for p in ours[kind]:
                p.grad = draw(*p.shape, seed=seed)
        for p in theirs:
            p.grad = draw(*p.shape, seed=seed)
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours["others"], theirs, strict=True))
    assert torch.equal(ours["matrices"][0], ours["matrices"][1])
    assert set(one.state[ours["matrices"][0]]) == {"momentum_buffer"}


CONVOLVED = {"mechanism": "gated", "attention": {"heads": 2, "convolution": {"width": 3}}}


@pytest.mark.parametrize(
    "changes, own",
    [
        ({}, set()),
        ({"tied": False}, set()),
        ({"mechanism": "synthesizer"}, {"attention.mechanism.keys"}),
        (CONVOLVED, {"attention.gates.project.weight"}),
    ],
)
def test_matrices_within_a_model_are_orthogonalised_and_no_others(changes, own):
    """Neither an embedding, nor the head, nor the filters of a convolution."""
    model = regard.GPT(vocabulary=10, length=6, width=8, layers=1, **({"attention": {"heads": 2}} | changes))
    optimizer = build_optimizer(OptimizerConfig(name="muon", decay=0.3), model, 0.01)
    found = {id(p) for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
    named = {name.removeprefix("stack.blocks.0.") for name, p in model.named_parameters() if id(p) in found}
    usual = {"attention.project.weight", "attention.out.weight", "mlp.into.weight", "mlp.out.weight"}
    assert named == usual | own
    assert {g["weight_decay"] for g in optimizer.param_groups if g["matrices"]} == {0.3}


def test_a_scaled_gradient_that_overflows_moves_nothing():
    """AdamW's fused kernel passes over such a step by itself, and would not tell of it."""
    model = gpt()
    optimizer = build_optimizer(OptimizerConfig(name="muon"), model, 0.01)
    scaler = torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randint(0, 10, (4, 7), generator=torch.Generator().manual_seed(0))
    scaler.scale(model.loss(x[:, :-1], x[:, 1:])).backward()
    model.embedding.weight.grad[0, 0] = torch.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"momentum": 1.0}, "momentum = 1.0: expected 0 or more and less than 1"),
        ({"iterations": 0}, "iterations = 0: expected 1 or more"),
        ({"matrices": True}, "muon has no 'matrices'"),
        ({"momentun": 0.5}, "Did you mean 'momentum'"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(OptimizerConfig(name="muon", options=options), gpt(), 0.01)
