"""Linear attention in Triton: its programs in their interpreter, which needs no GPU, and when they are refused."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.errors import KernelError
from regard.kernels import fast
from regard.kernels.linear import register as linear
from regard.mechanisms import AnyFeatures, Elu, Fourier, Performer, Quadratic, base
from regard.shapes import Mask, Size

LAW = """
import interpreted
from regard.laws import LAWS, Case, subject

for name, options, case in {cases}:
    found = LAWS["kernel"](subject(name, **options), Case(**case))
    assert not found.broken, (name, case, found)
print("same")
"""

STATES = """
import interpreted
import torch
from regard.kernels import fast, plain
from regard.mechanisms import mechanism
from regard.shapes import Size

# A long sequence in two pieces, the gradient going back through the state between them.
for name, options in (("elu", {}), ("performer", {"features": 70, "width": 5})):
    results = []
    for choose in (plain, lambda m: fast(m, "triton")):
        torch.manual_seed(0)
        m = choose(mechanism(name, **options))
        q, k, v = (torch.randn(2, n, 150, w, requires_grad=True) for n, w in ((4, 5), (2, 5), (2, 7)))
        seen = torch.rand(2, 150) > 0.3
        state, outs = m.empty(Size(B=2, H=4, G=2, K=5, V=7)), []
        for piece in (slice(0, 90), slice(90, 150)):
            out, state = m.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, seen[:, piece])
            outs.append(out)
        out = torch.cat(outs, 2)
        loss = (out * torch.randn_like(out)).sum() + (state.sums * torch.randn_like(state.sums)).sum() / 50
        results.append([out, *torch.autograd.grad(loss, (q, k, v)), m.read(q, state), state.tokens])
    # The sums are relative to peaks that differ: their share of the loss differs for performer, all else may not.
    for n, (want, got) in enumerate(zip(*results)):
        if name == "performer" and 1 <= n <= 3:
            continue
        assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (name, n, (got - want).abs().max())

# Narrow heads in bfloat16, where segments hand their sums on: the same without a gradient, hidden keys made of NaN.
for name in ("elu", "linear"):
    results = []
    for choose in (plain, lambda m: fast(m, "triton")):
        torch.manual_seed(0)
        m = choose(mechanism(name))
        q, k, v = (torch.randn(1, n, 400, w).bfloat16() for n, w in ((4, 37), (1, 37), (1, 20)))
        seen = torch.rand(1, 400) > 0.3
        if choose is not plain:
            k, v = (x.masked_fill(~seen[:, None, :, None], float("nan")) for x in (k, v))
        state, outs = m.empty(Size(B=1, H=4, G=1, K=37, V=20, dtype=torch.bfloat16)), []
        for piece in (slice(0, 60), slice(60, 400)):
            out, state = m.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, seen[:, piece])
            outs.append(out)
        results.append([torch.cat(outs, 2), state.sums, state.tokens])
    for n, (want, got) in enumerate(zip(*results)):
        far = (got.double() - want.double()).abs().max() / want.double().abs().max()
        assert far <= 0.01, (name, n, far)
print("same")
"""

UNITS = """
import interpreted
import torch
from regard.kernels import fast, plain
from regard.laws.case import cancellation_scale
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

# The sums of fourier are float16 in units of what came before: values and gradients over many orders of magnitude,
# some rows without any gradient.
m, T = mechanism("fourier", features=64, width=16), 300
for causal, order in ((True, "rising"), (True, "wild"), (False, "wild")):
    torch.manual_seed(0)
    q, k, v, direction = (torch.randn(1, 2, T, 16).bfloat16() / 2 for _ in range(4))
    v *= torch.logspace(-15, 15, T)[torch.arange(T) if order == "rising" else torch.randperm(T)][:, None].bfloat16()
    direction *= torch.logspace(-6, 6, T)[torch.randperm(T)][:, None].bfloat16()
    direction[:, :, 70:135] = 0
    results = []
    for choose, dtype in ((plain, torch.float64), (lambda m: fast(m, "triton"), torch.bfloat16)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = choose(m)(*inputs, Mask(causal=causal))
        results.append([out, *torch.autograd.grad((out * direction).sum(), inputs)])
    want, got = results
    scale = cancellation_scale(plain(m), q.double(), k.double(), Mask(causal=causal), v.double())
    assert ((got[0].double() - want[0]).abs() / scale).max() <= 2**-8, (causal, order)
    for n in (1, 2, 3):
        far = (got[n].double() - want[n]).abs().max() / want[n].abs().max()
        assert far <= 3 * 2**-8, (causal, order, n, far)

# In two pieces, the gradient going back through the state between them.
results = []
for choose in (plain, lambda m: fast(m, "triton")):
    torch.manual_seed(0)
    m = choose(mechanism("fourier", features=40, width=20))
    q, k, v = (torch.randn(2, n, 250, w).bfloat16() for n, w in ((4, 20), (2, 20), (2, 70)))
    q, k, v = ((x * by).requires_grad_() for x, by in ((q, 0.5), (k, 0.5), (v, 1e7)))
    seen = torch.rand(2, 250) > 0.3
    state, outs = m.empty(Size(B=2, H=4, G=2, K=20, V=70, dtype=torch.bfloat16)), []
    for piece in (slice(0, 90), slice(90, 250)):
        out, state = m.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, seen[:, piece])
        outs.append(out)
    out = torch.cat(outs, 2)
    results.append([out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v)), m.read(q, state)])
