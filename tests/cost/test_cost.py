"""Costs: formulas are the numbers, the numbers are what PyTorch counts, and times on a device follow from them."""

import ast
import importlib.util
import json
import operator
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import regard
from regard import GPT, Encoder, Mask, Seq2Seq, Size, cost
from regard.cli.amounts import format_amount, format_bytes, format_seconds
from regard.cli.app import app
from regard.cost import crossing
from regard.cost.formulas import KINDS, QUANTITIES, formula, values
from regard.errors import OptionError, UnknownNameError
from regard.kernels import plain
from regard.laws import LAWS, Case, subject
from regard.mechanisms import Softmax, fitted
from regard.mechanisms.pair_costs import count_pairs
from regard.nn import Attention

NAMES = list(regard.mechanisms())
# Of q, k and v alone, and with masks that look both ways; tests/mechanisms counts the others.
BOTH_WAYS = [name for name in NAMES if not regard.mechanisms()[name].causal_only]
LINEAR = ("elu", "quadratic", "linear", "performer", "fourier")
OPTIONS = {"performer": {"features": 29}, "fourier": {"features": 29}, "synthesizer-random": {"rank": 3}}
DOCS = Path(__file__).parents[2] / "docs" / "cost.md"


def built(name, size, **more):
    return fitted(name, size, **(OPTIONS.get(name, {}) | more))


# Formulas

_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_LOWERED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹−", "0123456789-")


