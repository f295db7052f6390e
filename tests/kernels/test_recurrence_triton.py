"""Gated and delta attention in Triton, by its interpreter: outputs, states and gradients against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.kernels import fast
from regard.kernels.recurrence import register_gpu
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

HEAD = """
import interpreted
import torch
from torch.nn import functional
from regard.kernels import fast, plain
from regard.kernels.linear import plan
from regard.kernels.recurrence import ops, register_gpu
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

register_gpu._runs_triton = lambda x: True
ops.sm_count = lambda device: 64  # several segments
ops.LEAST_SPAN = 64

def draw(B, I, J, G, T, K, V, dtype):
    q, k, v = (torch.randn(B, n, T, w).to(dtype) for n, w in ((I, K), (J, K), (G, V)))
    a = -functional.softplus(torch.randn(B, G, T) * 2 - 2)
    return q, functional.normalize(k.float(), dim=-1).to(dtype), v, a, torch.rand(B, G, T)

def far(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max())
"""

SEQUENCES = """
CASES = [  # name, B, heads of q, k, v, T, K, V, hidden tokens, b, the strongest decay
    ("gated", 2, 2, 2, 2, 150, 5, 19, False, False, None),
    ("gated", 1, 4, 2, 2, 200, 16, 7, True, True, None),
    ("gated", 2, 1, 1, 3, 67, 20, 70, True, False, -2000.0),
    ("retention", 1, 2, 1, 2, 130, 7, 5, True, False, None),
    ("gated", 1, 1, 1, 1, 2, 3, 2, False, False, None),
]
for name, B, I, J, G, T, K, V, hides, writes, strongest in CASES:
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2**-6)):
        torch.manual_seed(0)
        q, k, v, a, b = draw(B, I, J, G, T, K, V, dtype)
        if strongest is not None:
            a[:, :, 30::50] = strongest
        seen = None
        if hides:
            seen = torch.rand(B, T) > 0.3
            seen[0, :20] = False
        direction = torch.randn(B, max(I, G), T, V)
        results = []
        for choose, exact in ((plain, torch.float64), (lambda m: fast(m, "triton"), dtype)):
            m = choose(mechanism(name))
            tensors = [x.detach().to(exact).requires_grad_() for x in (q, k, v)]
            if exact == dtype and hides:
                hidden = ~seen[:, None, :, None]
                poisoned = (x.detach().masked_fill(hidden, torch.nan).requires_grad_() for x in tensors[1:])
                tensors = [tensors[0], *poisoned]
            gates = {}
            if name != "retention":
                gates["a"] = a.to(torch.promote_types(exact, torch.float32)).detach().requires_grad_()
            if writes:
                gates["b"] = b.to(torch.promote_types(exact, torch.float32)).detach().requires_grad_()
            out = m(*tensors, Mask(causal=True, visible=seen), **gates)
            assert exact == torch.float64 or "decayed" in str(out.grad_fn), out.grad_fn
            grads = torch.autograd.grad((out * direction).sum(), [*tensors, *gates.values()])
            results.append([out, *grads])
        want, got = results
        for n in range(len(want)):
            assert got[n].shape == want[n].shape
            distance = far(got[n], want[n])
            assert distance <= limit, (name, T, dtype, n, distance)
        if hides:
            for grad in got[2:4]:
                assert not grad[~seen[:, None, :].expand(grad.shape[:3])].any()
print("same")
"""

STATES = """
# In two pieces, the gradient going back through the memory between them, and token by token after that.
for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2**-6)):
    torch.manual_seed(0)
    B, I, J, G, T, K, V = 2, 4, 1, 2, 190, 9, 21
    q, k, v, a, _ = draw(B, I, J, G, T, K, V, dtype)
    seen = torch.rand(B, T) > 0.3
    direction, last = torch.randn(B, 4, T, V), torch.randn(B, G, K, V)
    results = []
    for choose, exact in ((plain, torch.float64), (lambda m: fast(m, "triton"), dtype)):
        m = choose(mechanism("gated"))
        tensors = [x.detach().to(exact).requires_grad_() for x in (q, k, v)]
        decay = a.to(torch.promote_types(exact, torch.float32)).requires_grad_()
        state, outs = m.empty(Size(B=B, H=4, G=G, K=K, V=V, dtype=exact)), []
        for piece in (slice(0, 70), slice(70, T)):
            pieces = (x[:, :, piece] for x in tensors)
            out, state = m.extend(*pieces, state, seen[:, piece], a=decay[:, :, piece])
            outs.append(out)
        out = torch.cat(outs, 2)
        loss = (out * direction).sum() + (state.memory * last).sum()
        grads = torch.autograd.grad(loss, [*tensors, decay])
        results.append([out, state.memory, *grads, state.tokens])
    for n, (want, got) in enumerate(zip(*results, strict=True)):
        assert far(got, want) <= limit, (dtype, n, far(got, want))