for n, (want, got) in enumerate(zip(*results)):
    far = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert far <= 3 * 2**-8, (n, far)
print("same")
"""

STEPS = """
import interpreted
import torch
from dataclasses import replace
from regard.kernels import fast, plain
from regard.mechanisms import mechanism
from regard.shapes import Size

# Token by token after a first piece, some of them hidden and made of NaN; the state before a step stays as it was.
SIZE = Size(B=3, H=4, G=2, K=5, V=19)
RANDOM = {"features": 20, "width": 5}
MAPS = (("elu", {}), ("linear", {}), ("performer", RANDOM), ("fourier", RANDOM))
for name, options in MAPS:
    for dtype, rounding in ((torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 0.01)):
        torch.manual_seed(0)
        q, k, v = (torch.randn(3, n, 40, w).to(dtype) * 0.7 for n, w in ((4, 5), (2, 5), (2, 19)))
        seen = torch.rand(3, 40) > 0.3
        seen[0, :33] = False  # the first step of a row without a past
        seen[:, 39] = True
        poisoned = [x.masked_fill(~seen[:, None, :, None], float("nan")) for x in (k, v)]
        m = mechanism(name, **options).to(dtype)
        empty = m.empty(replace(SIZE, dtype=dtype))
        _, first = plain(m).extend(*(x[:, :, :32] for x in (q, k, v)), empty, seen[:, :32])
        results = []
        for choose, (keys, values) in ((plain, (k, v)), (lambda m: fast(m, "triton"), poisoned)):
            choose(m)
            state, outs = first, []
            for t in range(32, 40):
                here, before = slice(t, t + 1), [x.clone() for x in state]
                visible = None if t == 39 else seen[:, here]
                out, after = m.extend(q[:, :, here], keys[:, :, here], values[:, :, here], state, visible)
                assert all(torch.equal(a, b) for a, b in zip(state, before)), "the state was changed"
                outs, state = [*outs, out], after
            results.append([torch.cat(outs, 2), state.sums, state.peak.clamp(min=-1e3), state.tokens])
        for n, (want, got) in enumerate(zip(*results)):
            assert got.dtype == want.dtype and got.shape == want.shape, (name, dtype, n)
            far = (got.double() - want.double()).abs().max()
            assert far <= rounding * want.double().abs().max(), (name, dtype, n, far)
print("same")
"""

COMPILED = """
import interpreted
import torch
from torch.utils.flop_counter import FlopCounterMode
from regard.errors import KernelError
from regard.kernels import fast
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

for name, options in (("elu", {}), ("performer", {"features": 70, "width": 5})):
    for causal in (True, False):
        m = fast(mechanism(name, **options), "triton")
        q, k, v = (torch.randn(2, 2, 140, w, requires_grad=True) for w in (5, 5, 7))
        with FlopCounterMode(display=False) as forward:
            out = m(q, k, v, Mask(causal=causal))
        assert forward.get_total_flops() == m.cost(Size(2, 140, 140, 2, 2, 5, 7, causal)).matmul, (name, causal)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        projected = 2 * 2 * 280 * m.feature_flops(5)
        assert backward.get_total_flops() == 2 * forward.get_total_flops() - projected, (name, causal)
    whole = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(q, k, v, Mask(causal=False)), out)
