"""Positions that add to the scores, and positions that leave a model as usable as they found it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.models import GPT, Encoder
from regard.nn import POSITIONS, Positions
from regard.nn.positions import alibi_slopes
from regard.shapes import Mask


def nano(position: str, **changes: object) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocabulary": 31, "width": 24, "layers": 2, "length": 64, "attention": {"heads": 3}}
    return GPT(GPT.Config().but(position=position, **sizes, **changes)).eval()


@pytest.mark.parametrize("H", [1, 2, 3, 6, 8, 12, 16, 20])
def test_slopes_are_those_of_the_paper(H: int) -> None:
    slopes = alibi_slopes(H)
    assert len(slopes) == H and bool((slopes > 0).all()) and bool((slopes < 1).all())
    if H & (H - 1) == 0:
        assert torch.allclose(slopes, torch.tensor([2 ** (-8 * n / H) for n in range(1, H + 1)]).double())


def test_slopes_are_those_of_transformers() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for H in (4, 6, 12, 16):
        theirs = build_alibi_tensor(torch.ones(1, 5), H, torch.float32)[:, 0, 1]
        assert torch.allclose(alibi_slopes(H).float(), theirs, rtol=1e-6)


def test_alibi_lowers_the_score_by_distance() -> None:
    model = nano("alibi").double()
    attention = model.stack.layers[0].attention
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    visible = torch.rand(2, 9) > 0.3
    slopes = alibi_slopes(3).float()
    biased = regard.nn.Attention(24, 3, causal=True, rules=Mask(slopes=slopes), length=64).double().eval()
    biased.load_state_dict(attention.state_dict())
    assert torch.allclose(attention(x, visible), biased(x, visible), atol=1e-12)
    assert not torch.allclose(attention(x, visible), nano("none").double().stack.layers[0].attention(x, visible))


@pytest.mark.parametrize("position", ["alibi", "rotary", "sinusoidal", "learned", "none"])
def test_a_position_keeps_the_laws_of_whole_models(position: str) -> None:
    assert regard.check(nano(position), draws=8).ok


def test_alibi_is_saved_by_its_name_and_learns_nothing(tmp_path: Path) -> None:
    model = nano("alibi")
    assert not [name for name in model.state_dict() if "slopes" in name or "positions" in name]
    model.save(tmp_path)
    ids = torch.randint(0, 31, (1, 40))
    assert torch.equal(regard.load(tmp_path)(ids), model(ids))
    other = copy.deepcopy(model)
    other.stack.positions.slopes.zero_()
    assert not torch.equal(other(ids), model(ids)), "a copy has positions of its own"


def test_alibi_sees_both_ways_in_an_encoder_and_refuses_mechanisms_without_scores() -> None:
    config = Encoder.Config().but(
        position="alibi", vocabulary=31, width=24, layers=1, length=64, attention={"heads": 3}, head="none"
    )
    model = Encoder(config).eval()
    assert model(torch.randint(0, 31, (1, 90))).shape == (1, 90, 24), "it has no length"
    with pytest.raises(regard.RegardError, match="ALiBi's slopes"):
        nano("alibi", mechanism="elu")(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "alibi", "learned"])
def test_an_exported_model_leaves_nothing_of_the_export_behind(position: str) -> None:
    model = nano(position)
    ids = torch.randint(0, 31, (2, 16))
    exported = torch.export.export(model, (ids,))
    out = model(ids)
    assert type(out) is Tensor
    assert torch.allclose(exported.module()(ids), out, atol=1e-5)
    assert torch.allclose(torch.export.export(model, (ids,)).module()(ids), out, atol=1e-5), "with tables kept"


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "alibi"])
def test_a_model_travels_to_another_process(position: str, tmp_path: Path) -> None:
    model = nano(position)
    ids = torch.arange(8)[None]
    (tmp_path / "model.bin").write_bytes(pickle.dumps((model, ids, model(ids))))
    code = (
        "import pickle, sys, torch\n"
        "model, ids, out = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.equal(model(ids), out)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.bin")], check=True)


@pytest.fixture
def bucketed():
    """A position of one's own that adds a learned bias to the scores, as T5's do."""

    @POSITIONS.add("bucketed")
    class Bucketed(Positions):
        def __init__(self, H: int, buckets: int = 8) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(H, 2 * buckets + 1))
            self.buckets = buckets

        def bias(self, rules: Mask) -> Mask:
            return rules.but(relative=self.look_up)

        def look_up(self, distance: Tensor) -> Tensor:
            nearest = distance.clamp(-self.buckets, self.buckets) + self.buckets
            return self.table[:, nearest].transpose(0, 1)

    yield Bucketed
    del POSITIONS["bucketed"]


def test_a_position_of_ones_own_that_adds_a_bias(bucketed, tmp_path: Path) -> None:
    model = nano("bucketed", position_options={"buckets": 4})
    assert regard.check(model, draws=8).ok

    ids = torch.randint(0, 31, (2, 20))
    out = model(ids)
    table = model.stack.positions.table
    distance = (torch.arange(20)[:, None] - torch.arange(20)).clamp(-4, 4) + 4
    attention = model.stack.layers[0].attention
    x = torch.randn(2, 20, 24)
    q, k, _ = attention._project_tokens(x, None)
    seen = attention.mechanism.weights(q, k, attention.rules.but(causal=True))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + table[:, distance]
    scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.allclose(seen, scores.softmax(-1), atol=1e-6)

    model.train()
    model(ids).square().mean().backward()
    assert float(table.grad.abs().sum()) > 0, "it learns"
    model.eval()
    model.save(tmp_path)
    assert torch.equal(regard.load(tmp_path)(ids), out)
    generated = regard.generate(model, torch.zeros(3, dtype=torch.long), max_tokens=5)
    assert generated is not None
    trace = regard.record(model, ids[0].tolist())
    first = trace.weights(0, 1)
    x = model.stack.positions.table  # the trace holds what the model attends to, its bias included
    assert first.shape == (20, 20) and x.shape == (3, 9)
    maps = regard.lens.attention_maps(model, ids[:1])
    assert torch.allclose(torch.as_tensor(first), maps[0][0, 1], atol=1e-3)