def worked_out(written, letters):
    """A printed formula at given letters: what stands side by side is multiplied."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: f"**{m[0].translate(_LOWERED)}", written).translate(_LOWERED)
    text = re.sub(r"(?<=[A-Za-z0-9)])(?=[A-Za-z(])", "*", text).replace("/", "//")

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return letters[node.id]
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        if isinstance(node.op, ast.Pow):
            return value(node.left) ** value(node.right)
        return _SIGNS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)


@cache
def printed(name, kind, causal):
    """Formulas hold for any size: asked for once, at another."""
    return formula(built(name, Size(2, 11, 11, 6, 3, 5, 7)), kind, causal)


SIZES = st.builds(
    lambda B, N, T, G, R, K, V: (Size(B, N, N, G * R, G, K, V), min(T, N)),
    *(st.integers(1, 5), st.integers(2, 700), st.integers(2, 300), *[st.integers(1, 4)] * 2, *[st.integers(1, 9)] * 2),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(SIZES, st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_printed_formula_gives_the_number(name, sizes, causal, dtype):
    whole = replace(sizes[0], causal=causal, dtype=dtype)
    mechanism = built(name, whole)
    for kind in KINDS:
        T = {"recurrent": sizes[1], "step": 1}.get(kind, whole.T)
        size = replace(whole, T=T)
        face = {"training": "parallel", "step": "recurrent"}.get(kind, kind)
        number = cost.of(mechanism, size, face, training=kind == "training")
        letters = values(mechanism, size)
        for quantity, written in printed(name, kind, causal).items():
            assert worked_out(written, letters) == getattr(number, quantity), (kind, quantity, written)


def test_formulas_are_the_known_ones():
    softmax = formula(Softmax())
    assert softmax["matmul"] == "2BHN²(K + V)" and softmax["useful"] == "BHN(K + V)(N + 1)"
    assert softmax["state"] == "eBGN(K + V)" and formula(Softmax(), "step")["matmul"] == "2BHS(K + V)"
    assert formula(Softmax(), causal=False)["useful"] == softmax["matmul"]
    assert formula(regard.mechanism("performer"))["state"] == "wBGF(V + 1)"
    assert formula(regard.mechanism("elu"), "step")["matmul"] == "2BK(G + H)(V + 1)"


# Numbers against what is counted


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_gradients_cost_what_is_counted(name, causal):
    for N, option in [(1, {}), (7, {}), (128, {}), (131, {}), (300, {}), (7, {"learned": False})]:
        if option and name != "synthesizer-random":
            continue
        size = Size(2, N, N, 6, 3, 5, 7, causal)
        q, k, v = (torch.randn(2, h, N, w, requires_grad=True) for h, w in ((6, 5), (3, 5), (3, 7)))
        mechanism = plain(built(name, size, **option))
        with FlopCounterMode(display=False) as forward:
            out = mechanism(q, k, v, Mask(causal))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        both = cost.of(mechanism, size, training=True).matmul
        assert (forward.get_total_flops(), both) == (
            mechanism.cost(size).matmul,
            forward.get_total_flops() + backward.get_total_flops(),
        )


def test_argmax_has_gradients_to_values_only_unless_straight_through():
    size = Size(2, 9, 9, 2, 2, 5, 7)
    hard, soft = (built("argmax", size, gradient=g).gradient_cost(size) for g in ("none", "straight_through"))
    assert hard.matmul == 2 * 2 * 9 * 9 * 2 * 7 and soft == Softmax().gradient_cost(size)


@pytest.mark.parametrize("name", LINEAR)
def test_the_last_queries_of_more_keys_go_by_pairs(name):
    size = Size(2, 5, 11, 6, 3, 4, 7, True)
    q, k, v = (torch.randn(2, h, n, w, requires_grad=True) for h, n, w in ((6, 5, 4), (3, 11, 4), (3, 11, 7)))
    mechanism = plain(built(name, size))
    with FlopCounterMode(display=False) as forward:
        out = mechanism(q, k, v, Mask(causal=True))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    counted = forward.get_total_flops(), backward.get_total_flops()
    assert counted == (mechanism.cost(size).matmul, mechanism.gradient_cost(size).matmul)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_window_is_in_the_cost(name, causal):
    """Products as counted on the reference, useful pairs as the mask allows, and the bytes that the state takes."""
    N, window = 37, 6
    size = Size(B=2, T=N, S=N, H=4, G=2, K=5, V=3, causal=causal, window=window)
    mechanism = plain(built(name, replace(size, S=80)))
    q, k, v = (torch.randn(2, n, N, w) for n, w in ((4, 5), (2, 5), (2, 3)))
    leaves = [x.requires_grad_() for x in (q, k, v)] + [x for x in mechanism.parameters() if x.requires_grad]
    mask = Mask(causal=causal, window=window)
    with FlopCounterMode(display=False) as forward:
        out = mechanism(q, k, v, mask)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    whole = mechanism.cost(size)
    assert whole.matmul == forward.get_total_flops()
    assert mechanism.gradient_cost(size).matmul == backward.get_total_flops()
    state = mechanism.empty(replace(size, S=3), Mask(window=window))
    for T in (N, 1):
        with FlopCounterMode(display=False) as step, torch.no_grad():
            _, state = mechanism.extend(q[:, :, :T], k[:, :, :T], v[:, :, :T], state)
    declared = mechanism.cost(replace(size, T=1, S=N + 1), "recurrent")
    assert declared.matmul == step.get_total_flops()
    taken = sum(x.nbytes for x in (getattr(state, "k", None), state.v) if x is not None)
    assert declared.state == whole.state == taken
    later = mechanism.cost(replace(size, T=1, S=80), "recurrent")
    assert later == declared


def test_a_cost_of_ones_own_need_not_know_of_windows():
    class Unaware(Softmax):
        def cost(self, size, face="parallel"):
            return super().cost(replace(size, window=None), face)

    case = Case(T=11, window=3)
    assert not LAWS["flops"](subject("softmax"), case).broken
    assert not LAWS["flops"](subject(Unaware()), case).broken


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 6, 11, 12])
def test_pairs_within_a_window_are_those_that_a_mask_allows(window, causal):
    for T in (11, 4, 1) if causal else (11,):
        allowed = Mask(causal=causal, window=window).allowed(T, 11, torch.device("cpu"))
        assert count_pairs(Size(T=T, S=11, causal=causal, window=window)) == int(allowed.sum())


@pytest.mark.parametrize("mechanism", ["softmax", "elu"])
def test_a_model_with_a_window_costs_less_and_keeps_less(mechanism):
    wide = GPT.preset("nano", vocabulary=13, length=64, mechanism=mechanism)
    narrow = GPT.preset("nano", vocabulary=13, length=64, mechanism=mechanism, attention={"window": 5})
    _, state = narrow.prefill(torch.zeros(2, 63, dtype=torch.long), None, 1)
    total = narrow.summary(64, B=2).total
    assert total.state == sum(layer.own.k.nbytes + layer.own.v.nbytes for layer in state.layers)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(narrow).extend(torch.zeros(2, 1, dtype=torch.long), state)
    assert total.step.matmul == counter.get_total_flops()
    if mechanism == "softmax":
        assert total.whole.useful < wide.summary(64, B=2).total.whole.useful


def test_bytes_of_a_whole_sequence_are_those_of_its_tensors():
    size = Size(2, 9, 9, 6, 3, 5, 7)
    q, k, v, out = (torch.empty(2, h, 9, w) for h, w in ((6, 5), (3, 5), (3, 7), (6, 7)))
    both = cost.of("softmax", size, training=True).bytes
    assert cost.of("softmax", size).bytes == sum(x.nbytes for x in (q, k, v, out))
    assert both == sum(x.nbytes for x in (q, k, v, out) + 2 * (q, k, v) + (out,))
    dense = built("synthesizer", size)
    own = sum(x[:, :9].numel() * 4 for x in dense.parameters())
    assert dense.cost(size).bytes == sum(x.nbytes for x in (q, v, out)) + own


def saved(run):
    """Bytes that autograd keeps, each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    return out, kept


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_memory_in_training_grows_as_the_order_says(name):
    def kept(N):
        size = Size(1, N, N, 2, 2, 4, 4)
        q, k, v = (torch.randn(1, 2, N, 4, requires_grad=True) for _ in range(3))
        mechanism = plain(built(name, size))
        return sum(saved(lambda: mechanism(q, k, v, Mask(causal=True)))[1].values())

    power = torch.tensor(kept(2048) / kept(1024)).log2().item()
    assert power == pytest.approx(2 if "N²" in regard.mechanisms()[name].training_memory else 1, abs=0.1)


