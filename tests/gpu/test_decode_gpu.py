"""One more token on a GPU: each kernel against the reference, and whole generations, replayed as a CUDA graph."""

import pytest
import torch

from regard.generate import generate
from regard.kernels import fast, plain
from regard.mechanisms import fitted, fork, mechanisms
from regard.models import GPT
from regard.shapes import Mask, Size

pytestmark = pytest.mark.gpu
OPTIONS = {"performer": {"features": 70}, "fourier": {"features": 70}, "synthesizer-random": {"rank": 5}}
KERNELS = {name: "triton" for name in ("softmax", "elu", "linear", "performer", "fourier")}
KERNELS |= {"synthesizer": "in-place", "synthesizer-random": "in-place"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASES = [(name, dtype) for name in KERNELS for dtype in DTYPES if (name, dtype) != ("softmax", torch.float64)]


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")


@pytest.mark.parametrize("padded", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("B", [2, 40])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@torch.no_grad()
def test_a_step_is_the_reference(name, B, dtype, padded):
    torch.manual_seed(0)
    size = Size(B=B, S=203, H=4, G=2, K=24, V=40, dtype=dtype, device=torch.device("cuda"))
    m = fitted(name, size, **OPTIONS.get(name, {})).to("cuda", dtype)
    q, k, v = (torch.randn(B, n, 203, w, device="cuda").to(dtype) / 2 for n, w in ((4, 24), (2, 24), (2, 40)))
    seen = torch.rand(B, 200, device="cuda") > 0.3 if padded else None
    _, first = plain(m).extend(q[:, :, :200], k[:, :, :200], v[:, :, :200], m.empty(size), seen)
    outs = []
    for choose in (plain, lambda m: fast(m, KERNELS[name])):
        choose(m)
        state, found = type(first)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in first)), []
        for t in range(200, 203):
            out, state = m.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            found.append(out)
        outs.append(torch.cat(found, 2).double())
    loose = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert (outs[1] - outs[0]).abs().max() <= loose * outs[0].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 64, 65, 200])
@torch.no_grad()
def test_a_step_over_a_ring_is_the_reference(window, dtype):
    """The rows stand at different tokens, so that each has its own slot to overwrite; some blocks hold no other."""
    torch.manual_seed(0)
    size = Size(B=3, S=600, H=4, G=2, K=24, V=40, dtype=dtype, device=torch.device("cuda"))
    m = fitted("softmax", size)
    q, k, v = (torch.randn(3, n, 600, w, device="cuda").to(dtype) / 2 for n, w in ((4, 24), (2, 24), (2, 40)))
    seen = torch.rand(3, 300, device="cuda") > 0.3
    _, first = plain(m).extend(q[:, :, :300], k[:, :, :300], v[:, :, :300], m.empty(size, Mask(window=window)), seen)
    outs = []
    for choose in (plain, lambda m: fast(m, "triton")):
        choose(m)
        state, found = fork(first), []
        for t in range(300, 600):
            out, state = m.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            found.append(out)
        assert state.v.shape[2] == window
        outs.append(torch.cat(found, 2).double())
    loose = {torch.float32: 2e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert (outs[1] - outs[0]).abs().max() <= loose * outs[0].abs().max()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("name", sorted(set(mechanisms()) - {"linear"}))
def test_generating_as_a_graph_writes_what_the_reference_writes(name, position, window):
    torch.manual_seed(1)
    options = {"features": 16} if name in ("performer", "fourier") else {}
    attention = {"heads": 3, "window": window}
    stack = {"width": 48, "layers": 2, "length": 96, "position": position, "attention": attention, "options": options}
    model = GPT(vocabulary=50, mechanism=name, **stack)
    for x in model.parameters():
        x.data += torch.randn_like(x) * 0.1
    model = model.double().eval().cuda()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    want = [r.tokens for r in generate(plain(model), prompts, max_tokens=64)]
    assert [r.tokens for r in generate(fast(model), prompts, max_tokens=64)] == want
    assert len({token for tokens in want for token in tokens}) > 5  # it writes more than one word over and over
