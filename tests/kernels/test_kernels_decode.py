"""The Triton programs of decoding in their interpreter, which needs no GPU: each against what it stands for."""

import os
import subprocess
import sys

import pytest

ATTEND = """
import torch
from regard.kernels.decode.triton_decode import step
from regard.mechanisms import Softmax, fork
from regard.mechanisms.cache import write_cache
from regard.nn import Rotation, rotate
from regard.nn.positions import alibi_slopes
from regard.shapes import Mask, Size

torch.manual_seed(0)
# B, H, G, K, V, tokens before, steps, window, softcap, slopes, whether queries and keys are turned
CASES = [
    (1, 1, 1, 5, 3, 0, 3, None, None, False, False),
    (3, 6, 2, 8, 11, 5, 2, None, 2.0, False, True),
    (2, 4, 4, 16, 16, 130, 2, None, None, True, False),
    (2, 18, 1, 8, 24, 70, 1, None, None, False, True),
    (1, 4, 2, 8, 8, 128, 3, 65, None, False, False),
    (3, 4, 2, 8, 8, 90, 4, 64, 3.0, True, False),
    (2, 2, 1, 8, 8, 9, 3, 1, None, True, False),
    (2, 4, 2, 8, 8, 40, 3, 7, None, True, True),
]
for B, H, G, K, V, first, steps, window, softcap, sloped, turned in CASES:
    for counters in (None, torch.zeros(B * G, dtype=torch.int32)):
        plain = Softmax()
        plain.use = "plain"
        rules = Mask(window=window, softcap=softcap, slopes=alibi_slopes(H).float() if sloped else None)
        empty = plain.empty(Size(B=B, H=H, G=G, K=K, V=V, S=first + steps), rules)
        q, k, v = (torch.randn(B, n, first, w) for n, w in ((H, K), (G, K), (G, V)))
        # Of one row all are visible: at 129 tokens a block of the ring of 65 holds nothing but the slot of the new one.
        visible = None if B == 1 else torch.rand(B, first) > 0.3
        if window == 7:  # a state that was written to has more slots than its window
            state = write_cache(empty, k, v, visible)
            assert state.v.shape[2] > window
        else:
            _, state = plain.extend(q, k, v, empty, visible)
        ours = fork(state)
        for _ in range(steps):
            q, k, v = (torch.randn(B, n, 1, w) for n, w in ((H, K), (G, K), (G, V)))
            rotation = None
            turned_q, turned_k = q, k
            if turned:
                angles = torch.randn(B, 1, 1, K // 2).repeat(1, 1, 1, 2)
                rotation = Rotation(angles.cos(), angles.sin())
                turned_q, turned_k = rotate(q, rotation), rotate(k, rotation)
            want, state = plain.extend(turned_q, turned_k, v, state)
            counted = torch.empty_like(ours.tokens)
            got = step(
                q, k, v, ours.k, ours.v, ours.tokens, ours.used, K**-0.5, rules,
                rotation=rotation, arrived=counters, counted=counted,
            )
            ours = ours._replace(tokens=counted, used=ours.used + 1)
            assert got.isfinite().all()
            assert torch.equal(counted, state.tokens)
            assert counters is None or not counters.any()
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (got - want).abs().max()
        for b, n in enumerate(state.tokens.tolist()):
            assert torch.allclose(ours.k[b, :, :n], state.k[b, :, :n], atol=1e-6)
            assert torch.equal(ours.v[b, :, :n], state.v[b, :, :n])
print("same")
"""