@pytest.mark.parametrize("G", [1, 2, 6])
def test_a_layer_decodes_at_the_cost_of_the_formula(G):
    b, n, D, H, K, V = 3, 10, 18, 6, 5, 7
    layer = Attention(D, H, G=G, K=K, V=V, bias=False).bfloat16()
    assert layer.cost(1, n + 1, "recurrent", b) == cost.decode(b, n, D, H, G, K, V, e=2)


@pytest.mark.parametrize("crosses", ["softmax", "performer"])
def test_reading_a_source_moves_its_state_and_not_its_keys(crosses):
    layer = Attention(12, 3, source=8, mechanism=crosses, bias=False)
    near, far = (layer.cost(1, S, "recurrent") for S in (100, 1100))
    assert far.bytes - near.bytes == far.state - near.state == (0 if crosses == "performer" else 1000 * 2 * 12 * 4)


# Whole models

MODELS = {
    **{name: lambda name=name: GPT.preset("nano", vocabulary=13, length=200, mechanism=name) for name in NAMES},
    "char": lambda: GPT.preset("char", vocabulary=13, tied=False),
    "swiglu": lambda: GPT.preset("nano", vocabulary=13, block={"mlp": "swiglu", "norm": "rms"}, length=200),
    "grouped": lambda: GPT.preset("nano", vocabulary=13, attention={"groups": 1, "value_width": 24}, length=200),
    "after": lambda: GPT.preset("nano", vocabulary=13, length=200, block={"before": False}, checkpoint=True),
    "checkpoint": lambda: GPT.preset("nano", vocabulary=13, length=200, checkpoint=True),
    "encoder": lambda: Encoder.preset("nano", vocabulary=13),
    "untied": lambda: Encoder.preset("nano", vocabulary=13, tied=False, mechanism="performer"),
    "classes": lambda: Encoder.preset("nano", vocabulary=13, head="classes"),
    "seq2seq": lambda: Seq2Seq.preset("nano", vocabulary=13),
    "performer-cross": lambda: Seq2Seq.preset("nano", vocabulary=13, cross="performer", cross_options={"features": 9}),
}


