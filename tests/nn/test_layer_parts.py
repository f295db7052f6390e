"""What may stand around a mechanism: a short convolution, norms and gates, and rotary positions of a part."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.errors import GateError, OptionError
from regard.kernels import plain
from regard.mechanisms import fork, mechanisms
from regard.nn import NORMS, Attention, LooksAheadError, Rotary, ShortConvolution, mechanism_state, rotate
from regard.nn.gates import DECAYS, LogSigmoid
from regard.shapes import Mask

NAMES = sorted(set(mechanisms()) - {"linear"})
PARTS: dict[str, Any] = {"convolution": 4, "out_norm": "rms", "gate": "silu"}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert a.shape == b.shape
    assert float((a - b).detach().abs().max()) <= tolerance * max(1.0, float(b.detach().abs().max()))


def layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    if "source" not in options:
        options.setdefault("causal", True)
    return Attention(14, 6, K=4, V=3, **options).double().eval()


def tokens(T: int, C: int, B: int = 2) -> torch.Tensor:
    return torch.randn(B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("width", [2, 4, 7])
def test_a_short_convolution_is_torchs_depthwise_one(width: int) -> None:
    convolution = ShortConvolution(5, width, bias=True).double()
    assert convolution.bias is not None
    torch.nn.init.normal_(convolution.bias)
    x = tokens(6, 5)  # shorter than the widest filter
    padded = functional.pad(x.mT, (width - 1, 0))
    want = functional.silu(functional.conv1d(padded, convolution.weight[:, None], convolution.bias, groups=5)).mT
    close(convolution(x), want)


def test_a_short_convolution_sees_visible_tokens_of_its_document_only() -> None:
    convolution = ShortConvolution(5, 4).double()
    x = tokens(9, 5, B=1)
    visible = torch.tensor([[False, True, True, False, True, True, True, False, True]])
    documents = torch.tensor([[3, 3, 3, 3, 3, 7, 7, 7, 7]])
    shown = visible[0]
    close(convolution(x, visible)[:, shown], convolution(x[:, shown]))
    alone = [convolution(x[:, shown & (documents[0] == n)]) for n in (3, 7)]
    close(convolution(x, visible, documents)[:, shown], torch.cat(alone, 1))
    changed = x.clone()
    changed[:, ~shown] = 1e6
    clean = convolution(x, visible, documents)[:, shown]
    assert torch.equal(convolution(changed, visible, documents)[:, shown], clean)


def test_a_short_convolution_goes_on_from_its_last_inputs() -> None:
    convolution = ShortConvolution(5, 4).double()
    x = tokens(11, 5)
    visible = torch.rand(2, 11, generator=torch.Generator().manual_seed(2)) > 0.4
    for seen in (None, visible):
        before = convolution.empty(2, torch.float64, "cpu")
        parts = []
        for at, n in ((0, 1), (1, 1), (2, 5), (7, 0), (7, 1), (8, 3)):
            shown = None if seen is None else seen[:, at : at + n]
            out, before = convolution.extend(x[:, at : at + n], before, shown)
            parts.append(out)
        shown = slice(None) if seen is None else seen
        close(torch.cat(parts, 1)[shown], convolution(x, seen)[shown])
        assert before.shape == (2, 3, 5) and before.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_every_part_beside_every_mechanism(name: str) -> None:
    """A whole pass, pieces, a branched state, padding with NaN and packed documents agree."""
    qk_norm = "l2" if {"q", "k"} <= set(mechanisms()[name].needs) else None
    attention = layer(G=2, mechanism=name, length=16, qk_norm=qk_norm, **PARTS)
    x = tokens(11, 14)
    whole = attention(x)
    state, parts = attention.empty(2, 3), []
    for at, n in ((0, 4), (4, 1), (5, 6)):
        branch = fork(state)
        attention.extend(x[:, :1], branch)  # what is done with a branch does not touch the state
        out, state = attention.extend(x[:, at : at + n], state)
        parts.append(out)
    close(torch.cat(parts, 1), whole)
    visible = torch.ones(2, 14, dtype=torch.bool)
    visible[:, [0, 5, 13]] = False
    padded = torch.full((2, 14, 14), math.nan, dtype=torch.float64)
    padded[visible] = x.flatten(0, 1)
    got = attention(padded, visible)
    close(got[visible].view_as(whole), whole)
    assert bool((got[~visible] == 0).all())
    got.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in attention.parameters() if p.grad is not None)
    documents = torch.tensor([0] * 4 + [1] * 2 + [0] * 5).expand(2, -1)
    alone = [attention(part) for part in x.split([4, 2, 5], 1)]
    close(attention(x, documents=documents), torch.cat(alone, 1))


def test_a_branched_state_changes_the_order_of_its_rows() -> None:
    attention = layer(**PARTS)
    x = tokens(6, 14)
    _, state = attention.extend(x[:, :5], attention.empty(2, 8))
    swapped = torch.tensor([1, 0, 1])
    out, _ = attention.extend(x[swapped, 5:], fork(state, swapped))
    close(out, attention(x)[swapped, 5:])
    assert mechanism_state(state).tokens.tolist() == [5, 5]


def test_the_layer_is_its_formula() -> None:
    attention = layer(qk_norm="l2", scale=2.0, **PARTS)
    assert attention.convolution is not None and attention.gate is not None
    x = tokens(5, 14, B=1)
    projected = functional.pad(attention.project(x).mT, (3, 0))
    mixed = functional.silu(functional.conv1d(projected, attention.convolution.weight[:, None], groups=66)).mT
    q, k, v = (part.view(1, 5, 6, -1).transpose(1, 2) for part in mixed.split([24, 24, 18], -1))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    close(q.norm(dim=-1), torch.ones(1, 6, 5, dtype=torch.float64), 1e-2)
    scores = (2.0 * q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    heads = scores.softmax(-1) @ v
    heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    merged = heads.transpose(1, 2).reshape(1, 5, 18)
    close(attention(x), attention.out(merged * functional.silu(attention.gate(x))))


def test_a_gate_and_a_norm_of_heads_in_cross_attention() -> None:
    attention = layer(source=9, out_norm="layer", gate="sigmoid")
    x, source = tokens(5, 14), tokens(7, 9)
    state = attention.write(attention.empty(2, 7), source)
    close(attention.read(x, state), attention(x, source=source))
    plain = layer(source=9)
    plain.load_state_dict(attention.state_dict(), strict=False)
    assert float((attention(x, source=source) - plain(x, source=source)).detach().abs().max()) > 1e-3


def test_rotary_positions_of_a_share_leave_the_rest() -> None:
    rotary, narrow = Rotary(8, share=0.5), Rotary(4)
    x = tokens(6, 8)[:, None]
    at = torch.arange(6)[None]
    turned = rotate(x, rotary.rotation(at, 6, torch.float64))
    close(turned[..., 4:], x[..., 4:], 0)
    close(turned[..., :4], rotate(x[..., :4], narrow.rotation(at, 6, torch.float64)), 0)
    with pytest.raises(OptionError, match=r"0\.4 of it, which is 3"):
        Rotary(8, share=0.4)


def test_layers_that_are_not_turned_keep_queries_and_keys() -> None:
    rotation = Rotary(4).rotation(torch.arange(5)[None], 5, torch.float64)
    x = tokens(5, 14)
    still = layer(positions=False)
    close(still(x, rotation=rotation), still(x), 0)
    assert float((layer()(x, rotation=rotation) - still(x)).detach().abs().max()) > 1e-4


def test_a_window_reaches_as_much_farther_as_the_convolution_does() -> None:
    from regard.shapes import Mask

    attention = layer(rules=Mask(window=3), convolution=4)
    assert attention.reach == 6 and layer(rules=Mask(window=3)).reach == 3 and layer(convolution=4).reach is None
    x = tokens(10, 14, B=1)
    changed = x.clone()
    changed[:, 1] += 1
    moved = (attention(x) - attention(changed)).detach().abs().amax(-1)[0]
    assert [n for n in range(10) if moved[n] > 1e-9] == list(range(1, 7))


def test_bad_parts_say_why() -> None:
    with pytest.raises(OptionError, match="width 1: expected 2 to 64"):
        layer(convolution=1)
    with pytest.raises(OptionError, match="belongs to self-attention"):
        layer(convolution=4, source=9)
    with pytest.raises(OptionError, match="Its options: channels, width, activation, bias"):
        layer(convolution=4, convolution_options={"activatoin": "silu"})
    with pytest.raises(Exception, match="Did you mean 'sigmoid'"):
        layer(gate="sigmod")
    with pytest.raises(OptionError, match="nothing to act on"):
        layer(mechanism="synthesizer", length=8, qk_norm="l2")
    with pytest.raises(LooksAheadError, match="mix the documents"):
        layer(merge="reweight-sequence")(tokens(4, 14), documents=torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(dtype: torch.dtype) -> None:
    attention = layer(qk_norm="l2", **PARTS).to(dtype)
    x = tokens(6, 14).to(dtype)
    whole = attention(x)
    out, state = attention.extend(x, attention.empty(2, 8))
    assert whole.dtype == out.dtype == state.before.dtype == dtype
    close(out, whole, 0.05)


@pytest.mark.slow
def test_a_layer_with_every_part_compiles_whole() -> None:
    attention = layer(qk_norm="l2", **PARTS)
    x = tokens(6, 14)
    visible = torch.ones(2, 6, dtype=torch.bool)
    visible[0, :2] = False
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    close(compiled(x, visible), attention(x, visible))


RECURRENCES = [name for name in NAMES if mechanisms()[name].causal_only]


@pytest.mark.parametrize("decay", ["softplus", "logsigmoid", "constant"])
@pytest.mark.parametrize("channels", [False, True])
def test_gates_are_their_formulas(decay: str, channels: bool) -> None:
    attention = layer(G=3, mechanism="gated-delta", channels=channels, range=2, decay=decay)
    assert attention.gates is not None and attention.gates.decay is not None
    x = tokens(5, 14)
    made = attention.gates(x)
    widths = [0 if decay == "constant" else 3 * (4 if channels else 1), 3]
    projected, strength = (x @ attention.gates.project.weight.mT).split(widths, -1)  # type: ignore[union-attr]
    own = dict(attention.gates.decay.named_parameters())
    if decay == "softplus":
        projected = functional.softplus(projected + own["bias"]).view(2, 5, 3, -1)
        want = -projected * own["rate"].exp()[:, None]
    elif decay == "logsigmoid":
        want = functional.logsigmoid(projected + own["bias"]).view(2, 5, 3, -1) / 16
    else:
        rates = torch.tensor([1 - 2.0 ** -(5 + h) for h in range(3)], dtype=torch.float64).log()
        want = rates[:, None].expand(2, 5, 3, 4 if channels else 1)
    want = want.transpose(1, 2)
    close(made["a"], want if channels else want[..., 0])
    close(made["b"], 2 * torch.sigmoid(strength).transpose(1, 2))
    assert bool((made["a"] <= 0).all())


def test_a_constant_decay_is_retention() -> None:
    gated = layer(mechanism="gated", decay="constant")
    retention = layer(mechanism="retention")
    retention.load_state_dict(gated.state_dict())
    close(gated(tokens(9, 14)), retention(tokens(9, 14)))


@pytest.mark.parametrize("name", ["delta", "gated-delta"])
def test_a_layer_that_erases_keeps_its_memory_bounded(name: str) -> None:
    attention = layer(mechanism=name, range=2, bias=False)
    x = 100 * tokens(400, 14)
    kept = attention.extend(x, attention.empty(2, 1))[1]
    values = attention.project(x)[..., -18:].view(2, 400, 6, 3)
    # No writing makes what any key reads longer by more than the value that is written.
    bound = 2 * values.norm(dim=-1).sum(1)
    assert bool((torch.linalg.matrix_norm(kept.memory, 2) <= bound).all())
    with pytest.raises(GateError, match="expected at most 2"), torch.no_grad():
        layer(mechanism=name, qk_norm="rms", bias=False)(x)


def test_a_layer_looks_at_decays_and_keys_unless_it_makes_them_within_their_ranges(monkeypatch: Any) -> None:
    """To look costs a GPU a wait for each layer."""

    class Growing(LogSigmoid):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    monkeypatch.setitem(DECAYS, "growing", Growing)
    for name in ("gated", "delta", "gated-delta"):
        assert not layer(mechanism=name).mechanism.checks
    for name, options in (("gated", {"decay": "growing"}), ("delta", {"qk_norm": "rms"})):
        assert layer(mechanism=name, **options).mechanism.checks
    for mechanism in (regard.mechanism("gated"), "retention"):
        assert layer(mechanism=mechanism).mechanism.checks
    with pytest.raises(GateError, match="expected at most 0"):
        layer(mechanism="gated-delta", decay="growing")(tokens(9, 14))


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_memory_has_no_layer_that_looks_both_ways(name: str) -> None:
    with pytest.raises(OptionError, match="looks both ways"):
        layer(mechanism=name, causal=False)
    with pytest.raises(OptionError, match="no cross-attention"):
        layer(mechanism=name, source=9)


def test_value_heads_that_share_keys_are_heads_with_equal_keys() -> None:
    shared = layer(mechanism="gated-delta", key_heads=2, convolution=3)
    own = layer(mechanism="gated-delta", convolution=3)
    assert shared.convolution is not None and own.convolution is not None
    rest = {n: x for n, x in shared.state_dict().items() if n.split(".")[0] not in ("project", "convolution")}
    own.load_state_dict(rest, strict=False)
    pairs = [
        (shared.project.weight, own.project.weight),
        (shared.project.bias, own.project.bias),
        (shared.convolution.weight, own.convolution.weight),
    ]
    for ours, theirs in pairs:
        q, k, v = ours.data.split([8, 8, 18])
        repeated = [x.unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1) for x in (q, k)]
        theirs.data = torch.cat([*repeated, v])
    x = tokens(9, 14)
    close(shared(x), own(x))
    out, state = shared.extend(x, shared.empty(2, 4))
    close(out, own(x))
    assert mechanism_state(state).memory.shape == (2, 6, 4, 3)


@pytest.mark.parametrize("qk_norm", [None, "l2", "rms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_queries_and_keys_have_the_dtype_of_values(qk_norm: str | None, dtype: torch.dtype) -> None:
    """Norms and rotations are computed in float32; a fused kernel takes one dtype."""
    attention = layer(mechanism="gated", qk_norm=qk_norm, convolution=3).float()
    seen: list[Any] = []
    attention.mechanism.register_forward_pre_hook(lambda _, inputs: seen.extend(x.dtype for x in inputs[:3]))
    rotation = Rotary(4).rotation(torch.arange(5)[None], 5, torch.float32)
    with torch.autocast("cpu", dtype):
        attention(tokens(5, 14).float(), rotation=rotation)
    assert seen == [dtype] * 3


@pytest.mark.parametrize("name", RECURRENCES)
def test_weights_of_value_heads_that_share_keys_are_those_of_each(name: str) -> None:
    shared = layer(mechanism=name, key_heads=2)
    x = tokens(9, 14)
    _, weights = shared(x, need_weights=True)
    # One-hot rows in the place of v give back the matrix of each value head.
    q, k, v = shared._project_tokens(x, None)
    gates = shared._make_gates(x)
    one_hot = torch.eye(9, dtype=v.dtype).expand(*v.shape[:2], 9, 9)
    want = shared.mechanism(q, k, one_hot, Mask(causal=True), **gates)
    close(weights, want)
    close(shared.mechanism.weights(q, k, Mask(causal=True), heads=v.shape[1], **gates), want)  # type: ignore[call-arg]


@pytest.mark.parametrize("key_heads", [None, 2])
def test_products_and_states_of_shared_keys_are_declared(key_heads: int | None) -> None:
    attention = plain(layer(mechanism="gated", key_heads=key_heads, decay="step", skip=True, joint=True, **PARTS))
    x = tokens(70, 14)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(x)
    declared = attention.cost(70, 70, B=2)
    assert counter.get_total_flops() == declared.matmul
    state = attention.empty(2, 4)
    assert attention.cost(1, 70, "recurrent", B=2).state == state.own.memory.nbytes + state.before.nbytes


def test_a_step_forgets_and_writes() -> None:
    attention = layer(mechanism="gated", decay="step", decay_options={"least": 0.005, "most": 0.1})
    assert attention.gates is not None and attention.gates.project is not None
    x = 3 * tokens(7, 14)
    made = attention.gates(x)
    own = dict(attention.gates.decay.named_parameters())  # type: ignore[union-attr]
    free = functional.softplus(x @ attention.gates.project.weight.mT + own["bias"])
    step = free.clamp(0.005, 0.1)
    assert bool((free < 0.005).any()) and bool((free > 0.1).any())
    close(made["b"], step.transpose(1, 2))
    close(made["a"], (-step * own["rate"].exp()).transpose(1, 2))


def test_one_norm_over_all_heads_comes_after_the_gate() -> None:
    attention = layer(mechanism="gated", out_norm="rms", gate="silu", joint=True, skip=True)
    assert attention.head_norm is not None and attention.gate is not None and attention.skip is not None
    assert attention.head_norm.weight.shape == (18,)
    attention.skip.data = torch.linspace(-1, 1, 6, dtype=torch.float64)
    x = tokens(5, 14)
    plain = layer(mechanism="gated")
    plain.load_state_dict(attention.state_dict(), strict=False)
    plain.out = torch.nn.Identity()  # type: ignore[assignment]
    values = attention.project(x)[..., -18:].unflatten(-1, (6, 3))
    gated = (plain(x) + (values * attention.skip[:, None]).flatten(2)) * functional.silu(attention.gate(x))
    close(attention(x), attention.out(gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()))


@pytest.mark.parametrize("name", ["gated", "softmax"])
def test_skip_and_a_joint_norm_go_through_states_padding_and_documents(name: str) -> None:
    attention = layer(G=3, mechanism=name, skip=True, joint=True, **PARTS)
    x = tokens(9, 14)
    whole = attention(x)
    first, state = attention.extend(x[:, :4], attention.empty(2, 3))
    second, state = attention.extend(x[:, 4:5], state)
    third, _ = attention.extend(x[:, 5:], state)
    close(torch.cat([first, second, third], 1), whole)
    padded = torch.full((2, 11, 14), math.nan, dtype=torch.float64)
    visible = torch.ones(2, 11, dtype=torch.bool)
    visible[:, [0, 5]] = False
    padded[visible] = x.flatten(0, 1)
    close(attention(padded, visible)[visible].view_as(whole), whole)
    alone = [attention(part) for part in x.split([4, 5], 1)]
    documents = torch.tensor([0] * 4 + [1] * 5).expand(2, -1)
    close(attention(x, documents=documents), torch.cat(alone, 1))


def test_a_zero_centred_norm_begins_as_the_norm_without_a_weight() -> None:
    norm = NORMS.build("rms_zero_centred", {"D": 5, "eps": 1e-5}).double()
    x = tokens(4, 5)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(norm(x), want)
    norm.weight.data = torch.tensor([-1.0, 0.5, 0, 1, 2], dtype=torch.float64)
    close(norm(x), want * torch.tensor([0, 1.5, 1, 2, 3]))
    half = norm.half()(x.half())
    assert half.dtype == torch.float16
    close(half.double(), norm.double()(x.half().double()), 1e-2)


def test_parts_that_do_not_fit_say_why() -> None:
    with pytest.raises(OptionError, match="only mechanisms with a memory for each value head"):
        layer(key_heads=2)
    with pytest.raises(OptionError, match="a divisor of the value heads"):
        layer(mechanism="gated", key_heads=4)
    with pytest.raises(OptionError, match="does not take from a decay"):
        layer(mechanism="gated-delta", decay="step")
    with pytest.raises(OptionError, match="does not take from a decay"):
        layer(mechanism="gated", channels=True, decay="step")
    with pytest.raises(OptionError, match=r"least = 0\.5, most = 0\.1"):
        layer(mechanism="gated", decay="step", decay_options={"least": 0.5, "most": 0.1})
    with pytest.raises(OptionError, match="belongs to self-attention"):
        layer(skip=True, source=9)