PROJECT = """
import torch
from torch.nn import functional
from regard.kernels.matvec.triton_project import Norm, project

torch.manual_seed(0)
ACTIVATIONS = {
    "none": lambda x: x, "gelu": functional.gelu, "relu": torch.relu, "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
# rows, outputs, inputs, activation, gated, norm, bias, residual, dtype
CASES = [
    (1, 5, 3, "none", False, None, True, False, torch.float32),
    (1, 7, 1030, "none", False, None, False, False, torch.float32),
    (1, 9, 64, "relu", False, None, True, False, torch.bfloat16),
    (3, 9, 40, "gelu", False, "layer", True, True, torch.float32),
    (1, 33, 70, "gelu_tanh", False, "layer", True, False, torch.bfloat16),
    (5, 20, 64, "silu", True, "rms", True, True, torch.float32),
    (13, 40, 200, "silu", True, "rms", True, True, torch.float32),
    (8, 33, 70, "gelu_tanh", False, "layer", True, False, torch.float16),
    (40, 70, 300, "gelu_tanh", False, "layer", True, True, torch.float16),
    (64, 5, 130, "relu", False, None, False, True, torch.float32),
]
for M, N, K, activation, gated, kind, biased, added, dtype in CASES:
    def draw(*shape):
        return torch.randn(*shape).to(dtype)

    x, w, gamma = draw(M, 1, K), draw(2 * N if gated else N, K) / K**0.5, draw(K)
    b = draw(len(w)) if biased else None
    beta = draw(K) if kind == "layer" else None
    residual = draw(M, 1, N) if added else None
    got = project(
        x, w, b, norm=None if kind is None else Norm(kind, gamma, beta, 1e-5), activation=activation, gated=gated,
        residual=residual,
    )
    want = x.double()
    if kind == "layer":
        want = functional.layer_norm(want, (K,), gamma.double(), beta.double(), 1e-5)
    if kind == "rms":
        want = functional.rms_norm(want, (K,), gamma.double(), 1e-5)
    want = functional.linear(want, w.double(), None if b is None else b.double())
    if gated:
        gate, value = want.chunk(2, -1)
        want = ACTIVATIONS[activation](gate) * value
    else:
        want = ACTIVATIONS[activation](want)
    if added:
        want = want + residual.double()
    loose = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= loose * want.abs().max(), (M, N, K, activation)
print("same")
"""

FUSED = """
import torch
from regard.generate.fused import FusedStep, refuse_parts
from regard.generate.graph import _fix_shapes
from regard.kernels.decode.triton_greedy import pick_likeliest
from regard.models import GPT

torch.manual_seed(0)
MODELS = [
    {},
    {"position": "rotary", "block": {"mlp": "swiglu", "norm": "rms", "bias": False},
     "attention": {"heads": 4, "groups": 2, "window": 7}, "tied": False},
    {"position": "alibi", "block": {"mlp": "gelu", "embedding_norm": True},
     "attention": {"heads": 4, "groups": 1, "key_width": 6, "value_width": 10}},
]
for changes in MODELS:
    for B in (1, 9):
        model = GPT(**{"width": 32, "layers": 2, "length": 64, "vocabulary": 70, "attention": {"heads": 2}} | changes)
        for p in model.eval().parameters():
            p.data += torch.randn_like(p) * 0.1
        with torch.inference_mode():
            visible = torch.ones(B, 9, dtype=torch.bool)
            visible[1:2, :5] = False
            _, state = model.prefill(torch.randint(0, 70, (B, 9)), visible, 30)
            ours = _fix_shapes(model.fork(state), 39)
            assert refuse_parts(model, ours) is None
            step = FusedStep(model, B)
            for _ in range(3):
                tokens = torch.randint(0, 70, (B, 1))
                want, state = model.extend(tokens, state, last=True)
                got = step(tokens, ours)
                ours.tokens.add_(1)
                assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (got - want).abs().max()
            best, logp = torch.zeros(B, dtype=torch.long), torch.zeros(B)
            pick_likeliest(got[:, 0], best, logp)
            assert torch.equal(best, got[:, 0].argmax(-1))
            assert torch.allclose(logp, got[:, 0].log_softmax(-1).amax(-1), atol=1e-5)
logits = torch.full((2, 5000), -1.0)
logits[0, [17, 4000]] = 3.0  # of equal ones, the first
pick_likeliest(logits, best := torch.zeros(2, dtype=torch.long), logp := torch.zeros(2))
assert best.tolist() == [17, 0] and torch.allclose(logp, logits.log_softmax(-1).amax(-1))
print("same")
"""


LOSSES = """
import torch
from torch.nn import functional
from regard.kernels.crossentropy.triton_crossentropy import replace_by_gradient

torch.manual_seed(0)
for N in (5, 64, 9000):  # less than a block, one, and more
    for smoothing in (0.0, 0.2):
        for gradient in (True, False):
            wide = torch.randn(6, N + 3) * 3  # rows that lie apart
            logits, targets = wide[:, :N], torch.randint(0, N, (6,))
            targets[2] = -100
            exact = logits.double().requires_grad_()
            want = functional.cross_entropy(exact, targets, reduction="none", label_smoothing=smoothing)
            (want_grad,) = torch.autograd.grad(want.sum(), exact)
            before = logits.clone()
            got = replace_by_gradient(logits, targets, -100, smoothing, gradient)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
            assert (logits - (want_grad if gradient else before)).abs().max() <= 1e-6, (N, smoothing)
            assert not gradient or not logits[2].any()
print("same")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
@pytest.mark.parametrize("program", [ATTEND, PROJECT, FUSED, LOSSES], ids=["attend", "project", "fused", "losses"])
def test_triton_programs_are_the_reference(program):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "same\n", done.stderr