def texts(model, B, T, S):
    def draw(n):
        return torch.randint(13, (B, n))

    if isinstance(model, Seq2Seq):
        return draw(S), draw(T), draw(T)
    return draw(T), torch.zeros(B, dtype=torch.long) if getattr(model.config, "head", "") == "classes" else draw(T)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_at_the_cost_that_is_counted(name):
    model, B, T, S = plain(MODELS[name]()), 2, 70, 50
    inputs = texts(model, B, T, S)
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(*inputs)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    total = model.summary(T, S, B).total
    assert forward.get_total_flops() == total.whole.matmul
    assert backward.get_total_flops() == total.gradient.matmul
    assert total.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["softmax", "char", "encoder", "classes", "seq2seq", "checkpoint"])
def test_activations_are_what_autograd_keeps(name):
    model, B, T, S = MODELS[name](), 2, 100, 90
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    _, kept = saved(lambda: model.loss(*texts(model, B, T, S)))
    counted = sum(n for place, n in kept.items() if place not in own)
    assert model.summary(T, S, B).total.activations == pytest.approx(counted, rel=0.04)


def test_decoding_reads_every_weight_and_the_state():
    model = GPT.preset("nano", vocabulary=13)
    total = model.summary(512).total
    read = 4 * (total.parameters - model.stack.positions.table.weight.numel()) + total.state
    assert read < total.step.bytes < 1.1 * read
    assert total.state == 3 * 512 * 2 * 48 * 4
    shared = model.summary(512, B=8).total
    assert shared.step.matmul == 8 * total.step.matmul and shared.step.bytes < 8 * total.step.bytes


def test_models_too_large_for_the_memory_are_counted_without_numbers():
    with torch.device("meta"):
        model = GPT.preset("gpt2-xl", mechanism="performer")
    assert model.summary().total.parameters == 1_557_611_200


# Devices


def test_mechanisms_too_large_for_the_memory_are_counted_without_numbers():
    size = Size(1, 1 << 20, 1 << 20, 16, 16, 64, 64, True)  # 64 TiB of learned scores
    assert cost.of("synthesizer-random", size, training=True).useful > 0
    shown = CliRunner().invoke(app, ["cost", "synthesizer-random", "softmax", "--crossing"])
    assert shown.exit_code == 0, shown.output
    assert CliRunner().invoke(app, ["cost", "synthesizer-random", "--tokens", str(1 << 20)]).exit_code == 0


def test_devices_are_found_by_the_names_that_drivers_give():
    names = {
        "NVIDIA A100-SXM4-80GB": 2.039e12,
        "NVIDIA A100 80GB PCIe": 1.935e12,
        "NVIDIA A100-PCIE-40GB": 1.555e12,
        "NVIDIA H100 PCIe": 2e12,
        "NVIDIA H100 80GB HBM3": 3.35e12,
        "NVIDIA L4": 0.3e12,
        "NVIDIA H200": 4.8e12,
        "h200": 4.8e12,
    }
    assert {name: cost.device(name).bandwidth for name in names} == pytest.approx(names)
    assert cost.peak("NVIDIA H200", torch.bfloat16) == 989e12 and cost.peak("Some GPU", torch.float32) is None
    with pytest.raises(UnknownNameError, match=r"no device is called 'h900'.*H200"):
        cost.device("h900")
    with pytest.raises(OptionError, match=r"V100: no peak is known for torch\.bfloat16; known: float16, float32"):
        cost.device("V100").peak(torch.bfloat16)


def test_a_measured_device_is_within_reason_and_measured_once():
    found = cost.device("cpu")
    assert found.measured and found.name.startswith("cpu, ") and found is cost.measured_device("cpu")
    assert 1e8 < found.bandwidth < 1e13 and 1e6 < found.elements < 1e13
    assert all(1e7 < rate < 1e15 for rate in found.flops.values())
    with pytest.raises(OptionError, match="'mps' cannot be measured here"):
        cost.measured_device("mps")


def test_the_floor_is_the_roofline():
    device = cost.Device("one", {torch.float32: 1000.0}, 10.0, 100.0)
    few, many = regard.cost.Cost(10, 10, 5, 100, 0), regard.cost.Cost(10**6, 10**6, 5, 100, 0)
    assert device.ridge(torch.float32) == 100
    assert cost.floor(few, device, torch.float32) == 10 and few.intensity < 100
    assert cost.floor(many, device, torch.float32) == 1000 and many.intensity > 100
    assert cost.predicted(few, device, torch.float32) == pytest.approx(10 + 0.01 + 0.05)