m = fast(mechanism("quadratic"), "triton")
q, k, v = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
m(q, k, v, Mask(causal=True))
with FlopCounterMode(display=False) as counted:
    out = m(q, k, v, Mask(causal=True))
    assert counted.get_total_flops() == 2 * 4 * 140 * 140 * (5 + 7)
    out.sum().backward()
assert counted.get_total_flops() == 2 * 4 * 140 * 140 * (4 * 5 + 3 * 7)
assert torch.equal(torch.compile(m, fullgraph=True, backend="aot_eager")(q, k, v, Mask(causal=True)), out)
# Narrow heads keep sums for the gradient only where one is to come.
m = fast(mechanism("elu"), "triton")
q, k, v = (torch.randn(1, 2, 140, 40).bfloat16().requires_grad_() for _ in range(3))
out = m(q, k, v, Mask(causal=True))
grads = torch.autograd.grad(out.sum(), (q, k, v))
whole = torch.compile(m, fullgraph=True, backend="aot_eager")(q, k, v, Mask(causal=True))
assert torch.equal(whole, out)
assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(whole.sum(), (q, k, v)), grads))
with torch.no_grad():
    assert torch.equal(m(q, k, v, Mask(causal=True)), out)
try:
    torch.ops.regard.linear_attention(q, k, v, None, None, None, None, "elu", True, False, False)
except KernelError as error:
    assert "Pass needs_grad=True" in str(error)
else:
    raise AssertionError("a gradient that was not announced")
print("same")
"""

FAR_BELOW_ZERO = """
import interpreted
import torch
from regard.kernels import fast, plain
from regard.mechanisms import mechanism
from regard.shapes import Size

# States of elu go from the reference to the programs and back, where the reference keeps its sums relative to e⁻³⁰.
torch.manual_seed(0)
m = mechanism("elu")
q, k, v = (torch.randn(2, n, 9, w) for n, w in ((4, 5), (2, 5), (2, 7)))
k[:, :, :4] = -30 - k[:, :, :4].abs()
pieces = (slice(0, 4), slice(4, 6), slice(6, 7), slice(7, 9))
results = []
for programs in ((), (1, 2), (0, 2), (0, 1, 3)):
    state, outs = m.empty(Size(B=2, H=4, G=2, K=5, V=7)), []
    for n, piece in enumerate(pieces):
        m = fast(m, "triton") if n in programs else plain(m)
        out, state = m.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state)
        outs.append(out)
    results.append(torch.cat(outs, 2))
for got in results[1:]:
    assert (got - results[0]).abs().max() <= 1e-5 * results[0].abs().max(), (got - results[0]).abs().max()

# One step at a time is stabilised in the programs, too.
state, other = (m.empty(Size(B=2, H=4, G=2, K=5, V=7)) for _ in range(2))
for t in range(4):
    step = [x[:, :, t : t + 1] for x in (-200 - q.abs(), 10 * k, v)]
    want, state = plain(m).extend(*step, state)
    got, other = fast(m, "triton").extend(*step, other)
    assert want.any() and (got - want).abs().max() <= 1e-5 * want.abs().max(), t
