"""One more token on a GPU: each kernel against the reference, and whole generations, replayed as a CUDA graph."""

from copy import deepcopy

import pytest
import torch

from regard.generate import generate
from regard.generate.fused import FusedStep, refuse_fused_step
from regard.generate.graph import _fix_shapes
from regard.generate.greedy import Greedy, pick_likeliest
from regard.kernels import fast, plain
from regard.mechanisms import fitted, fork, mechanisms
from regard.models import GPT
from regard.nn.positions import alibi_slopes
from regard.shapes import Mask, Size

pytestmark = pytest.mark.gpu
OPTIONS = {"performer": {"features": 70}, "fourier": {"features": 70}, "synthesizer-random": {"rank": 5}}
KERNELS = {name: "triton" for name in ("softmax", "elu", "linear", "performer", "fourier")}
KERNELS |= {"synthesizer": "in-place", "synthesizer-random": "in-place"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FUSED = {
    "gpt2": {"attention": {"heads": 3}},
    "llama": {
        "position": "rotary",
        "attention": {"heads": 4, "groups": 2, "window": 50},
        "block": {"norm": "rms", "mlp": "swiglu", "bias": False},
        "tied": False,
    },
    "alibi": {"position": "alibi", "attention": {"heads": 4, "groups": 1}, "block": {"mlp": "gelu"}},
}
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", ["slopes", "softcap", "both"])
@pytest.mark.parametrize(("heads", "window", "B"), [((4, 4), None, 3), ((4, 2), 65, 3), ((16, 1), None, 40)])
@torch.no_grad()
def test_a_step_with_slopes_and_softcap_is_the_reference(heads, window, B, rules, dtype):
    torch.manual_seed(0)
    H, G = heads
    slopes = alibi_slopes(H).float().cuda() if rules != "softcap" else None
    mask = Mask(window=window, slopes=slopes, softcap=1.5 if rules != "slopes" else None)
    size = Size(B=B, S=203, H=H, G=G, K=24, V=40, dtype=dtype, device=torch.device("cuda"))
    m = fitted("softmax", size)
    q, k, v = (torch.randn(B, n, 203, w, device="cuda").to(dtype) for n, w in ((H, 24), (G, 24), (G, 40)))
    seen = torch.rand(B, 200, device="cuda") > 0.3
    _, first = plain(m).extend(q[:, :, :200], k[:, :, :200], v[:, :, :200], m.empty(size, mask), seen)
    outs = []
    for choose in (plain, lambda m: fast(m, "triton")):
        choose(m)
        state, found = fork(first), []
        for t in range(200, 203):
            out, state = m.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            found.append(out)
        outs.append(torch.cat(found, 2).double())
    loose = {torch.float32: 2e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert (outs[1] - outs[0]).abs().max() <= loose * outs[0].abs().max()


@pytest.mark.parametrize("B", [1, 9, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", sorted(FUSED))
@torch.inference_mode()
def test_a_fused_step_is_the_step_of_the_model(model, dtype, B):
    """In half precision its error against float64 is at most twice that of the model's own step."""
    torch.manual_seed(0)
    gpt = GPT(vocabulary=301, width=192, layers=2, length=192, **FUSED[model]).eval().cuda()
    for x in gpt.parameters():
        x.data = (x.data + torch.randn_like(x) * 0.05).to(dtype)
    exact = deepcopy(gpt).double()
    gpt = gpt.to(dtype)
    prompt = torch.randint(0, 301, (B, 90), device="cuda")
    visible = torch.rand(B, 90, device="cuda") > 0.2
    visible[:, -1] = True
    _, state = gpt.prefill(prompt, visible, 40)
    _, truth = exact.prefill(prompt, visible, 40)
    fixed = _fix_shapes(gpt.fork(state), 130)
    assert refuse_fused_step(gpt, fixed) is None
    step = FusedStep(gpt, B)
    errors = []
    for _ in range(3):
        tokens = torch.randint(0, 301, (B, 1), device="cuda")
        want, truth = exact.extend(tokens, truth, last=True)
        own, state = gpt.extend(tokens, state, last=True)
        fused = step(tokens, fixed)
        fixed.tokens.add_(1)
        errors.append([float((x - want).abs().max() / want.abs().max()) for x in (own, fused)])
    worst_own, worst_fused = (max(found) for found in zip(*errors, strict=True))
    assert worst_fused <= (2e-5 if dtype == torch.float32 else 2 * worst_own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_greedy_tokens_and_scores_are_those_of_the_logits(dtype):
    logits = torch.randn(5, 50257, device="cuda").to(dtype)
    logits[0, [7, 40000]] = 9.0
    found = Greedy(torch.zeros(5, dtype=torch.long, device="cuda"), torch.zeros(5, device="cuda"))
    pick_likeliest(logits, found)
    logp = logits.double().log_softmax(-1)
    assert found.tokens[0] == 7  # the first of equal ones
    assert torch.equal(logits.gather(1, found.tokens[:, None])[:, 0], logits.amax(1))
    assert (found.logp - logp.amax(1)).abs().max() < 1e-5


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("model", sorted(FUSED))
def test_generating_with_a_fused_graph_writes_what_the_reference_writes(model, settings):
    """In float32, where the likeliest tokens of these weights are not in doubt."""
    torch.manual_seed(1)
    gpt = GPT(vocabulary=50, width=48, layers=2, length=96, **FUSED[model]).eval().cuda()
    for x in gpt.parameters():
        x.data += torch.randn_like(x) * 0.1
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    want = generate(plain(gpt), prompts, max_tokens=64, **settings)
    found = generate(fast(gpt), prompts, max_tokens=64, **settings)
    assert [r.tokens for r in found] == [r.tokens for r in want]
    for ours, theirs in zip(found, want, strict=True):
        assert abs(ours.choices[0].score - theirs.choices[0].score) < 1e-3


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize(
    "name", sorted(name for name, cls in mechanisms().items() if name != "linear" and not cls.causal_only)
)
def test_generating_as_a_graph_writes_what_the_reference_writes(name, position, window):
    torch.manual_seed(10)  # of those tried, the first with which every model writes more than one word
    options = {"features": 16} if name in ("performer", "fourier") else {}
    attention = {"heads": 3, "window": window}
    stack = {"width": 48, "layers": 2, "length": 96, "position": position, "attention": attention, "options": options}
    model = GPT(vocabulary=50, mechanism=name, **stack)
    for x in model.parameters():
        x.data += torch.randn_like(x) * 0.3
    model = model.double().eval().cuda()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    want = [r.tokens for r in generate(plain(model), prompts, max_tokens=64)]
    assert [r.tokens for r in generate(fast(model), prompts, max_tokens=64)] == want
    assert len({token for tokens in want for token in tokens}) > 5  # it writes more than one word over and over