# Crossings


def test_by_the_model_the_crossing_is_where_the_floors_change_places():
    size, device = Size(1, 1, 1, 8, 8, 64, 64, dtype=torch.bfloat16), cost.device("H200")
    pair = crossing.named("performer", features=128), crossing.named("softmax")
    found = crossing.modelled(*pair, size, device)

    def floors(N):
        at = replace(size, T=N, S=N)
        return [cost.floor(cost.of(make(at), at), device, size.dtype) for make in pair]

    assert (found.first, found.second) == ("performer", "softmax") and found.tokens > 500
    fast, slow = floors(found.tokens)
    assert fast < slow
    fast, slow = floors(found.tokens - 1)
    assert fast >= slow
    never = crossing.modelled(crossing.named("argmax"), crossing.named("softmax"), size, device)
    assert never.tokens is None


def test_by_the_model_a_step_is_cheaper_once_the_cache_outgrows_the_state():
    size, device = Size(1, 1, 1, 8, 8, 64, 64, dtype=torch.bfloat16), cost.device("H200")
    found = crossing.modelled(crossing.named("elu"), crossing.named("softmax"), size, device, "recurrent")
    # 2·4·K(V+1) bytes of sums read and written, and a key and a value, against 2·S(K+V) of cache
    assert found.tokens == 2 * 4 * 64 * 65 // (2 * 128) + 2


def test_by_the_clock_the_crossing_is_found_from_measured_times(monkeypatch):
    times = {"elu": lambda N: 1e-3 * N, "softmax": lambda N: 1e-6 * N * N}

    def clock(runs, device, seconds):
        return [run() for run in runs]

    monkeypatch.setattr(crossing, "face_runner", lambda m, size, *_: lambda: times[m.name](size.S))
    monkeypatch.setattr(crossing, "shortest_times", clock)
    found = crossing.measured(crossing.named("elu"), crossing.named("softmax"), Size(), close=1.05)
    assert 1000 < found.tokens < 1050 and len(found.points) > 6
    assert list(found.points) == sorted(found.points)
    times["elu"] = lambda N: 1.0
    never = crossing.measured(crossing.named("elu"), crossing.named("softmax"), Size(), longest=512)
    assert never.tokens is None and never.upto == 512


@pytest.mark.parametrize(
    ("faster", "ranges", "says"),
    [
        (lambda N: N >= 700, [(700, 4096)], "from N = 700 on"),
        (lambda N: N <= 300, [(64, 300)], "up to N = 300"),
        (lambda N: 100 <= N <= 900, [(100, 900)], "from N = 100 to 900"),
        (lambda N: N < 100 or N > 1000, [(64, 99), (1001, 4096)], "up to N = 99 and from N = 1,001 on"),
        (lambda N: True, [(64, 4096)], "always, from N = 64 to 4,096"),
        (lambda N: False, [], "never, up to N = 4,096"),
    ],
)
def test_a_crossing_says_where_the_order_changes_back(faster, ranges, says, monkeypatch):
    """The first length at which one is faster need not be one from which on it is."""
    monkeypatch.setattr(crossing, "face_runner", lambda m, size, *_: (m.name, size.S))
    monkeypatch.setattr(crossing, "shortest_times", lambda runs, *_: [0.1 if faster(runs[0][1]) else 0.3, 0.2])
    pair = crossing.named("elu"), crossing.named("softmax")
    found = crossing.measured(*pair, Size(), longest=4096, close=1.0)
    assert list(found.ranges) == ranges and found.describe() == says
    on = [start for start, end in ranges if end == 4096]
    assert found.tokens == (on[-1] if on else None)


def test_what_is_faster_for_short_texts_only_is_not_said_to_be_from_there_on():
    """Softmax is predicted to beat elu from one token on, but not for long."""
    row = asked("elu", "softmax", "--crossing", *H200)["rows"][0]["predicted"]
    other = asked("softmax", "elu", "--crossing", *H200)["rows"][0]["predicted"]
    assert row["tokens"] is None and row["ranges"] == [[1, other["tokens"] - 1]]
    assert f"up to N = {other['tokens'] - 1}" in run("elu", "softmax", "--crossing", *H200)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("face", "training"), [("parallel", False), ("parallel", True), ("recurrent", False), ("weights", False)]
)
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_is_timed_is_the_face_that_was_asked_for(name, face, training, window):
    size = Size(1, 1 if face == "recurrent" else 9, 9, 2, 2, 4, 4, window=window)
    mechanism = plain(built(name, size))
    run = crossing.face_runner(mechanism, size, face, training)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == cost.of(mechanism, size, face, training=training).matmul


