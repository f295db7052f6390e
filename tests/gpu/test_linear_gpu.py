"""Linear, quadratic and argmax attention in Triton: the law of kernels over dtypes, masks, sizes; repeats; length."""

import pytest
import torch

from regard.kernels import fast, plain
from regard.laws import LAWS, Case, Finding, ask, subject
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")


NAMES = [
    ("elu", {}, ("float32", "bfloat16", "float16")),
    ("linear", {}, ("float32", "bfloat16", "float16")),
    ("performer", {"features": 256}, ("float32", "bfloat16", "float16")),
    ("performer", {"features": 70}, ("bfloat16",)),
    ("fourier", {"features": 64}, ("bfloat16",)),
    ("quadratic", {}, ("bfloat16", "float16")),
    ("argmax", {}, ("bfloat16", "float16")),
    ("argmax", {"gradient": "straight_through"}, ("bfloat16",)),
]
SIZES = [
    {"B": 2, "T": 515, "K": 64, "V": 64, "H": 4, "G": 2},
    {"B": 2, "T": 333, "K": 64, "V": 48, "H": 4, "G": 4, "causal": False, "padding": "inside"},
    {"B": 2, "T": 301, "K": 37, "V": 19, "H": 2, "G": 2, "padding": "left"},
    {"B": 1, "T": 131, "K": 128, "V": 256, "H": 2, "G": 1, "padding": "right"},
    {"B": 1, "T": 60, "K": 64, "V": 64, "H": 2, "G": 1},
    {"B": 2, "T": 2, "K": 3, "V": 2, "H": 4, "G": 2},
]


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"T{s['T']}K{s['K']}V{s['V']}")
@pytest.mark.parametrize(
    ("name", "options", "dtype"), [(n, o, d) for n, o, ds in NAMES for d in ds], ids=lambda x: str(x)
)
def test_the_kernel_is_the_reference(name, options, dtype, size):
    if name == "argmax" or (name == "quadratic" and dtype != "bfloat16"):
        size = size | {"V": min(size["V"], 128)}  # the widest that it takes
    found = ask(LAWS["kernel"], subject(name, **options), Case(**size, dtype=dtype, device="cuda"))
    assert isinstance(found, Finding), found
    assert not found.broken, found


RANDOM = {"features": 256, "width": 64}


@pytest.mark.parametrize(
    ("name", "options"), [("elu", {}), ("performer", RANDOM), ("fourier", RANDOM), ("quadratic", {}), ("argmax", {})]
)
def test_250_repeats_have_the_same_bits(name, options):
    m = fast(mechanism(name, **options).cuda(), "triton")
    q, k, v = (torch.randn(2, 4, 2051, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    direction = torch.randn_like(v)
    first = None
    for _ in range(250):
        out = m(q, k, v, Mask(causal=True))
        grads = torch.autograd.grad((out * direction).sum(), (q, k, v), allow_unused=True)
        results = [out, *(x for x in grads if x is not None)]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.parametrize(("name", "options"), [("elu", {}), ("performer", {"features": 64, "width": 64})])
def test_a_million_tokens(name, options):
    """The last query sees them all; and its gradient reaches the first key."""
    N = 1 << 20
    m = mechanism(name, **options).cuda()
    q, k, v = (torch.randn(1, 1, N, 64, device="cuda", dtype=torch.bfloat16) / 4 for _ in range(3))
    v += torch.linspace(-1, 1, N, device="cuda", dtype=torch.bfloat16)[:, None]
    k.requires_grad_()
    out = fast(m, "triton")(q, k, v, Mask(causal=True))[:, :, -1:]
    got = torch.autograd.grad(out.float().sum(), k)[0]
    exact = k.detach().double().requires_grad_()
    last = plain(m)(q[:, :, -1:].double(), exact, v.double(), Mask())
    want = torch.autograd.grad(last.sum(), exact)[0]
    assert (out.double() - last).abs().max() <= 2**-7 * last.abs().max()
    assert (got.double() - want).abs().max() <= 3 * 2**-8 * want.abs().max()


def test_pieces_of_a_sequence_are_the_whole():
    m = fast(mechanism("performer", features=128, width=64).cuda(), "triton")
    q, k, v = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    state, outs = m.empty(Size(B=2, H=4, G=4, K=64, V=64, dtype=torch.bfloat16, device="cuda")), []
    for qs, ks, vs in zip(q.split(333, 2), k.split(333, 2), v.split(333, 2), strict=True):
        m.use = "triton" if qs.shape[2] > 1 else "auto"
        out, state = m.extend(qs, ks, vs, state)
        outs.append(out)
    m.use = "triton"
    whole = m(q, k, v, Mask(causal=True)).float()
    assert (torch.cat(outs, 2).float() - whole).abs().max() <= 2**-7 * whole.abs().max()


@pytest.mark.parametrize(
    ("name", "options"), [("elu", {}), ("performer", {"features": 128, "width": 64}), ("quadratic", {})]
)
def test_it_compiles_as_one_graph(name, options):
    m = fast(mechanism(name, **options).cuda(), "triton")
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    whole = torch.compile(lambda q, k, v: m(q, k, v, Mask(causal=True)), fullgraph=True)
    assert torch.equal(whole(q, k, v), m(q, k, v, Mask(causal=True)))
    whole(q, k, v).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize(("name", "options"), [("elu", {}), ("performer", {"features": 64, "width": 64})])
def test_a_graph_can_be_captured_and_leaves_nothing_behind(name, options):
    from regard.kernels.linear import directions

    m = fast(mechanism(name, **options).cuda().bfloat16(), "triton")
    q, k, v = (torch.randn(2, 2, 700, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = m(q, k, v, Mask(causal=True))  # compiles
    directions._IDENTITIES.clear()
    directions._SPLIT.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = m(q, k, v, Mask(causal=True))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)
    del graph, out
    assert torch.equal(m(q, k, v, Mask(causal=True)), want)


@pytest.mark.parametrize("name", ["performer", "fourier"])
def test_directions_of_a_bfloat16_model_are_taken_as_they_are(name):
    """In one part, where float32 directions take two or three: the same law for both."""
    for dtype in (torch.float32, torch.bfloat16):
        m = mechanism(name, features=64, width=64).cuda().to(dtype)
        assert m.w.dtype == dtype
        q, k, v = (torch.randn(2, 2, 515, 64, device="cuda", dtype=torch.bfloat16) / 2 for _ in range(3))
        got = fast(m, "triton")(q, k, v, Mask(causal=True)).double()
        want = plain(m)(q.double(), k.double(), v.double(), Mask(causal=True))
        assert (got - want).abs().max() <= 2**-6 * want.abs().max()


@pytest.mark.parametrize("gradient", ["none", "straight_through"])
def test_argmax_takes_memory_for_its_tokens_only(gradient):
    m = mechanism("argmax", gradient=gradient).cuda()
    q, k, v = (torch.randn(1, 4, 32768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    m(q, k, v, Mask(causal=True)).float().square().sum().backward()
    assert torch.cuda.max_memory_allocated() - start < 2**29  # one matrix of scores would take 16 GiB
    assert (q.grad is not None) == (gradient == "straight_through")
