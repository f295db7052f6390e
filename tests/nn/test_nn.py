"""The layers around a mechanism: what they compute, from their formulas."""

import math

import pytest
import torch
from torch.nn import functional

from regard.errors import OptionError, ShapeError, UnknownNameError
from regard.kernels import plain
from regard.mechanisms import mechanism, mechanisms
from regard.nn import (
    MERGES,
    MLPS,
    NORMS,
    POSITIONS,
    Attention,
    Block,
    BlockState,
    LooksAheadError,
    Rotary,
    attend_to_offset,
    rotate,
    shift_matrix,
    sinusoids,
)
from regard.nn.positions import Learned, Sinusoidal

NAMES = sorted(set(mechanisms()) - {"linear"})
CROSSING = [n for n in NAMES if mechanisms()[n].crosses]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert a.shape == b.shape
    a, b = a.detach(), b.detach()
    assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def layer(**options: object) -> Attention:
    torch.manual_seed(0)
    return Attention(14, 6, K=5, V=3, **options).double().eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("G", [6, 3, 1])
def test_a_layer_from_a_state_is_the_layer_at_once(name: str, G: int) -> None:
    attention = layer(G=G, mechanism=name, length=16)
    x = torch.randn(2, 11, 14, dtype=torch.float64)
    visible = torch.rand(2, 11) > 0.3
    for seen in (None, visible):
        whole = attention(x, seen)
        state, parts = attention.empty(2, 3), []
        for at, n in ((0, 4), (4, 1), (5, 6)):
            out, state = attention.extend(x[:, at : at + n], state, None if seen is None else seen[:, at : at + n])
            parts.append(out)
        close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("name", CROSSING)
def test_cross_attention_written_once_is_cross_attention_at_once(name: str) -> None:
    attention = layer(G=2, mechanism=name, source=9)
    x, source = torch.randn(2, 5, 14, dtype=torch.float64), torch.randn(2, 7, 9, dtype=torch.float64)
    visible, source_visible = torch.rand(2, 5) > 0.3, torch.rand(2, 7) > 0.3
    whole = attention(x, visible, source=source, source_visible=source_visible)
    state = attention.write(attention.empty(2, 7), source, source_visible)
    steps = [attention.read(x[:, t : t + 1], state, visible[:, t : t + 1]) for t in range(5)]
    close(torch.cat(steps, 1), whole)
    assert attention.project.weight.shape == (6 * 5, 14)
    assert attention.project_source is not None and attention.project_source.weight.shape == (2 * 5 + 2 * 3, 9)


def test_a_layer_is_its_formula() -> None:
    attention = layer(G=2)
    x = torch.randn(1, 4, 14, dtype=torch.float64)
    q, k, v = attention.project(x).split([30, 10, 6], -1)
    heads = []
    for h in range(6):
        g = h // 3
        scores = q[0, :, 5 * h : 5 * h + 5] @ k[0, :, 5 * g : 5 * g + 5].T / math.sqrt(5)
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[0, :, 3 * g : 3 * g + 3])
    close(attention(x)[0], attention.out(torch.cat(heads, -1)))


@pytest.mark.parametrize(
    ("name", "width"), [("softmax", 30 + 15 + 9), ("synthesizer", 30 + 9), ("synthesizer-random", 9)]
)
def test_only_what_the_mechanism_needs_is_projected(name: str, width: int) -> None:
    assert layer(G=3, mechanism=name).project.weight.shape == (width, 14)


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_zero_and_inert(name: str) -> None:
    attention = layer(mechanism=name, length=16)
    x = torch.randn(2, 7, 14, dtype=torch.float64)
    visible = torch.ones(2, 7, dtype=torch.bool)
    visible[0, :2] = visible[1, 3] = False
    clean = attention(x, visible)
    clean.square().sum().backward()
    gradients = [p.grad.clone() for p in attention.parameters() if p.grad is not None]
    attention.zero_grad()
    dirty = attention(x.masked_fill(~visible[..., None], float("nan")), visible)
    dirty.square().sum().backward()
    assert bool((dirty[~visible] == 0).all())
    close(dirty, clean)
    for p, g in zip((p for p in attention.parameters() if p.grad is not None), gradients, strict=True):
        close(p.grad, g)  # type: ignore[arg-type]


def test_a_window_and_a_built_mechanism() -> None:
    from regard.shapes import Mask

    attention = layer(mechanism=mechanism("softmax", scale=0.3), rules=Mask(window=2))
    x = torch.randn(1, 6, 14, dtype=torch.float64)
    changed = x.clone()
    changed[:, 0] += 1
    same = (attention(x) - attention(changed)).abs().amax(-1)[0]
    assert bool((same[:2] > 1e-6).all()) and bool((same[2:] < 1e-12).all())
    state, parts = attention.empty(1, 2), []
    for t in range(6):
        out, state = attention.extend(x[:, t : t + 1], state)
        parts.append(out)
    close(torch.cat(parts, 1), attention(x))