# The command


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["cost", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def asked(*arguments):
    return json.loads(run(*arguments, "--json"))


H200 = ("--device", "H200")


def test_the_table_has_the_declared_numbers():
    found = asked("softmax", "elu", "--tokens", "100", "--heads", "6", "--kv-heads", "3", "--training", *H200)
    size = Size(1, 100, 100, 6, 3, 64, 64, dtype=torch.bfloat16)
    for row in found["rows"]:
        number = cost.of(row["name"], size, training=True)
        assert all(row[q] == getattr(number, q) for q in QUANTITIES)
        assert row["floor_seconds"] == cost.floor(number, cost.device("H200"), torch.bfloat16)
    text = run("softmax", "elu", "--tokens", "100", *H200)
    assert "N²·max(K,V)" in text and "989 TFLOP/s, 4.80 TB/s" in text and "as its maker states" in text


def test_one_mechanism_is_shown_with_its_formulas():
    found = asked("performer", "--features", "32", *H200)
    assert {(r["face"], r["quantity"]) for r in found["rows"]} == {(k, q) for k in KINDS for q in QUANTITIES}
    assert "2BNF(G + H)(K + V + 1) + 2BHR(F + V + 1)" in run("performer", *H200)
    assert all(r["formula"] for r in asked("--formulas", "--not-causal", *H200)["rows"][0] if r == "formula")


def test_decoding_shows_the_three_kinds_of_heads_side_by_side():
    layer = asked("--decode", "1000", "--batch", "4", *H200)["layer"]
    assert [x["heads"] for x in layer] == ["multi-head", "grouped, G = 2", "multi-query"]
    assert [x["bytes"] for x in layer] == [cost.decode(4, 1000, 512, 8, G, 64, 64).bytes for G in (8, 2, 1)]
    assert "2BD(HK+GK+GV+HV) + 2BH(n+1)(K+V)" in run("--decode", "1000", *H200)


def test_a_layer_includes_its_projections():
    bare, layer = (asked("softmax", "elu", *more, *H200)["rows"][0] for more in ((), ("--layer",)))
    assert layer["matmul"] - bare["matmul"] == 2 * 1024 * 4 * 512 * 512


def test_crossings_by_the_model_and_by_the_clock(monkeypatch):
    found = asked("softmax", "performer", "elu", "--crossing", *H200)["rows"]
    assert [r["floor"]["first"] for r in found] == ["performer", "elu"] and "measured" not in found[0]
    text = run("softmax", "elu", "--crossing", *H200)
    assert all(f"N = {found[1][way]['tokens']:,}" in text for way in ("floor", "predicted"))
    short = crossing.measured
    monkeypatch.setattr("regard.cli.cost_crossing.measured", lambda *a, **k: short(*a, **k, longest=64, seconds=0.001))
    both = asked("softmax", "elu", "--crossing", "--measure", "--heads", "1", "--width", "4")["rows"][0]
    assert [p[0] for p in both["measured"]["points"]] == [64] and both["floor"]["tokens"] > 1


def test_models_of_regard_by_preset_and_folder(tmp_path):
    found = asked("--model", "gpt2", *H200)
    assert found["model"] == "GPT" and found["total"]["parameters"] == 124_439_808 and found["T"] == 1024
    GPT.preset("nano", vocabulary=13).save(tmp_path / "m")
    folder = asked("--model", str(tmp_path / "m"), "--tokens", "64", "--batch", "3", "--dtype", "fp32")
    assert folder["total"] == json.loads(
        json.dumps(GPT.preset("nano", vocabulary=13).summary(64, B=3).as_dict()["total"])
    )
    text = run("--model", "Seq2Seq:nano", *H200)
    assert "decoder layer 0 (softmax) ×3" in text and "training holds" in text and "at the least on H200" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["softmx"], "Did you mean 'softmax'"),
        (["--heads", "8", "--kv-heads", "3"], "--kv-heads 3 do not divide --heads 8"),
        (["--face", "x"], "expected parallel, recurrent, weights"),
        (["--tokens", "0"], "--tokens 0: expected at least 1"),
        (["softmax", "--crossing"], "name two or more"),
        (["--training", "--decode", "5"], "--training is of whole sequences"),
        (["--model", "Foo:x"], "expected a preset of GPT, Encoder, Seq2Seq"),
        (["--model", "GPT:nano", "--tokens", "2000"], "built for length = 1024"),
        (["--device", "h900"], "no device is called 'h900'"),
    ],
)
def test_bad_questions_are_answered_with_what_to_do(arguments, says):
    result = CliRunner().invoke(app, ["cost", "--device", "H200", *arguments])
    assert isinstance(result.exception, regard.RegardError) and says in str(result.exception)


