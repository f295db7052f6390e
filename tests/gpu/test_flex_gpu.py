"""Softmax under rules on a GPU: FlexAttention against the reference, forward and gradients, at odd lengths."""

import itertools

import pytest
import torch

from regard.kernels import fast, flex, plain
from regard.laws.case import difference
from regard.mechanisms import Softmax
from regard.models import GPT
from regard.shapes import Mask

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
H, G = 4, 2
RULES = ("padding", "window", "documents", "slopes", "bias", "softcap")
COMBINED = [*((rule,) for rule in RULES), ("padding", "window"), ("padding", "documents")]
COMBINED += [("padding", "slopes", "window")]


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")


def _mask(rules, B, T, causal, seed):
    g = torch.Generator().manual_seed(seed)
    given = {"causal": causal}
    if "padding" in rules:
        visible = torch.rand(B, T, generator=g) > 0.2
        visible[0, : T // 3] = False
        visible[1] = True
        given["visible"] = visible.cuda()
    if "window" in rules:
        given["window"] = 77
    if "documents" in rules:
        given["documents"] = (torch.rand(B, T, generator=g) < 0.01).cumsum(1).cuda()
    if "slopes" in rules:
        given["slopes"] = (0.5 ** torch.arange(1, H + 1)).cuda()
    if "bias" in rules:
        given["bias"] = torch.randn(1, H, T, T, generator=g).cuda()
    if "softcap" in rules:
        given["softcap"] = 3.0
    return Mask(**given)


def _run(m, inputs, mask, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    if mask.bias is not None and dtype is torch.float64:
        mask = mask.but(bias=mask.bias.double())
    out = m(*leaves, mask)
    grads = torch.autograd.grad((out * out.detach().cos()).sum(), leaves)
    return [x.double() for x in (out, *grads)]


# Each is compiled, which takes seconds: float16 and both directions are tried where they differ most.
CALLS = [(rules, True, torch.bfloat16) for rules in COMBINED]
CALLS += [(("padding",), True, torch.float16), (("padding", "window"), False, torch.bfloat16)]


@pytest.mark.parametrize(("rules", "causal", "dtype"), CALLS, ids=str)
def test_rules_are_the_reference(rules, causal, dtype):
    for seed, (T, K, V) in enumerate(((515, 64, 64), (640, 64, 64), (1031, 64, 64), (600, 64, 32))):
        g = torch.Generator().manual_seed(seed)
        B = 3
        shapes = ((B, H, T, K), (B, G, T, K), (B, G, T, V))
        inputs = [torch.randn(shape, generator=g).to(dtype).cuda() for shape in shapes]
        mask = _mask(rules, B, T, causal, seed)
        got = _run(fast(Softmax(), "flex"), inputs, mask, dtype)
        near = _run(plain(Softmax()), inputs, mask, dtype)
        truth = _run(plain(Softmax()), [x.double() for x in inputs], mask, torch.float64)
        scale = max(t.abs().max() for t in truth[1:])
        for n, (f, p, t) in enumerate(zip(got, near, truth, strict=True)):
            size = t.abs().max() if n == 0 else scale
            limit = (2 if n == 0 else 3) * max(difference(p, t, size), torch.finfo(dtype).eps / 2)
            assert difference(f, t, size) <= limit, (n, T, K, V, difference(f, t, size), limit)


def test_rows_that_see_nothing_are_zero_and_hidden_keys_may_be_nan():
    q, k, v = (torch.randn(2, H, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    visible = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    visible[0, :200] = False
    visible[1, 250:] = False
    k[0, :, :200] = torch.nan
    v[1, :, 250:] = torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fast(Softmax(), "flex")(*leaves, Mask(causal=True, visible=visible))
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert out.isfinite().all() and all(x.isfinite().all() for x in grads)
    assert (out[0, :, :200] == 0).all()
    assert (grads[1][0, :, :200] == 0).all() and (grads[2][1, :, 250:] == 0).all()


def test_many_rules_and_lengths_stay_compiled(monkeypatch):
    monkeypatch.setattr(flex, "LEAST_PAIRS", 0)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    for T, window, causal in itertools.product((4096, 4103, 5000, 8192), (64, 100, 256), (True, False)):
        x = torch.randn(1, 16, T, 64, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            fast(Softmax())(x, x, x, Mask(causal=causal, window=window))
    # Not compiled, 16 heads of 8,192² scores would take 4 GB and more.
    assert torch.cuda.max_memory_allocated() - start < 2**29


def test_a_padded_model_trains_as_its_reference_does():
    torch.manual_seed(0)
    model = GPT(vocabulary=50, width=128, layers=2, length=512, attention={"heads": 2}).cuda()
    tokens = torch.randint(0, 50, (4, 512), device="cuda")
    visible = torch.ones(4, 512, dtype=torch.bool, device="cuda")
    visible[0, 300:] = False
    visible[1, :100] = False
    found = []
    for choose in (plain, lambda m: fast(m, "flex")):
        choose(model).zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens, visible)
            logits[visible].logsumexp(-1).mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert difference(found[1], found[0], found[0].abs().max()) < 0.02


@pytest.mark.parametrize("T", [200, 1500])
def test_a_bias_in_float32_keeps_its_digits_in_a_half_precision_call(T):
    """In bfloat16 a score of 100 would be off by a quarter, and its weight by an eighth and more."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, H, T, 64, generator=g).bfloat16().cuda() for _ in range(3))
    mask = Mask(causal=True, bias=100 + torch.randn(1, H, T, T, generator=g).cuda())
    got = fast(Softmax(), "sdpa")(q, k, v, mask).double()
    truth = plain(Softmax())(q.double(), k.double(), v.double(), mask.but(bias=mask.bias.double()))
    assert difference(got, truth, truth.abs().max()) <= 2 * torch.finfo(torch.bfloat16).eps