print("same")
"""

TOKENS = """
MEMORIES = [("retention", {}), ("gated", {}), ("delta", {"range": 2.0}), ("gated-delta", {})]
for name, options in [*MEMORIES, ("gated", {"channels": True})]:
    for I, J, G in ((4, 1, 2), (1, 1, 3)):
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
            torch.manual_seed(0)
            B, K, V = 2, 5, 19
            q, k, v, a, b = draw(B, I, J, G, 40, K, V, dtype)
            if options.get("channels"):
                a = -functional.softplus(torch.randn(B, G, 40, K))
            seen = torch.rand(B, 40) > 0.3
            results = []
            for choose in (plain, lambda m: fast(m, "triton")):
                m = mechanism(name, **options)
                needs = {n: x for n, x in (("a", a), ("b", b)) if n in m.needs}
                state = m.empty(Size(B=B, H=max(I, G), G=G, K=K, V=V, dtype=dtype))
                first = {n: x[:, :, :32] for n, x in needs.items()}
                _, state = plain(m).extend(*(x[:, :, :32] for x in (q, k, v)), state, seen[:, :32], **first)
                m, outs = choose(m), []
                keys, values = k, v
                if m.use == "triton":
                    keys, values = (x.masked_fill(~seen[:, None, :, None], torch.nan) for x in (k, v))
                for t in range(32, 40):
                    here, before = slice(t, t + 1), [x.clone() for x in state]
                    with torch.no_grad():
                        now = {n: x[:, :, here] for n, x in needs.items()}
                        pieces = (x[:, :, here] for x in (q, keys, values))
                        out, after = m.extend(*pieces, state, seen[:, here], **now)
                    assert all(torch.equal(x, y) for x, y in zip(state, before)), "the state was changed"
                    outs, state = [*outs, out], after
                    hidden = ~seen[:, t]
                    assert torch.equal(after.memory[hidden], before[0][hidden])
                results.append([torch.cat(outs, 2), state.memory, state.tokens])
            for n, (want, got) in enumerate(zip(*results, strict=True)):
                assert got.dtype == want.dtype and got.shape == want.shape
                assert far(got, want) <= limit, (name, options, I, J, G, dtype, n, far(got, want))
print("same")
"""

COMPILED = """
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.errors import OutOfResources
from regard.errors import KernelError

m = fast(mechanism("gated"), "triton")
q, k, v, a, _ = draw(2, 2, 2, 2, 70, 5, 7, torch.float32)
q, k, v = (x.requires_grad_() for x in (q, k, v))
with FlopCounterMode(display=False) as forward:
    out = m(q, k, v, Mask(causal=True), a=a)
size = Size(2, 70, 70, 2, 2, 5, 7, True)
assert forward.get_total_flops() == m.cost(size).matmul
with FlopCounterMode(display=False) as backward:
    out.sum().backward()
assert backward.get_total_flops() == m.gradient_cost(size).matmul
whole = torch.compile(m, fullgraph=True, backend="aot_eager")
assert torch.equal(whole(q, k, v, Mask(causal=True), a=a), out)

class Large:  # a program that no setting fits on the device
    def __getitem__(self, grid):
        raise OutOfResources(1, 0, "shared memory")

ops.decayed_kernel = Large()
try:
    m(q, k, v, Mask(causal=True), a=a)
except KernelError as error:
    assert "Triton, K = 5, V = 7, torch.float32: it does not fit" in str(error) and "plain(model)" in str(error)
else:
    raise AssertionError("it ran")
print("same")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(SEQUENCES, id="sequences", marks=pytest.mark.slow),
        pytest.param(STATES, id="states", marks=pytest.mark.slow),
        pytest.param(TOKENS, id="tokens"),
        pytest.param(COMPILED, id="compiled"),
    ],
)
def test_the_programs_compute_what_the_reference_computes(program):
    pytest.importorskip("triton")
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([helpers, *sys.path[:1]])}
    done = subprocess.run([sys.executable, "-c", HEAD + program], capture_output=True, text=True, env=environment)
    assert done.stdout == "same\n", done.stderr


def test_they_refuse_what_they_would_leave_out(monkeypatch):
    monkeypatch.setattr(register_gpu, "_runs_triton", lambda x: True)
    q = torch.randn(1, 2, 32, 16)
    a = torch.zeros(1, 2, 32)
    causal = Mask(causal=True)
    asked = fast(mechanism("gated"), "triton")
    refuses = register_gpu._refuses_forward
    assert refuses(asked, q, q, q, causal, a, None) is None
    assert "not been judged" in refuses(mechanism("gated"), q, q, q, causal, a, None)
    packed = causal.but(documents=torch.zeros(1, 32, dtype=torch.long))
    assert "documents" in refuses(asked, q, q, q, packed, a, None)
    assert "as many queries" in refuses(asked, q[:, :, :3], q, q, causal, a, None)
    wide = torch.randn(1, 2, 32, 130)
    assert "limits" in refuses(asked, q, q, wide, causal, a, None)
    assert "bfloat16" in refuses(asked, q.double(), q.double(), q.double(), causal, a, None)
    by_channel = fast(mechanism("gated", channels=True), "triton")
    assert "one decay" in refuses(by_channel, q, q, q, causal, a, None)
    state = asked.empty(Size(B=1, H=2, G=2, K=16, V=16))
    token = q[:, :, :1].requires_grad_()
    assert "gradient" in register_gpu._refuses_extend(asked, token, token, token, state, None, a[:, :, :1], None)