print("same")
"""

FEW = [
    ("elu", {}, dict(T=37, K=5, V=7, H=4, G=2, padding="inside", dtype="float32")),
    ("quadratic", {}, dict(T=130, K=5, V=7, H=4, G=2, padding="inside", dtype="bfloat16")),
    ("performer", {"features": 70}, dict(T=140, K=5, V=7, H=2, G=1, B=1, padding="left", dtype="bfloat16")),
]
MANY = [
    (
        name,
        options,
        dict(
            T=T,
            K=K,
            V=min(V, 120) if name == "quadratic" else V,
            H=4,
            G=2,
            B=B,
            causal=causal,
            padding=padding,
            dtype=dtype,
            seed=3,
        ),
    )
    for name, options, dtypes in (
        ("elu", {}, ("float32", "bfloat16", "float16")),
        ("linear", {}, ("float32", "bfloat16")),
        ("performer", {"features": 70}, ("float32", "bfloat16", "float16")),
        ("fourier", {"features": 40}, ("bfloat16",)),
        ("quadratic", {}, ("bfloat16", "float16")),
    )
    for dtype in dtypes
    for T, K, V, B, causal, padding in (
        (131, 5, 11, 2, True, "left"),
        (2, 3, 2, 1, True, "none"),
        (67, 37, 130, 1, False, "inside"),
        (259, 37, 3, 1, True, "right"),
        (330, 64, 19, 1, True, "inside"),
    )
] + [
    ("elu", {}, dict(T=70, K=140, V=150, H=2, G=1, B=1, dtype="bfloat16")),
    # Few features, of which the rounding does not average out, and a draw that shows it.
    ("fourier", {"features": 12}, dict(T=140, K=9, V=70, H=2, G=1, B=1, padding="inside", dtype="bfloat16")),
    ("fourier", {"features": 3}, dict(T=2, K=3, V=2, H=4, G=2, B=1, dtype="bfloat16", seed=65)),
    # A draw in which the second token is nearly orthogonal to both that it sees.
    ("fourier", {"features": 40}, dict(T=2, K=3, V=2, H=4, G=2, B=1, dtype="bfloat16", seed=117)),
]


def interpreted(program):
    pytest.importorskip("triton")
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": helpers}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "same\n", done.stderr


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")


def test_programs_are_the_reference():
    interpreted(LAW.format(cases=FEW))


def test_states_of_elu_far_below_zero_are_the_reference():
    interpreted(FAR_BELOW_ZERO)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_programs_are_the_reference_for_all_masks_and_dtypes(part):
    interpreted(LAW.format(cases=MANY[part::4]))


@pytest.mark.slow
@pytest.mark.parametrize("program", [STATES, UNITS, STEPS, COMPILED], ids=["states", "units", "steps", "compiled"])
def test_states_units_compilation_and_flops(program):
    interpreted(program)


def test_elsewhere_an_explicit_request_is_an_error_that_says_why():
    q = torch.randn(1, 2, 5, 4)
    for cls in (Elu, Performer, Fourier, AnyFeatures):
        with pytest.raises(KernelError, match="CUDA device"):
            fast(cls(), "triton")(q, q, q, Mask(causal=True))


def test_a_size_beyond_the_limits_runs_the_reference_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(linear, "_runs_triton", lambda x: True)
    base._log_once.cache_clear()
    performer, q = Performer(features=600), torch.randn(1, 1, 3, 4)
    with caplog.at_level(logging.INFO, logger="regard"):
        out = performer(q, q, q, Mask(causal=True))
        performer(q, q, q, Mask(causal=True))
    assert out.isfinite().all()
    assert [r.message for r in caplog.records] == [
        "performer runs its reference instead of the kernel 'triton': torch.float32, F = 600, K = 4, V = 4 exceed its "
        "limits: F ≤ 512, K and V ≤ 256; float32 and float16: K ≤ 128"
    ]
    with pytest.raises(KernelError, match=r"F = 600.*F ≤ 512"):
        fast(performer, "triton")(q, q, q, Mask(causal=True))


def test_quadratic_attention_refuses_what_its_programs_cannot_take(monkeypatch):
    monkeypatch.setattr(linear, "_runs_triton", lambda x: True)
    monkeypatch.setattr(linear, "_smem_bytes_per_block", lambda device: 1 << 20)
    whole, documents = Mask(causal=True), Mask(causal=True, documents=torch.zeros(1, 3, dtype=torch.long))
    for m, dtype, width, mask, says in (
        (Quadratic(), torch.float32, 4, whole, "torch.float32, K = 4, V = 4 exceed its limits"),
        (Quadratic(), torch.float16, 129, whole, "float16 with ≤ 128"),
        (Quadratic(), torch.bfloat16, 257, whole, "bfloat16 with K and V ≤ 256"),
        (Quadratic(), torch.float64, 4, whole, "it takes bfloat16, float16, float32"),
        (Quadratic(strict=True), torch.bfloat16, 4, whole, "strict=True"),
        (Quadratic(), torch.bfloat16, 4, documents, "packed documents"),
    ):
        q = torch.randn(1, 1, 3, width).to(dtype)
        with pytest.raises(KernelError, match=says):
            fast(m, "triton")(q, q, q, mask)


def test_what_the_kernel_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(linear, "_runs_triton", lambda x: True)
    q = torch.randn(1, 1, 4, 3)
    documents = Mask(causal=True, documents=torch.tensor([[0, 0, 1, 1]]))
    refusals = {
        "packed documents": (Elu(), q, documents),
        "strict": (Elu(strict=True), q, Mask()),
        "float16, float32": (Elu(), q.double(), Mask()),
        "bfloat16, F": (Fourier(features=4), q, Mask()),
    }
    for reason, (mechanism, x, mask) in refusals.items():
        with pytest.raises(KernelError, match=reason):
            fast(mechanism, "triton")(x, x, x, mask)


def test_a_step_is_left_to_the_reference_where_a_gradient_flows(monkeypatch):
    monkeypatch.setattr(linear, "_runs_triton", lambda x: True)
    q = torch.randn(1, 1, 1, 4)
    learned = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softplus())
    for m, given, sums in (
        (Elu(), q.clone().requires_grad_(), None),
        (Elu(), q, torch.ones(1, 1, 4, 5, requires_grad=True)),
        (AnyFeatures(learned), q, None),
    ):
        state = m.empty(Size(K=4, V=4))
        state = state if sums is None else state._replace(sums=sums)
        out, _ = m.extend(given, q, q, state)
        assert out.requires_grad
        with pytest.raises(KernelError, match="it has no gradient for one token at a time"):
            fast(m, "triton").extend(given, q, q, state)


def test_wide_heads_run_the_reference_where_shared_memory_is_small(monkeypatch):
    monkeypatch.setattr(linear, "_runs_triton", lambda x: True)
    narrow, wide = (torch.randn(1, 1, 4, n, dtype=torch.bfloat16) for n in (64, 65))
    for bytes_, refused in ((99 << 10, True), (163 << 10, False)):
        monkeypatch.setattr(linear, "_smem_bytes_per_block", lambda device, n=bytes_: n)
        assert linear._unsupported_forward(Elu(), narrow, narrow, narrow, Mask(causal=True)) is None
        why = linear._unsupported_forward(Elu(), wide, wide, wide, Mask(causal=True))
        assert (why is not None and "160 KiB of shared memory" in why) == refused


def test_what_was_compiled_for_one_dtype_is_not_run_for_another(monkeypatch):
    """The totals of all before a segment are bfloat16 beside bfloat16, else float32: two programs."""
    from regard.kernels.linear import launch, plan, sums, triton_sums

    compiled = []

    class Program:
        arg_names = (
            "segment_sums",
            "segment_scales",
            "segment_S_cast",
            "running_scales",
            "slots",
            "first",
            "last",
            "N",
            "S_size",
            "BLOCK",
            "STABILISED",
            "REVERSE",
            "SHARED_EXPONENT",
        )

        def __getitem__(self, grid):
            def call(*args, **options):
                compiled.append(args[2].dtype)
                return self

            return call

    monkeypatch.setattr(triton_sums, "scan_segments_kernel", Program())
    monkeypatch.setattr(launch, "_COMPILED", {})
    x = torch.randn(1, 1, 256, 8)
    for dtype in (torch.float32, torch.bfloat16):
        chosen = plan.plan_shapes(x.to(dtype), x.to(dtype), None, "elu")
        segment_sums, stats = torch.zeros(1, 3, 72), torch.zeros(1, 3)
        S_cast = torch.zeros(1, 3, 64, dtype=dtype)
        sums.scan_segments(chosen, segment_sums, stats, S_cast, stats.clone(), carry_in=False, reverse=False)
    assert compiled == [torch.float32, torch.bfloat16]


def test_a_way_that_does_not_fit_gives_way_to_the_next():
    from triton.runtime.errors import OutOfResources, PTXASError

    from regard.kernels.linear import launch

    class Program:
        def __init__(self, *errors):
            self.errors, self.tried = list(errors), []

        def __getitem__(self, grid):
            def call(*args, **options):
                self.tried.append(options["num_stages"])
                if self.errors:
                    raise self.errors.pop(0)

            return call

    def launched(program):
        settings = [{"num_stages": 3}, {"num_stages": 2}, {"num_stages": 1}]
        launch.launch((program, "a plan"), program, (1, 1, 1), (torch.zeros(1),), (), dict, lambda: settings)
        return program.tried

    few, small = PTXASError("too few registers"), OutOfResources(2, 1, "shared memory")
    assert launched(Program()) == [3]
    assert launched(Program(few, small)) == [3, 2, 1]
    with pytest.raises(KernelError, match="a plan: it does not fit cpu") as caught:
        launched(Program(few, small, small))
    assert caught.value.__cause__ is small