@pytest.mark.parametrize(
    ("x", "shown"),
    [(0, "0 "), (12, "12 "), (999.7, "1.00 k"), (1234567, "1.23 M"), (45.6e9, "45.6 G"), (789e12, "789 T")],
)
def test_amounts(x, shown):
    assert format_amount(x) == shown and format_bytes(x) == shown + "B"


def test_times():
    assert [format_seconds(x) for x in (2.5, 0.00123, 45e-6, 3e-9)] == ["2.50 s", "1.23 ms", "45.0 µs", "3.00 ns"]


# Hugging Face


def test_the_cache_of_a_hugging_face_config_is_counted_without_weights():
    pytest.importorskip("transformers")
    from regard.hub.costs import hub_model_cost

    gpt2 = hub_model_cost("gpt2", T=64, B=2)
    with torch.device("meta"):
        ours = GPT.preset("gpt2").bfloat16().summary(64, B=2).total
    assert (gpt2.parameters, gpt2.forward) == (ours.parameters, ours.whole.matmul)
    assert gpt2.cache == ours.state == 2 * 64 * gpt2.a_token and gpt2.a_token == 12 * 2 * 768 * 2
    mistral = hub_model_cost("mistral", T=32)
    assert mistral.a_token == 32 * 2 * 8 * 128 * 2 and mistral.cache == 32 * mistral.a_token
    mixtral = hub_model_cost("mixtral", T=8)
    assert mixtral.forward is None and mixtral.cache == 8 * 32 * 2 * 8 * 128 * 2
    bert = hub_model_cost("bert", T=16)
    assert bert.cache is None and bert.forward > 2 * 16 * 85_000_000
    text = run("--model", "random:gpt2", "--tokens", "64", *H200)
    assert "cache, one more token of a sequence" in text and "36.9 kB" in text


def test_a_padding_token_does_not_keep_a_model_from_being_counted(tmp_path):
    """Models look for it among the tokens, which have no values here."""
    hf = pytest.importorskip("transformers")
    from regard.hub.costs import hub_model_cost

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    found = []
    for pad in (None, 49):
        hf.GPT2Config(**sizes, pad_token_id=pad).save_pretrained(tmp_path / "model")
        found.append(hub_model_cost(tmp_path / "model", T=16))
    assert found[0] == found[1] and found[0].cache > 0


# The page


def test_the_tables_of_the_page_are_the_formulas_and_the_results():
    script = DOCS.parent.parent / "benchmarks" / "speed" / "predicted.py"
    spec = importlib.util.spec_from_file_location("predicted", script)
    made = importlib.util.module_from_spec(spec)
    sys.modules["predicted"] = made  # its dataclass looks there for its types
    spec.loader.exec_module(made)
    page = DOCS.read_text(encoding="utf-8")
    assert page == made.filled(page), "run: python benchmarks/speed/predicted.py --docs"


@pytest.mark.slow
def test_the_caches_on_the_page_are_those_of_the_configs():
    from regard.hub.costs import hub_model_cost

    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d,]+) \|$", DOCS.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 4
    for kind, shown in rows:
        assert hub_model_cost(kind, T=8).a_token == int(shown.replace(",", "")), kind