def test_dropout_is_for_training() -> None:
    x = torch.randn(1, 5, 14, dtype=torch.float64)
    for options in ({"dropout": 0.5}, {"residual_dropout": 0.5}):
        attention = layer(**options)
        close(attention(x), attention(x), 0)
        attention.train()
        assert float((attention(x) - attention(x)).detach().abs().max()) > 1e-3


def test_bad_layers_say_why() -> None:
    with pytest.raises(OptionError, match="does not divide into 5 heads"):
        Attention(14, 5)
    with pytest.raises(OptionError, match="do not divide 6"):
        Attention(12, 6, G=4)
    with pytest.raises(OptionError, match="no cross-attention"):
        Attention(12, 6, source=8, mechanism="synthesizer")
    with pytest.raises(OptionError, match="already built"):
        Attention(12, 6, mechanism=mechanism("softmax"), scale=1.0)
    with pytest.raises(UnknownNameError, match="Did you mean 'reweight'"):
        Attention(12, 6, merge="rewieght")
    with pytest.raises(LooksAheadError, match="causal=True"):
        Attention(12, 6, causal=False).empty(1, 1)
    with pytest.raises(ShapeError, match="its own tokens"):
        Attention(12, 6)(torch.randn(1, 2, 12), source=torch.randn(1, 2, 12))
    with pytest.raises(ShapeError, match="another sequence"):
        Attention(12, 6, source=3)(torch.randn(1, 2, 12))


def test_sinusoids_are_their_formula() -> None:
    table = sinusoids(50, 10)
    for t, i in ((0, 0), (7, 3), (49, 4)):
        angle = t * 10000 ** (-2 * i / 10)
        assert table[t, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[t, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)
    close(sinusoids(50, 9), table[:, :9])


@pytest.mark.parametrize("d", [2, 6, 64])
def test_the_shift_matrix_moves_positions(d: int) -> None:
    p, M = sinusoids(40, d), shift_matrix(d)
    close(p[:-1] @ M.T, p[1:])
    close(p[:30] @ torch.linalg.matrix_power(M, 10).T, p[10:])
    close(shift_matrix(d, -3), torch.linalg.matrix_power(M.T, 3))


def test_an_odd_width_has_no_shift_matrix() -> None:
    with pytest.raises(OptionError, match="odd width 7"):
        shift_matrix(7)


@pytest.mark.parametrize("offset", [-3, 0, 2])
def test_attending_to_a_relative_position(offset: int) -> None:
    weights = attend_to_offset(24, 64, offset)[0, 0]
    rows = torch.arange(max(0, -offset), 24 - max(0, offset))
    assert bool((weights[rows].argmax(-1) == rows + offset).all())
    assert float(weights[rows, rows + offset].min()) > 0.5


def test_rotary_is_a_rotation_that_sees_only_differences() -> None:
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def at(x: torch.Tensor, t: int) -> torch.Tensor:
        return rotate(x, rotary.rotation(torch.tensor([[t]]), t + 1, torch.float64))

    close(at(q, 9).norm(), q.norm())
    close((at(q, 9) * at(k, 4)).sum(), (at(q, 105) * at(k, 100)).sum())
    # The pair (x_i, x_{i+4}) as a complex number, multiplied by e^{i t ω}.
    ω = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones(4, dtype=torch.float64), 7 * ω)
    close(at(q, 7), torch.cat([turned.real, turned.imag], -1))
    with pytest.raises(OptionError, match="must be even"):
        Rotary(5)


def test_tables_serve_training_after_inference() -> None:
    positions = Sinusoidal(6)
    with torch.inference_mode():
        positions.added(torch.arange(3)[None], 3, torch.float32)
    x = torch.randn(1, 3, 6, requires_grad=True)
    (x * positions.added(torch.arange(3)[None], 3, torch.float32)).sum().backward()
    assert positions.added(torch.tensor([[500]]), 501, torch.float64).shape == (1, 1, 6)
    assert Learned(6, 4).added(torch.tensor([[0, 4]]), 5, torch.float32).shape == (1, 2, 6)
    assert set(POSITIONS) == {"none", "learned", "sinusoidal", "rotary", "alibi"}


def test_shift_is_concatenate_with_permuted_rows_of_the_output_projection() -> None:
    shifted, straight = layer(merge="shift"), layer()
    blocks = shifted.out.weight.data.view(14, 6, 3)
    straight.out.weight.data = blocks.roll(-1, 1).reshape(14, 18)
    x = torch.randn(2, 5, 14, dtype=torch.float64)
    close(shifted(x), straight(x))


def test_shuffle_permutes_heads_in_training_only() -> None:
    merge, heads = MERGES["shuffle"](), torch.randn(2, 6, 4, 3)
    straight = MERGES["concatenate"]()(heads)
    orders = set()
    for _ in range(20):
        blocks = merge(heads).view(2, 4, 6, 3)
        order = tuple(next(h for h in range(6) if torch.equal(blocks[:, :, n], heads[:, h])) for n in range(6))
        assert sorted(order) == list(range(6))
        orders.add(order)
    assert len(orders) > 10
    close(merge.eval()(heads), straight, 0)


