"""Gated and delta attention on a GPU, in Triton and by flash-linear-attention, against the reference."""

import pytest
import torch
from torch.nn import functional

from regard.kernels import fast, plain
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")


def _draw(B, queries, keys, G, T, K, V, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, T, w, device="cuda") for n, w in ((queries, K), (keys, K), (G, V)))
    k = functional.normalize(k, dim=-1)
    a = -functional.softplus(torch.randn(B, G, T, device="cuda") * 2 - 2)
    return [x.to(dtype) for x in (q, k, v)], a


def _error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max())


SIZES = [(2, 4, 4, 4, 1000, 128, 128), (1, 8, 2, 2, 4097, 64, 64), (2, 2, 2, 4, 333, 96, 37), (1, 1, 1, 1, 2, 5, 3)]


def _judge(kernel, name, options, dtype, size, hides):
    """Outputs and gradients of a kernel are as near to float64 as those of the reference in the same precision."""
    tensors, a = _draw(*size, dtype)
    B, queries, _, G, T, K, V = size
    seen = None
    if hides:
        seen = torch.rand(B, T, device="cuda") > 0.3
        seen[:, -1] = True
    given = {"a": a, "b": torch.rand(B, G, T, device="cuda")}
    if options.get("channels"):
        given["a"] = -functional.softplus(torch.randn(B, G, T, K, device="cuda") * 2 - 2)
    direction = torch.randn(B, max(queries, G), T, V, device="cuda")
    results = []
    for choose, exact in ((plain, torch.float64), (plain, dtype), (lambda m: fast(m, kernel), dtype)):
        m = choose(mechanism(name, checks=False, **options))
        inputs = [x.detach().to(exact).requires_grad_() for x in tensors]
        gates = {n: x for n, x in given.items() if n in m.needs}
        gates = {n: x.to(torch.promote_types(exact, torch.float32)).detach().requires_grad_() for n, x in gates.items()}
        out = m(*inputs, Mask(causal=True, visible=seen), **gates)
        grads = torch.autograd.grad((out * direction).sum(), [*inputs, *gates.values()])
        results.append([out, *grads])
    eps = torch.finfo(dtype).eps
    for n, (want, like, got) in enumerate(zip(*results, strict=True)):
        # The decays are float32 whatever the inputs are, and the products behind their gradient are not.
        allowed = max((2 if n == 0 else 3) * _error(like, want), eps if n < 4 else 2 * eps)
        assert _error(got, want) <= allowed, (n, _error(got, want), allowed)


@pytest.mark.parametrize("name", ["gated", "retention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("hides", [False, True])
def test_sequences(name, dtype, size, hides):
    _judge("triton", name, {}, dtype, size, hides)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("retention", {}),
        ("gated", {}),
        ("gated", {"channels": True}),
        ("delta", {}),
        ("gated-delta", {}),
        ("gated-delta", {"channels": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES[:3], ids=str)
@pytest.mark.parametrize("hides", [False, True])
def test_sequences_by_flash_linear_attention(name, options, dtype, size, hides):
    pytest.importorskip("fla")
    _judge("fla", name, options, dtype, size, hides)


def test_a_long_sequence_in_segments_has_the_same_bits_each_time():
    (q, k, v), a = _draw(1, 2, 2, 2, 65536, 128, 128, torch.bfloat16)
    m = fast(mechanism("gated"), "triton")
    first = m(q, k, v, Mask(causal=True), a=a)
    assert all(torch.equal(first, m(q, k, v, Mask(causal=True), a=a)) for _ in range(50))
    assert (
        _error(first[:, :, :4096], plain(m)(*(x[:, :, :4096] for x in (q, k, v)), Mask(causal=True), a=a[:, :, :4096]))
        < 0.02
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("retention", {}), ("gated", {}), ("gated", {"channels": True}), ("delta", {"range": 2.0}), ("gated-delta", {})],
)
@pytest.mark.parametrize("kernel", ["triton", "fla"])
def test_single_tokens_also_in_a_graph(kernel, name, options):
    if kernel == "fla":
        pytest.importorskip("fla")
    B, G, K, V = 3, 4, 128, 128
    (q, k, v), a = _draw(B, 8, 2, G, 40, K, V, torch.bfloat16)
    if options.get("channels"):
        a = -functional.softplus(torch.randn(B, G, 40, K, device="cuda"))
    b = torch.rand(B, G, 40, device="cuda")
    results = []
    with torch.no_grad():
        for choose in (plain, lambda m: fast(m, kernel)):
            m = choose(mechanism(name, checks=False, **options))
            needs = {n: x for n, x in (("a", a), ("b", b)) if n in m.needs}
            state = m.empty(Size(B=B, H=8, G=G, K=K, V=V, dtype=torch.bfloat16, device="cuda"))
            outs = []
            for t in range(40):
                here = slice(t, t + 1)
                now = {n: x[:, :, here] for n, x in needs.items()}
                out, state = m.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, **now)
                outs.append(out)
            results.append([torch.cat(outs, 2), state.memory])
        for want, got in zip(*results, strict=True):
            assert _error(got, want) <= 2**-8
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again, _ = m.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, **now)
        graph.replay()
        eager, _ = m.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, **now)
        assert torch.equal(again, eager)