def test_reweight_is_its_formula() -> None:
    heads = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    norms = heads.norm(dim=-1)
    want = heads * (norms / norms.mean(1, keepdim=True))[..., None]
    close(MERGES["reweight"]()(heads), want.transpose(1, 2).flatten(2))
    nothing = torch.zeros(1, 2, 1, 3, requires_grad=True)
    out = MERGES["reweight"]()(nothing)
    out.sum().backward()
    assert bool((out == 0).all()) and nothing.grad is not None and bool(nothing.grad.isfinite().all())


def test_reweight_sequence_looks_ahead_and_grows() -> None:
    merge = MERGES["reweight-sequence"]()
    assert merge.looks_ahead and not any(m().looks_ahead for n, m in MERGES.items() if n != "reweight-sequence")
    heads = torch.randn(1, 6, 400, 3, dtype=torch.float64)
    want = heads * heads.norm(dim=(2, 3), keepdim=True)
    close(merge(heads), want.transpose(1, 2).flatten(2))
    growth = merge(heads)[:, 0].norm() / merge(heads[:, :, :100])[:, 0].norm()
    assert float(growth) == pytest.approx(2, rel=0.1)  # √(400/100)
    visible = torch.arange(400)[None] < 100
    close(merge(heads, visible)[:, :100], merge(heads[:, :, :100]))


def test_reweight_sequence_has_no_state_unless_asked() -> None:
    x = torch.randn(1, 5, 14, dtype=torch.float64)
    with pytest.raises(LooksAheadError, match="reweight-sequence"):
        layer(merge="reweight-sequence").empty(1, 4)
    off = layer(merge="reweight-sequence", merge_options={"at_inference": False})
    state, parts = off.empty(1, 4), []
    for t in range(5):
        out, state = off.extend(x[:, t : t + 1], state)
        parts.append(out)
    close(torch.cat(parts, 1), off(x))
    close(off(x), layer()(x))
    with pytest.raises(LooksAheadError):
        off.train().empty(1, 4)
    asked = layer(merge="reweight-sequence", merge_options={"by_piece": True})
    out, _ = asked.extend(x, asked.empty(1, 4))
    close(out, asked(x))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("crosses", [True, False])
def test_a_block_is_its_formula(before: bool, crosses: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(12, 3)
    cross = Attention(12, 3, source=7) if crosses else None
    block = Block(attention, MLPS.build("relu", {"D": 12}), cross, before=before).double().eval()
    x, source = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 4, 7, dtype=torch.float64)
    steps = [(block.attention_norm, attention)]
    if cross is not None:
        steps.append((block.cross_norm, lambda h: cross(h, source=source)))
    h = x
    for norm, f in [*steps, (block.mlp_norm, block.mlp)]:
        h = h + f(norm(h)) if before else norm(h + f(h))
    close(block(x, source=source if crosses else None), h)
    other = None if cross is None else cross.write(cross.empty(2, 4), source)
    out, _ = block.extend(x, BlockState(attention.empty(2, 5), other))
    close(out, h)


def test_mlps_and_norms_are_their_formulas() -> None:
    x = torch.randn(3, 12)
    for name, f in (("gelu", functional.gelu), ("relu", torch.relu)):
        mlp = MLPS.build(name, {"D": 12})
        close(mlp(x), mlp.out(f(mlp.into(x))))
        assert mlp.into.weight.shape == (48, 12)
    tanh = MLPS.build("gelu_tanh", {"D": 12, "hidden": 5})
    close(tanh(x), tanh.out(functional.gelu(tanh.into(x), approximate="tanh")))
    gated = MLPS.build("swiglu", {"D": 12, "hidden": 7, "bias": False})
    a, c = gated.into.weight.split(7)
    close(gated(x), (functional.silu(x @ a.T) * (x @ c.T)) @ gated.out.weight.T, 1e-6)
    assert MLPS.build("swiglu", {"D": 12}).out.weight.shape == (12, 32)
    close(NORMS.build("rms", {"D": 12, "eps": 1e-5})(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), 1e-5)
    with pytest.raises(UnknownNameError, match=r"no MLP is called 'swiglo'.*swiglu"):
        MLPS.build("swiglo", {"D": 12})
    with pytest.raises(OptionError, match="merge 'shift'"):
        MERGES.build("shift", {}, by=2)


@pytest.mark.parametrize("name", NAMES)
def test_declared_cost_is_what_is_counted(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    attention = plain(layer(G=3, mechanism=name, length=16))
    x = torch.randn(1, 9, 14, dtype=torch.float64)
    with FlopCounterMode(display=False) as counted:
        attention(x)
    assert counted.get_total_flops() == attention.cost(9, 9).matmul
